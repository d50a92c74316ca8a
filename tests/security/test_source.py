"""No source file has a way to execute what it reads: no shell, no eval, no pickle, no torch.load of objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(path for folder in ("megatron_exo", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(path for folder in ("tools", "examples", "tests") for path in (ROOT / folder).glob("*.sh"))

FORBIDDEN = {
    "eval", "exec", "__import__", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "dill.loads", "joblib.load", "cloudpickle.load", "cloudpickle.loads", "torch.jit.load",
    "torch.hub.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path", "numpy.fromstring",
}  # fmt: skip


def violations(source: str) -> Iterator[str]:
    """What in a piece of source could execute what it is given, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name in FORBIDDEN:
                yield f"line {node.lineno}: {name}"
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (f"line {node.lineno}: import of {name}" for name in names if name in FORBIDDEN)
        if isinstance(node, ast.Call):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and options.get("weights_only") != "True":
                yield f"line {node.lineno}: torch.load without weights_only=True"
            for option in ("shell", "allow_pickle", "trust_remote_code"):
                if options.get(option, "False") != "False":
                    yield f"line {node.lineno}: {called}({option}={options[option]})"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_read_can_be_executed(path: Path) -> None:
    assert not list(violations(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_evaluates_text(path: Path) -> None:
    words = path.read_text(encoding="utf-8").split()
    assert not {"eval", "curl", "wget"} & set(words)


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.system('true')",
        "import subprocess; subprocess.run('true', shell=True)",
        "eval('1')",
        "import pickle; pickle.loads(b'')",
        "from pickle import loads",
        "class Reader(pickle.Unpickler): pass",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(file, Loader=yaml.Loader)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_what_could_be_executed_is_seen(source: str) -> None:
    assert list(violations(source))


def test_harmless_uses_are_not_taken_for_it() -> None:
    source = "re.compile('x'); model.eval(); torch.load(path, weights_only=True); subprocess.run(['true'], shell=False)"
    assert not list(violations(source))
