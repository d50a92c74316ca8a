"""Documents of one row do not see each other in the whole model, on any layout of ranks.

A change of one document leaves the logits of the others as they were, to the bit; each document has the logits, and
the loss the gradients, of documents that are alone; and a masked model trains the same on every layout.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.model.documents import DocumentMask
from tests.layouts import Layout, Trainer, merge
from tests.parallel.matrix import CASES, INIT, RECOMPUTE, difference_of_tensors
from tests.ranks import run_on_ranks

SEPARATOR = 0
LENGTH = 24
ROWS = [[0, 5, 13, 24], [0, 9, 10, 24], [0, 24], [0, 1, 17, 24]]
"""Boundaries of the documents in each row."""
EDITED = {(0, 1), (3, 1)}
"""Row and number of the documents that are changed: both go over a chunk of context-parallel ranks."""
NAMES = ["dynamic", "internal", "gqa"]
LAYOUTS: dict[Layout, list[str]] = {
    Layout(tp=2, sp=True, pp=2, vpp=2): ["dynamic", "gqa"],
    Layout(dp=2, cp=2, transformer=RECOMPUTE["selective"]): ["dynamic", "gqa"],
}
SLOW: dict[Layout, list[str]] = {
    Layout(tp=2): NAMES,
    Layout(pp=4): NAMES,
    Layout(tp=2, sp=True, cp=2, transformer=RECOMPUTE["uniform 2"]): NAMES,
    Layout(pp=2, cp=2, wire="source", transformer=RECOMPUTE["selective"]): ["dynamic"],
    Layout(dp=2, distributed_optimizer=True, transformer=RECOMPUTE["block"]): NAMES,
}


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, and tokens with every word of :data:`EDITED` changed; int64 [4, 24] each."""
    stream = torch.randint(1, 70, (len(ROWS), LENGTH + 1), generator=torch.Generator().manual_seed(5))
    for row, boundaries in enumerate(ROWS):
        stream[row, boundaries[1:-1]] = SEPARATOR
    edited = stream.clone()
    for row, number in EDITED:
        begin, end = ROWS[row][number : number + 2]
        edited[row, begin + 1 : end] = stream[row, begin + 1 : end] % 69 + 1
    return stream[:, :-1], stream[:, 1:], edited[:, :-1]


def _documents() -> list[tuple[int, int, int, int]]:
    """Row, number, begin and end of every document."""
    spans = [(row, *each) for row, boundaries in enumerate(ROWS) for each in enumerate(pairwise(boundaries))]
    return [(row, number, begin, end) for row, number, (begin, end) in spans]


def _numbers(layout: Layout, names: list[str]) -> dict[str, dict[str, Any]]:
    """Loss, gradients and logits of each case on this rank, and logits under other tokens and masks."""
    tokens, labels, edited = _batch()
    results = {}
    for name in names:
        exo, sizes = CASES[name]
        trainer = Trainer(exo, sizes, layout, init_recipe=INIT, document_mask=DocumentMask(SEPARATOR))
        losses = trainer.forward_backward(tokens, labels, micro_batch_size=1 if layout.pp > 1 else 2)
        results[name] = {
            "loss": losses and losses["lm loss"],
            "gradients": trainer.whole("main_grad"),
            "logits": trainer.logits(tokens),
            "edited": trainer.logits(edited),
        }
        trainer.document_mask = DocumentMask(SEPARATOR, restarts=True)
        results[name]["restarted"] = trainer.logits(tokens)
        trainer.document_mask = None
        results[name] |= {"joined": trainer.logits(tokens), "joined, edited": trainer.logits(edited)}
    return results


