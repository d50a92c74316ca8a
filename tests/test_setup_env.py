"""``tools/setup_env.sh`` in a copy of the tree, with stub Pythons: which one it takes, and when it installs what."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A Python that answers the version question, makes a virtual environment out of copies of itself, and writes down what
# it was asked to do. `-m pip install` waits for the file `hold` to go away and fails while the file `pip_fails` exists.
STUB = """#!/bin/sh
case "$*" in
*print*get_path*) echo /site-packages ;;
*print*) echo "VERSION $0" ;;
*"-m venv"*)
    for folder; do :; done
    rm -rf "$folder" && mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && echo VERSION >"$folder/pyvenv.cfg"
    echo "venv by $0" >>LOG/calls ;;
*"pip install"*)
    echo "pip ${*##* --progress-bar off }" >>LOG/calls
    while [ -e LOG/hold ]; do sleep 0.05; done
    [ ! -e LOG/pip_fails ] ;;
esac
"""


class Tree:
    """A copy of what the script reads, with a home, a PATH and a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "tree", folder / "bin", folder / "log"
        for needed in (self.root / "tools", self.bin, self.log):
            needed.mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "tools/setup_env.sh"):
            shutil.copy(ROOT / name, self.root / name)
        # Shims that exist and fail, as pyenv's do; they hide whatever Python the machine has.
        for name in ("python3", "python3.12", "python3.13", "nvidia-smi"):
            self.script(self.bin / name, "#!/bin/sh\nexit 127\n")
        self.stamp = self.root / ".venv/megatron_exo.stamp"
        path = f"{self.bin}:/usr/bin:/bin"
        self.environ = {"PATH": path, "HOME": str(folder / "home"), "PYENV_ROOT": str(folder / "pyenv")}

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, path: Path | str, version: str = "3.12") -> Path:
        text = STUB.replace("VERSION", version).replace("LOG", str(self.log))
        return self.script(self.bin / path, text)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.root / "tools/setup_env.sh"), *arguments]
        return subprocess.Popen(
            command, env=self.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str, **environ: str) -> str:
        process = self.start(*arguments, **environ)
        output, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        return output

    def refusal(self, *arguments: str, **environ: str) -> str:
        """Run; return the one line with which the script refused."""
        process = self.start(*arguments, **environ)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        (line,) = error.splitlines()
        return line

    def calls(self) -> list[str]:
        """What was done since the last question."""
        file = self.log / "calls"
        lines = file.read_text().replace(str(self.root), "ROOT").splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def wait_for_pip(self) -> None:
        deadline = time.monotonic() + 60
        while not ((self.log / "calls").exists() and "pip" in (self.log / "calls").read_text()):
            assert time.monotonic() < deadline, "pip was not started"
            time.sleep(0.02)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def ready(tree: Tree) -> Tree:
    """A tree whose .venv is complete, with the extra ``dev``."""
    tree.python("python3")
    tree.run("dev")
    tree.calls()
    return tree


@pytest.mark.parametrize("name", ["python3", "python3.12", "python3.13"])
def test_a_python_on_path_is_found_behind_shims_that_fail(tree: Tree, name: str) -> None:
    python = tree.python(name, "3.13" if name == "python3.13" else "3.12")
    assert tree.run("--print-python") == f"{python}\n"


@pytest.mark.parametrize("version", ["2.7", "3.1", "3.11", "3.14", "3.120"])
def test_a_python_of_another_version_is_passed_over(tree: Tree, version: str) -> None:
    tree.python("python3", version)
    python = tree.python("python3.13", "3.13")
    assert tree.run("--print-python") == f"{python}\n"


def test_versions_of_pyenv_are_found(tree: Tree, tmp_path: Path) -> None:
    tree.python(tmp_path / "pyenv/versions/3.11.9/bin/python", "3.11")
    python = tree.python(tmp_path / "pyenv/versions/3.13.0/bin/python", "3.13")
    assert tree.run("--print-python") == f"{python}\n"


def test_versions_of_uv_are_found(tree: Tree, tmp_path: Path) -> None:
    python = tree.python(tmp_path / "home/.local/share/uv/python/cpython-3.12.11-linux-x86_64-gnu/bin/python3")
    assert tree.run("--print-python") == f"{python}\n"


def test_the_variable_python_comes_first(tree: Tree, tmp_path: Path) -> None:
    tree.python("python3")
    chosen = tree.python(tmp_path / "chosen", "3.13")
    assert tree.run("--print-python", PYTHON=str(chosen)) == f"{chosen}\n"


def test_an_unsuitable_variable_python_is_refused_although_another_is_there(tree: Tree, tmp_path: Path) -> None:
    tree.python("python3")
    old = tree.python(tmp_path / "old", "3.11")
    assert f"PYTHON={old} is not a working Python 3.12 or 3.13" in tree.refusal("--print-python", PYTHON=str(old))


