"""What a smoke test runs, what it reports, and how far a device may deviate from the CPU. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_exo.sizes import ModelSizes

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
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=8,
            ffn_hidden_size=64,
            vocab_size=128,
            seq_length=32,
        ),
        batch_size=2,
        timed_batch_size=2,
        learning_rate=1e-3,
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
    """The largest deviations that pass: from the CPU's float32, but for ``resume``."""

    loss: float
    """Of the loss before training, absolute."""
    logits: float
    """Norm of the difference over the norm, all logits together."""
    gradient: float
    """Norm of the difference over the norm, of the parameter where that is largest."""
    training: float
    """Of the loss at any of the steps, absolute."""
    resume: float
    """Of the loss at any step after the resume from the same steps without one, on the same device, absolute."""


BOUNDS = {
    # Another order of summation changes float32 results by about 1e-6. A change of the weights by ten times that moves
    # the losses of the small model by at most 3e-4 in 20 steps; TF32 or a wrong term moves them by more than 1e-3.
    "fp32": Bounds(loss=1e-4, logits=1e-4, gradient=1e-3, training=1e-3, resume=1e-3),
    # bfloat16 keeps 8 bits (4e-3). On CPUs, models of three and of eight layers deviate by up to 3% in the logits, 11%
    # in the gradient of the worst parameter (the biases of a dynamic mixing), 0.03 in the losses of 20 steps.
    # A relative error of 0.2 is a cosine of 0.98 where lengths agree.
    "bf16": Bounds(loss=3e-2, logits=6e-2, gradient=2e-1, training=5e-2, resume=3e-2),
}
"""For comparison: a resume that forgets Adam's moments was off by 0.1 in loss after one step and by 1 after four."""

SAME_DEVICE = Bounds(loss=1e-6, logits=1e-6, gradient=1e-5, training=1e-5, resume=1e-6)
"""For float32 on the CPU against itself: nothing but threads may change the order of a sum."""


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
        return f"{self.quantity} {self.value:.1e} (bound {self.bound:g})"


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
        """``pass``, ``FAIL``, or ``-`` for a stage after the one that an error ended."""
        if stage in self.stages:
            return "pass" if all(deviation.passed for deviation in self.stages[stage]) else "FAIL"
        return "FAIL" if STAGES.index(stage) == len(self.stages) else "-"

    def worst(self) -> Deviation | None:
        """The deviation that comes nearest to its bound, or exceeds it most."""
        return max(self.deviations(), key=_use_of_bound, default=None)


def _use_of_bound(deviation: Deviation) -> float:
    if math.isnan(deviation.value):
        return math.inf
    if deviation.bound == 0:
        return math.inf if deviation.value else 0.0
    return deviation.value / deviation.bound
