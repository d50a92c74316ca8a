"""The paper's Muon as numbers: what Megatron's own options cannot say, and the defaults of those that can."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

SPLITS = ("fused", "per-component", "per-head")
"""What of a packed projection counts as one matrix: all its rows, those of Q, K, V or G, or those of one head."""

COEFFICIENTS = "exoformer"
"""The name under which Megatron finds :data:`POLAR_EXPRESS`."""

POLAR_EXPRESS = (
    (8.15655452490246 / 1.02, -22.48329292557795 / 1.02**3, 15.87876991520746 / 1.02**5),
    (4.042929935166733, -2.808917465908709, 0.5000178451051306),
    (3.891667802292664, -2.772484153217687, 0.506064817850340),
    (3.285753657755656, -2.368129493342540, 0.464490242330032),
    (2.346541325859637, -1.709782838268708, 0.423235511693052),
)
"""Coefficients (a, b, c) of ``a X + b X Xᵀ X + c (X Xᵀ)² X``, one step after another, as the author's curves need them.

They follow from Polar Express (arXiv 2505.16932): the best composition of five odd quintics on singular values from
1e-3 to 1, no interval taken narrower than 0.02 of its end, and values assumed up to 2% too large after every step but
the last. A matrix of norm 1 enters as one of norm 1/1.02, which the first step has in it. The table of the same
name in the package emerging-optimizers assumes 1%.
"""

MEGATRON_DEFAULTS: dict[str, object] = {
    "muon_momentum": 0.95,
    "muon_nesterov": True,
    "muon_scale_mode": "shape_scaling",  # √max(1, rows/columns)
    "muon_coefficient_type": COEFFICIENTS,
    "muon_num_ns_steps": len(POLAR_EXPRESS),
    "muon_tp_mode": "duplicated",  # Megatron's own default makes the update depend on the tensor-parallel size
}
"""Defaults of Megatron's options for Muon."""

RATES: dict[str, float] = {"lr": 0.01, "weight_decay": 0.1}
"""Defaults of options that other optimizers have as well."""

MUON_OPTIONS = {
    "split": "exo_muon_split",
    "momentum_start": "exo_muon_momentum_start",
    "momentum_warmup": "exo_muon_momentum_warmup",
    "momentum_cooldown": "exo_muon_momentum_cooldown",
    "beta2": "exo_muon_beta2",
    "adam_lr": "exo_adam_lr",
}
"""Field of :class:`MuonRecipe` → argument."""

ARGUMENTS = tuple(MUON_OPTIONS.values())


@dataclass(frozen=True)
class MuonRecipe:
    """What the author's recipe has beside Megatron's options.

    Args:
        split: one of :data:`SPLITS`.
        momentum_start: where the momentum begins and ends.
        momentum_warmup: over how many of the first updates it rises to ``--muon-momentum``.
        momentum_cooldown: over how many of the last updates it falls again.
        beta2: decay of the second moment.
        adam_lr: highest learning rate of AdamW, which has what Muon has not.
        adam_min_lr: its lowest.
        num_updates: of the whole run; ``None``: it has no end, and the momentum does not fall.
    """

    split: str = "fused"
    momentum_start: float = 0.85
    momentum_warmup: int = 100
    momentum_cooldown: int = 100
    beta2: float = 0.95
    adam_lr: float = 0.003
    adam_min_lr: float = 0.0
    num_updates: int | None = None

    def momentum(self, update: int, peak: float) -> float:
        """Of one update, counted from 0: a function of its number alone, so that a resumed run goes on as before."""
        shares = [1.0]
        if self.momentum_warmup:
            shares.append(update / self.momentum_warmup)
        if self.momentum_cooldown and self.num_updates is not None:
            shares.append(max(0, self.num_updates - update) / self.momentum_cooldown)
        return self.momentum_start + min(shares) * (peak - self.momentum_start)


def recipe_from_args(args: Namespace) -> MuonRecipe:
    """The recipe of a command line; AdamW's learning rate follows the same schedule as ``--lr``, to the same share."""
    given = {field: value for field, name in MUON_OPTIONS.items() if (value := getattr(args, name)) is not None}
    adam_lr = given.setdefault("adam_lr", MuonRecipe.adam_lr)
    num_updates = args.train_iters or args.train_samples // args.global_batch_size
    return MuonRecipe(**given, adam_min_lr=adam_lr * args.min_lr / args.lr, num_updates=num_updates)
