"""Every token that counts weighs the same, whatever micro-batch and rank it is on, and however few count there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layouts import Layout, Trainer, merge
from tests.parallel.matrix import CASES, INIT, batch, difference_of_tensors
from tests.ranks import run_on_ranks

COUNTING = [16, 1, 0, 9]
"""Tokens that count, in each row of the batch: the ranks and micro-batches of any layout have unequal shares."""
LAYOUTS = [Layout(dp=2), Layout(dp=2, cp=2), Layout(pp=2, dp=2, distributed_optimizer=True)]


def _mask(shape: torch.Size) -> Tensor:
    positions = torch.arange(shape[1]).expand(shape)
    return (positions >= shape[1] - torch.tensor(COUNTING).unsqueeze(1)).float()


def _numbers(layout: Layout, micro_batch_size: int) -> tuple[dict[str, float] | None, Any, Tensor | None]:
    """Mean losses and gradients of one batch; and, on a single rank, the gradient of the mean computed by autograd."""
    exo, sizes = CASES["dynamic"]
    trainer = Trainer(exo, sizes, layout, init_recipe=INIT, optimizer="adam", lr=1e-3)
    tokens, labels = batch()
    losses = trainer.forward_backward(tokens, labels, loss_mask=_mask(labels.shape), micro_batch_size=micro_batch_size)
    return losses, trainer.whole("main_grad"), trainer.logits(tokens)


@lru_cache
def _single() -> tuple[dict[str, float], dict[str, Tensor], Tensor]:
    """One micro-batch on one rank, where there is only one mean."""
    (result,) = run_on_ranks(1, _numbers, Layout(), 4)
    return result


def test_the_loss_is_the_mean_over_the_tokens_that_count() -> None:
    losses, _, logits = _single()
    _, labels = batch()
    mask = _mask(labels.shape).bool()
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
    assert mask.sum() == sum(COUNTING)
    assert losses["lm loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_accumulation_over_micro_batches_is_exact(micro_batch_size: int) -> None:
    _compare(run_on_ranks(1, _numbers, Layout(), micro_batch_size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_with_unequal_shares_are_exact(layout: Layout) -> None:
    _compare(run_on_ranks(layout.world_size, _numbers, layout, 1))


def _compare(results: list[tuple[dict[str, float] | None, Any, Tensor | None]]) -> None:
    losses, gradients, _ = _single()
    ours = next(each for each, _, _ in results if each is not None)
    assert ours == pytest.approx(losses, rel=1e-6)
    found = difference_of_tensors(merge([each for _, each, _ in results]), gradients, 1e-5, floor=1e-7)
    assert not found, found[:5]
