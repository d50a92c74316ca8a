"""The learning rate of a run, by Megatron's own scheduler, and whether a longer run is the same one so far."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_exo.optimizer.recipe import recipe_from_args

_POINTS = 10_000
"""Samples at which two schedules are compared, at most: each step of a short run, and evenly over a long one."""


class Scheduler(OptimizerParamScheduler):
    """Megatron's, except that the warm-up begins at the same share of the highest rate for every parameter group.

    Megatron takes ``--lr-warmup-init`` for all groups, whatever their own ``max_lr``.
    """

    init_lr: float
    max_lr: float

    def get_lr(self, param_group: dict[str, Any]) -> float:
        init_lr = self.init_lr
        self.init_lr = init_lr * param_group.get("max_lr", self.max_lr) / self.max_lr
        try:
            return super().get_lr(param_group)
        finally:
            self.init_lr = init_lr


def use_in_training() -> None:
    """Bind :class:`Scheduler` where Megatron's training loop looks its scheduler up; no argument replaces it."""
    from megatron.training import training

    training.OptimizerParamScheduler = Scheduler


class _NoParameters:
    """In place of an optimizer, for a scheduler that is only asked."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


def schedule_of(args: Namespace) -> dict[str, Any]:
    """What a learning rate follows from, in the scheduler's unit: samples."""
    unit, batch = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    length = getattr(args, f"train_{unit}") * batch
    decay = (getattr(args, f"lr_decay_{unit}") or 0) * batch or length
    warmup = getattr(args, f"lr_warmup_{unit}") * batch
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    final = getattr(args, f"lr_wsd_decay_{unit}")
    return {
        "lr": args.lr,
        "exo_adam_lr": recipe_from_args(args).adam_lr if args.optimizer == "muon" else None,
        "min_lr": args.min_lr,
        "lr_warmup_init": args.lr_warmup_init,
        "lr_decay_style": args.lr_decay_style,
        "warm-up samples": warmup,
        "decay samples": decay,
        "WSD decay": None if final is None else f"{args.lr_wsd_decay_style} over {final * batch} samples",
        "weight_decay": args.weight_decay,
        "train samples": length,
    }


def learning_rate(args: Namespace) -> Callable[[int], float]:
    """Samples consumed → the learning rate of the step after them."""
    schedule = schedule_of(args)
    in_samples = bool(args.train_samples)
    final = args.lr_wsd_decay_samples if in_samples else args.lr_wsd_decay_iters
    scheduler = Scheduler(
        _NoParameters(),
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=schedule["warm-up samples"],
        lr_decay_steps=schedule["decay samples"],
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=schedule["train samples"],
        wd_incr_style="constant",
        wsd_decay_steps=None if final is None else final * (1 if in_samples else args.global_batch_size),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )

    def rate(samples: int) -> float:
        scheduler.num_steps = samples
        return scheduler.get_lr({})

    return rate


def is_extension(saved: Namespace, args: Namespace) -> bool:
    """Whether a run of another length would have had the same updates up to where the saved one stands.

    It is then trained as if it had been planned so from the start: a run with a flat stretch (WSD) that has not begun
    to decay, or one whose rate does not depend on its length.
    """
    before, now = schedule_of(saved), schedule_of(args)
    free = {"decay samples", "WSD decay", "train samples"}
    if any(before[name] != now[name] for name in before.keys() - free) or args.weight_decay_incr_style != "constant":
        return False
    consumed = saved.consumed_train_samples
    if args.optimizer == "muon":  # whose momentum falls towards the end
        plans = recipe_from_args(saved), recipe_from_args(args)
        updates = range(consumed // saved.global_batch_size)
        if any(len({plan.momentum(update, args.muon_momentum) for plan in plans}) > 1 for update in updates):
            return False
    step = max(saved.global_batch_size, consumed // _POINTS, 1)
    rates = learning_rate(saved), learning_rate(args)
    return all(rates[0](samples) == rates[1](samples) for samples in [*range(0, consumed, step), consumed])
