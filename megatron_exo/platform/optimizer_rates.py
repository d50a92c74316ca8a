"""A run that goes on with another learning rate or weight decay, which Megatron has in an optimizer's parameter groups.

It looks for the groups of a checkpoint by their rates, among others, so it finds none where these have changed; and
with a group it takes over the rates, which its scheduler then follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")


def of_this_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``: with ``--override-opt-param-scheduler`` groups have the rates of this run."""

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_rates_of_its_own():
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        ours: dict[tuple[Any, ...], dict[str, Any]] = {}
        for group in _groups(sharded_state_dict.get("optimizer")):
            ours[_kind(group)] = {name: group[name] for name in _RATES if name in group}
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        state = loaded if isinstance(loaded, dict) else loaded[0]  # with what was missing behind it
        for group in _groups(state.get("optimizer")):
            group.update(ours.get(_kind(group), {}))
        return loaded

    return load


def _has_rates_of_its_own() -> bool:
    """Whether this is a run with the option; a program without Megatron's arguments has none."""
    from megatron.training import get_args

    try:
        return bool(get_args().override_opt_param_scheduler)
    except AssertionError:
        return False


def _groups(state: Any) -> list[dict[str, Any]]:
    """All parameter groups in the state of an optimizer, or of a chain of them."""
    if not isinstance(state, dict):
        return []
    own = state.get("param_groups", [])
    return [*own, *(group for each in state.values() if isinstance(each, dict) for group in _groups(each))]


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    """What Megatron tells groups of parameters apart by, beside their rates."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return tuple(group.get(name) for name in param_group_identifier_keys if name not in _RATES)
