"""Which backend each part of a training run would use here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_exo.doctor.inspector import Inspector
from megatron_exo.doctor.probes import Finding


@dataclass(frozen=True)
class Choice:
    """The backend that one part of a training run would use here, and why."""

    part: str
    backend: str
    reason: str


def choose_backends(inspector: Inspector, findings: Sequence[Finding]) -> list[Choice]:
    """What a training run would use here, given the findings; empty where torch does not work."""
    torch, gpu = inspector.torch, inspector.on_gpu
    if torch.error:
        return []
    working = {finding.part for finding in findings if finding.status == "ok"}
    if gpu:
        device = Choice("device", "cuda", f"{len(torch.devices)} x {torch.devices[0]}")
    else:
        device = Choice("device", "cpu", "MEGATRON_EXO_DEVICE=cpu" if torch.devices else "torch sees no CUDA device")
    if gpu and "Transformer Engine" in working:
        layers = Choice("layers", "transformer_engine", "installed, on CUDA")
        attention, norm, adam = (f"Transformer Engine's {name}" for name in ("fused attention", "RMSNorm", "FusedAdam"))
    else:
        layers = Choice("layers", "local", f"Transformer Engine {'is not usable' if gpu else 'needs CUDA'}")
        attention, norm = "torch's SDPA", "megatron_exo's RMSNorm"
        adam = "Apex's FusedAdam" if gpu and "NVIDIA Apex" in working else "megatron_exo's FusedAdam over torch"
    tokenizers = {"SentencePiece": "sentencepiece", "Hugging Face": "transformers"}
    usable = [name for name, part in tokenizers.items() if part in working]
    return [
        device,
        Choice("communication", "nccl" if gpu else "gloo", f"tensors are on {'GPUs' if gpu else 'CPUs'}"),
        layers,
        Choice("attention", attention, "follows the layers"),
        Choice("norm", norm, "follows the layers"),
        Choice("adam", adam, "Transformer Engine's, else Apex's, else ours"),
        Choice("tokenizers", ", ".join(usable) or "none", "sentencepiece and transformers, as installed"),
    ]