def _gathered(ranks: list[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    last_stage = next(rank[name] for rank in ranks if rank[name]["loss"] is not None)
    return last_stage | {"gradients": merge([rank[name]["gradients"] for rank in ranks])}


@lru_cache
def _on(layout: Layout) -> dict[str, dict[str, Any]]:
    names = {Layout(): NAMES, **LAYOUTS, **SLOW}[layout]
    ranks = run_on_ranks(layout.world_size, _numbers, layout, names, timeout_s=600)
    return {name: _gathered(ranks, name) for name in names}


EACH = [
    pytest.param(layout, id=str(layout), marks=pytest.mark.slow if layout in SLOW else []) for layout in LAYOUTS | SLOW
]


@pytest.mark.parametrize("layout", [Layout(), *EACH], ids=str)
def test_a_change_in_one_document_leaves_the_logits_of_the_others_alone_to_the_bit(layout: Layout) -> None:
    for name, result in _on(layout).items():
        for row, number, begin, end in _documents():
            before, after = (result[which][row, begin:end] for which in ("logits", "edited"))
            if (row, number) in EDITED:
                assert (before != after).any(dim=-1)[1:].all(), f"{name}, row {row}: its own words must matter"
            else:
                assert torch.equal(before, after), f"{name}, row {row}, document {number}"
        # Without the mask, a document sees those before it in its row.
        for row, number in EDITED:
            later = result["joined"][row] != result["joined, edited"][row]
            assert later[ROWS[row][number + 1] :].any(dim=-1).all()


@pytest.mark.parametrize("layout", EACH)
def test_loss_and_gradients_are_those_of_one_process(layout: Layout) -> None:
    for name, result in _on(layout).items():
        expected = _on(Layout())[name]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
        for which in ("logits", "restarted"):
            torch.testing.assert_close(result[which], expected[which], rtol=1e-5, atol=1e-5)
        found = difference_of_tensors(result["gradients"], expected["gradients"], 1e-5, floor=1e-7)
        assert not found, f"{name}: {found[:5]}"


def _alone(names: list[str]) -> dict[str, dict[str, Any]]:
    """Logits, loss and gradients of documents that are alone, and of rows with and without restarted positions."""
    tokens, labels, _ = _batch()
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        exo, sizes = CASES[name]
        trainer = Trainer(exo, sizes, Layout(), init_recipe=INIT)
        logits, loss, gradients = torch.empty(*tokens.shape, sizes.vocab_size), 0.0, dict[str, Tensor]()
        for row, _, begin, end in _documents():
            place = slice(row, row + 1), slice(begin, end)
            share = (end - begin) / tokens.numel()
            logits[place] = trainer.logits(tokens[place])
            loss += share * trainer.forward_backward(tokens[place], labels[place])["lm loss"]
            for parameter, gradient in trainer.whole("main_grad").items():
                gradients[parameter] = gradients.get(parameter, 0.0) + share * gradient
        results[name] = {"alone": {"logits": logits, "loss": loss, "gradients": gradients}}
        for restarts in (False, True):
            trainer.document_mask = DocumentMask(SEPARATOR, restarts=restarts)
            results[name]["restarted" if restarts else "masked"] = {
                "logits": trainer.logits(tokens),
                "loss": trainer.forward_backward(tokens, labels, micro_batch_size=4)["lm loss"],
                "gradients": trainer.whole("main_grad"),
            }
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_on_ranks(1, _alone, NAMES)[0]


@pytest.mark.parametrize(("positions", "tolerance"), [("restarted", 1e-5), ("masked", 1e-4)])
@pytest.mark.parametrize("name", NAMES)
def test_documents_of_a_row_have_the_logits_and_gradients_they_have_alone(
    alone: dict[str, dict[str, Any]], name: str, positions: str, tolerance: float
) -> None:
    ours, expected = alone[name][positions], alone[name]["alone"]
    torch.testing.assert_close(ours["logits"], expected["logits"], rtol=tolerance, atol=tolerance)
    assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert not difference_of_tensors(ours["gradients"], expected["gradients"], tolerance, floor=1e-6)


def test_positions_that_restart_are_others(alone: dict[str, dict[str, Any]]) -> None:
    # Rotary positions act by their differences, so only rounding tells.
    for result in alone.values():
        assert not torch.equal(result["restarted"]["logits"], result["masked"]["logits"])
        assert torch.equal(result["restarted"]["logits"][2], result["masked"]["logits"][2])  # the row of one document