def test_without_any_python_one_line_says_what_to_install(tree: Tree) -> None:
    line = tree.refusal("dev")
    assert "no Python 3.12 or 3.13" in line
    assert "apt install python3.12-venv" in line
    assert not (tree.root / ".venv").exists()


def test_the_first_call_makes_a_venv_and_installs_the_extras(tree: Tree) -> None:
    python = tree.python("python3")
    output = tree.run("dev", "hf")
    assert tree.calls() == [f"venv by {python}", "pip --editable ROOT[dev,hf]"]
    assert "6 GB" in output


def test_a_second_call_does_nothing(ready: Tree) -> None:
    assert ready.run("dev") == ""
    assert ready.run() == ""
    assert ready.calls() == []


def test_extras_add_to_those_that_are_there(ready: Tree) -> None:
    ready.run("muon")
    assert ready.calls() == ["pip --editable ROOT[dev,muon]"]
    ready.run("dev")
    assert ready.calls() == []


@pytest.mark.parametrize("name", ["setup.py", "pyproject.toml"])
def test_a_change_of_the_requirements_installs_again(ready: Tree, name: str) -> None:
    with (ready.root / name).open("a") as file:
        file.write("# changed\n")
    ready.run()
    assert ready.calls() == ["pip --editable ROOT[dev]"]


def test_a_tree_that_was_moved_installs_again(ready: Tree) -> None:
    ready.root = ready.root.rename(ready.root.with_name("moved"))
    ready.run()
    assert ready.calls() == ["pip --editable ROOT[dev]"]


def test_a_working_venv_of_somebody_else_is_kept(tree: Tree) -> None:
    tree.python(tree.root / ".venv/bin/python")
    (tree.root / ".venv/pyvenv.cfg").touch()
    tree.run("dev")
    assert tree.calls() == ["pip --editable ROOT[dev]"]


def test_a_half_made_venv_is_made_anew(tree: Tree) -> None:
    python = tree.python("python3")
    (tree.root / ".venv/bin").mkdir(parents=True)
    (tree.root / ".venv/bin/python").symlink_to("/no/such/python")
    tree.run("dev")
    assert tree.calls() == [f"venv by {python}", "pip --editable ROOT[dev]"]


def test_an_interrupted_installation_is_made_anew_with_what_it_wanted(ready: Tree) -> None:
    (ready.log / "hold").touch()
    process = ready.start("hf")
    ready.wait_for_pip()
    process.send_signal(signal.SIGTERM)
    (ready.log / "hold").unlink()
    assert "interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    ready.calls()
    ready.run()
    assert ready.calls() == [f"venv by {ready.bin / 'python3'}", "pip --editable ROOT[dev,hf]"]


def test_a_failed_pip_is_reported_and_loses_nothing(ready: Tree) -> None:
    (ready.log / "pip_fails").touch()
    assert "pip failed" in ready.refusal("hf")
    (ready.log / "pip_fails").unlink()
    ready.calls()
    ready.run("muon")
    assert ready.calls() == ["pip --editable ROOT[dev,muon]"]


def test_another_python_than_the_one_of_the_venv_is_refused(ready: Tree, tmp_path: Path) -> None:
    other = ready.python(tmp_path / "other", "3.13")
    line = ready.refusal("dev", PYTHON=str(other))
    assert "has Python 3.12" in line
    assert "is 3.13" in line
    assert ready.run("dev", PYTHON=str(ready.bin / "python3")) == ""


@pytest.mark.parametrize("argument", ["mouon", "--upgrade"])
def test_unknown_arguments_are_refused_before_anything_is_made(tree: Tree, argument: str) -> None:
    tree.python("python3")
    assert argument in tree.refusal(argument)
    assert not (tree.root / ".venv").exists()


def test_an_unknown_extra_is_answered_with_the_known_ones(tree: Tree) -> None:
    assert "te deepspeed mpi muon hf eval logging dev" in tree.refusal("mouon")


def test_transformer_engine_is_refused_without_a_gpu(ready: Tree) -> None:
    assert "no CUDA GPU" in ready.refusal("dev", "te")
    assert ready.calls() == []


def test_transformer_engine_is_compiled_against_the_torch_that_is_installed_before(ready: Tree) -> None:
    ready.script(ready.bin / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    ready.run("te")
    base, *_, engine = ready.calls()
    assert base == "pip --editable ROOT[dev]"
    assert engine == "pip --no-build-isolation --editable ROOT[te]"


@pytest.mark.skipif(shutil.which("flock") is None, reason="concurrent calls are only kept apart where flock exists")
def test_of_two_calls_at_once_only_one_installs(tree: Tree) -> None:
    tree.python("python3")
    (tree.log / "hold").touch()
    first = tree.start("dev")
    tree.wait_for_pip()
    second = tree.start("dev")
    assert second.stdout is not None
    assert "waiting for another" in second.stdout.readline()
    (tree.log / "hold").unlink()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(tree.calls()) == 2  # one venv, one pip


def test_the_scripts_can_be_run_and_parse() -> None:
    for name in ("tools/setup_env.sh", "tests/run.sh", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / name], check=True)
