"""What a smoke test runs, what it reports, and how far a device may deviate from the CPU. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_exo.accounting import ModelSizes

VARIANTS = ("e-exoformer", "dynamic-e-exoformer", "e-nuresformer")
"""One with static mixing, one with dynamic mixing, one with an internal anchor: every module of the model is in one."""
BACKENDS = ("local", "transformer_engine")
DTYPES = ("fp32", "bf16")

STEPS = 20
RESUMED_STEPS = 5
STAGES = ("build", "forward", "backward", f"{STEPS} steps", "save+resume", "timing")
"""In the order in which they run; an exception ends a case, a deviation does not."""


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    model: ModelSizes
    batch_size: int
    """Sequences per step of everything that is compared with the CPU."""
    timed_batch_size: int
    """Sequences per step when steps are timed."""
    learning_rate: float


SIZES = {
    "small": Size(
        ModelSizes(
            num_layers=3,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=16,
            ffn_hidden_size=128,
            vocab_size=256,
            seq_length=64,
        ),
        batch_size=2,
        timed_batch_size=2,
        learning_rate=3e-3,
    ),
    "medium": Size(
        ModelSizes(
            num_layers=8,
            hidden_size=1024,
            num_attention_heads=16,
            num_query_groups=16,
            kv_channels=64,
            ffn_hidden_size=2048,
            vocab_size=8192,
            seq_length=1024,
        ),
        batch_size=1,  # the CPU takes these steps too
        timed_batch_size=8,
        learning_rate=3e-4,
    ),
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    variant: str
    backend: str
    dtype: str
    size: str

    def __str__(self) -> str:
        return f"{self.variant} {self.backend} {self.dtype}"


@dataclass(frozen=True)
class Bounds:
    """The largest deviations from the CPU's float32 that pass."""

    loss: float
    """Of the first loss, absolute."""
    logits: float
    """Root mean square of the difference over that of the logits."""
    gradient: float
    """Norm of the difference over the norm, of the parameter where it is largest."""
    training: float
    """Of any of the losses of the steps, absolute."""
    resume: float
    """Of any loss after the resume from the uninterrupted run on the same device, absolute."""


BOUNDS = {
    "fp32": Bounds(loss=1e-4, logits=1e-4, gradient=1e-3, training=1e-3, resume=1e-4),
    "bf16": Bounds(loss=3e-2, logits=3e-2, gradient=1.4e-1, training=3e-2, resume=1e-2),
}
SAME_DEVICE = Bounds(loss=1e-6, logits=1e-6, gradient=1e-5, training=1e-5, resume=1e-6)


@dataclass(frozen=True)
class Deviation:
    """How far one quantity is from what it should be."""

    quantity: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # NaN does not pass

    def __str__(self) -> str:
        return f"{self.quantity} {self.value:.1e} (bound {self.bound:.0e})"


@dataclass
class Result:
    """What came of one case."""

    case: Case
    stages: dict[str, list[Deviation]] = field(default_factory=dict)
    """The stages that ran to their end; those that are missing did not."""
    error: str | None = None
    """The last line of the exception that ended the case, or what became of its process."""
    traceback: str = ""
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    """Largest amount allocated on the device, all stages; ``None`` on the CPU."""

    @property
    def passed(self) -> bool:
        return self.error is None and all(deviation.passed for deviation in self.deviations())

    def deviations(self) -> list[Deviation]:
        return [deviation for stage in self.stages.values() for deviation in stage]

    def verdict(self, stage: str) -> str:
        """``pass``, ``FAIL``, or ``-`` for a stage that was not reached."""
        if stage in self.stages:
            return "pass" if all(deviation.passed for deviation in self.stages[stage]) else "FAIL"
        reached = STAGES.index(stage) == len(self.stages)
        return "FAIL" if reached else "-"

    def worst(self) -> Deviation | None:
        """The deviation that comes nearest to its bound, or exceeds it most."""
        return max(self.deviations(), key=_use_of_bound, default=None)


def _use_of_bound(deviation: Deviation) -> float:
    if math.isnan(deviation.value):
        return math.inf
    if deviation.bound == 0:
        return math.inf if deviation.value else 0.0
    return deviation.value / deviation.bound
