"""What stages send each other: its width, and that the choice of what travels changes no result and no checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.inference import ExoInferenceWrapper
from megatron_exo.model.wire import ExoP2PCommunicator, wire_width
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer, merge, transformer_config
from tests.parallel.matrix import LEARNING_RATE, batch
from tests.plain_reference import PlainSizes
from tests.ranks import run_on_ranks

MHA = PlainSizes(num_layers=4, vocab_size=70)  # hidden size 32; the vocabulary is that of batch()
GQA = dataclasses.replace(MHA, num_attention_heads=8, num_query_groups=2, kv_channels=4)
DYNAMIC, H1, INTERNAL = (VARIANTS[n].exo for n in ("dynamic-e-exoformer", "dynamic-e-exoformer-h1", "s-nuresformer"))


@pytest.mark.parametrize(
    ("exo", "sizes", "layout", "width"),
    [
        (DYNAMIC, MHA, Layout(pp=2), 4 * 32),
        (DYNAMIC, GQA, Layout(pp=2), 2 * 32 + 2 * 8),
        (DYNAMIC, MHA, Layout(pp=2, tp=2), 2 * 32),
        (DYNAMIC, MHA, Layout(pp=2, tp=2, sp=True), 4 * 32),
        (DYNAMIC, MHA, Layout(pp=2, wire="source"), 32),
        (DYNAMIC, GQA, Layout(pp=2, wire="source"), 32),
        (DYNAMIC, MHA, Layout(pp=2, tp=2, wire="source"), 32),
        (DYNAMIC, MHA, Layout(pp=2, tp=2, sp=True, wire="source"), 32),
        (INTERNAL, MHA, Layout(pp=2), 4 * 32),
        (VARIANTS["e-exoformer-vg"].exo, MHA, Layout(pp=2), 2 * 32),
        (VARIANTS["gated-embedding-residual"].exo, MHA, Layout(pp=2, wire="source"), 32),
        (VARIANTS["gated"].exo, MHA, Layout(pp=2, wire="source"), 0),
    ],
    ids=str,
)
def test_the_wire_is_as_wide_as_what_travels(exo: ExoConfig, sizes: PlainSizes, layout: Layout, width: int) -> None:
    assert wire_width(transformer_config(exo, sizes, layout)) == width


def _numel_received(layout: Layout) -> list[int]:
    received: list[int] = []
    original = ExoP2PCommunicator._communicate

    def counting(self: Any, **kwargs: Any) -> Any:
        answer = original(self, **kwargs)
        if kwargs["recv_prev"]:
            received.append(answer[0].numel())
        return answer

    ExoP2PCommunicator._communicate = counting  # type: ignore[method-assign]
    Trainer(DYNAMIC, MHA, layout).forward_backward(*batch())
    return received


@pytest.mark.parametrize(("wire", "times_hidden"), [("anchors", 5), ("source", 2)])
def test_a_boundary_carries_each_micro_batch_once(wire: str, times_hidden: int) -> None:
    _, last_stage = run_on_ranks(2, _numel_received, Layout(pp=2, wire=wire))
    micro_batches, tokens = 4, 16
    assert last_stage == [tokens * times_hidden * MHA.hidden_size] * micro_batches


REFUSED: list[tuple[ExoConfig, dict[str, Any], str]] = [
    (INTERNAL, {}, "does not go with an internal anchor: .* use --exo-wire anchors"),
    (DYNAMIC, {"virtual_pipeline_model_parallel_size": 2}, "does not go with virtual pipeline stages: .* --exo-wire a"),
    (VARIANTS["dynamic-e-exoformer-h2"].exo, {"num_layers_in_first_pipeline_stage": 1}, "layer 2, on the first .* 1 l"),
    (DYNAMIC, {"use_mup": True}, "does not go with --use-mup"),
]


@pytest.mark.parametrize(("exo", "fields", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_does_not_go_with_a_source_that_travels_is_refused(
    exo: ExoConfig, fields: dict[str, Any], message: str
) -> None:
    transformer_config(exo, MHA, Layout(pp=2, transformer=fields))
    with pytest.raises(ExoConfigError, match=f"--exo-wire source .*{message}"):
        transformer_config(exo, MHA, Layout(pp=2, wire="source", transformer=fields))


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ExoConfigError, match="exo_wire 'copper' is not one of anchors, source"):
        transformer_config(DYNAMIC, MHA, Layout(wire="copper"))


ADAM: dict[str, Any] = {"optimizer": "adam", "lr": LEARNING_RATE, "adam_eps": 1e-3}


def _train(layout: Layout, exo: ExoConfig, load: Path | None, save: Path | None) -> dict[str, Tensor] | None:
    trainer = Trainer(exo, MHA, layout, init_recipe="megatron", **ADAM)
    if load is not None:
        trainer.load(load)
    for _ in range(2):
        trainer.forward_backward(*batch())
        trainer.step(LEARNING_RATE)
    if save is not None:
        trainer.save(save)
    return trainer.whole("data")


def _parameters(
    layout: Layout, exo: ExoConfig, load: Path | None = None, save: Path | None = None
) -> dict[str, Tensor]:
    return merge(run_on_ranks(layout.world_size, _train, layout, exo, load, save))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(Layout(pp=2, dp=2, distributed_optimizer=True, wire="source"), Layout(), marks=pytest.mark.slow),
        (Layout(pp=2, wire="source"), Layout(pp=2, vpp=2)),
        pytest.param(Layout(), Layout(pp=4, wire="source"), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, sp=True, pp=2), Layout(tp=2, pp=2, wire="source"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoints_of_one_wire_resume_on_the_other(tmp_path: Path, first: Layout, then: Layout) -> None:
    # Two steps, a checkpoint with the optimizer's state, and two steps on another layout.
    exo = H1.replace(anchor_norm="qkvg")
    if first.distributed_optimizer is not then.distributed_optimizer:
        then = dataclasses.replace(then, distributed_optimizer=True)
    _parameters(first, exo, save=tmp_path)
    resumed = _parameters(then, exo, load=tmp_path)
    (tmp_path / "single").mkdir()
    _parameters(Layout(), exo, save=tmp_path / "single")
    expected = _parameters(Layout(), exo, load=tmp_path / "single")
    assert resumed.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (resumed[name][: MHA.vocab_size] - tensor[: MHA.vocab_size]).norm()
        assert error <= 1e-5 * tensor.norm(), name


def _decoded(layout: Layout) -> Tensor | None:
    """Logits of the last of eight tokens, decoded after a prompt of seven."""
    trainer = Trainer(H1, MHA, layout, init_recipe="megatron")
    tokens = batch()[0][:2, :8]
    context = StaticInferenceContext(max_batch_size=2, max_sequence_length=8)
    wrapper = ExoInferenceWrapper(trainer.chunks[0], context)
    wrapper.prep_model_for_inference()
    with InferenceMode.active():
        windows = wrapper.prep_inference_input(tokens)
        for start, end in ((0, 7), (7, 8)):
            logits = wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(windows, start, end))
    full = trainer.logits(tokens)
    if full is not None:
        torch.testing.assert_close(logits[:, -1, : MHA.vocab_size], full[:, -1], rtol=0, atol=1e-5)
    return full


def test_evaluation_and_generation_work_where_the_source_travels() -> None:
    (single,) = run_on_ranks(1, _decoded, Layout())
    _, last_stage = run_on_ranks(2, _decoded, Layout(pp=2, wire="source"))
    torch.testing.assert_close(last_stage, single, rtol=0, atol=1e-5)
