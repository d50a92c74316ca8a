"""Random states per tensor-parallel rank and their return under recompute, on the CPU's one generator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from megatron_exo.platform.cpu import fork_rng

MODEL, DATA = "model-parallel-rng", "data-parallel-rng"


@pytest.fixture
def tracker(active_platform: None) -> Iterator[CudaRNGStatesTracker]:
    """Megatron's global tracker with two states."""
    megatron_random.initialize_rng_tracker(force_reset=True)
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.add(MODEL, 1)
    tracker.add(DATA, 2)
    torch.manual_seed(3)
    yield tracker
    megatron_random.initialize_rng_tracker(force_reset=True)


def _draw() -> list[float]:
    return torch.rand(2).tolist()


def _drawn_in(tracker: CudaRNGStatesTracker, name: str) -> list[float]:
    with tracker.fork(name):
        return _draw()


def test_each_name_has_draws_of_its_own_that_go_on(tracker: CudaRNGStatesTracker) -> None:
    draws = [_drawn_in(tracker, name) for name in (MODEL, DATA, MODEL, DATA)]
    assert len({tuple(draw) for draw in draws}) == 4
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    expected = [torch.rand(4, generator=generator).tolist() for generator in generators]
    assert [draws[0] + draws[2], draws[1] + draws[3]] == expected


def test_adding_a_state_leaves_the_generator_as_it_was(tracker: CudaRNGStatesTracker) -> None:
    before = torch.get_rng_state()
    tracker.add("another", 9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_outside_goes_on_as_if_nothing_had_been_drawn_inside(tracker: CudaRNGStatesTracker) -> None:
    before = torch.get_rng_state()
    _drawn_in(tracker, MODEL)
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_forks_resume_the_outer_state(tracker: CudaRNGStatesTracker) -> None:
    with tracker.fork(MODEL):
        first = _draw()
        with tracker.fork(DATA):
            inner = _draw()
            with tracker.fork(DATA):  # the same name goes on where the fork around it is
                innermost = _draw()
        second = _draw()
    model, data = (torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2))
    assert first + second == model
    assert inner + innermost == data


def test_an_exception_inside_restores_the_state_and_keeps_the_draws(tracker: CudaRNGStatesTracker) -> None:
    before, first = torch.get_rng_state(), []

    def draw_and_fail() -> None:
        with tracker.fork(MODEL):
            first.extend(_draw())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)
    assert first + _drawn_in(tracker, MODEL) == torch.rand(4, generator=torch.Generator().manual_seed(1)).tolist()


def test_a_name_that_was_never_added_is_refused(tracker: CudaRNGStatesTracker) -> None:
    with pytest.raises(KeyError, match="'expert' was never added"):
        _drawn_in(tracker, "expert")


def test_the_default_name_is_megatrons() -> None:
    default = inspect.signature(fork_rng).parameters["name"].default
    assert default == megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME


@pytest.mark.parametrize("forked", [True, False])
def test_recompute_draws_the_same_dropout_mask(tracker: CudaRNGStatesTracker, forked: bool) -> None:
    masks: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        if forked:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                dropped = torch.nn.functional.dropout(x, 0.5)
        else:
            dropped = torch.nn.functional.dropout(x, 0.5)
        masks.append(dropped.detach() != 0)
        return dropped * x

    x = torch.ones(400, requires_grad=True)
    output = tensor_parallel.checkpoint(layer, False, x)
    after = torch.get_rng_state(), tracker.get_states()[MODEL]
    torch.rand(5)  # other draws in between, as of later layers
    _drawn_in(tracker, MODEL)
    between = torch.get_rng_state(), tracker.get_states()[MODEL]
    output.sum().backward()
    first, again = masks
    assert 100 < int(first.sum()) < 300
    assert torch.equal(first, again)
    assert torch.equal(x.grad, 4.0 * first)  # d(2 m x²)/dx at one
    # The recomputation's draws are taken back.
    assert not torch.equal(between[0], after[0])
    assert torch.equal(torch.get_rng_state(), between[0])
    assert torch.equal(tracker.get_states()[MODEL], between[1])
