"""The matrix sees what it is for: each fault, planted in single process and layout alike, makes a difference there.

A fault is planted in both because a mistake in the code would be in both; a single process hides each of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_exo.model import anchors, core_attention, gpt, layer, mixing
from megatron_exo.model.projections import HeadLayout
from megatron_exo.model.wire import Wire
from tests.layouts import Layout
from tests.parallel.matrix import differences, gathered, run_points
from tests.ranks import run_on_ranks

SLOW = pytest.mark.slow
SOURCE_WIRE = Layout(pp=2, wire="source")
SOURCE_WIRE_DP = Layout(pp=2, dp=2, wire="source")


def one_coefficient_without_its_sum() -> None:
    """λ_q1 alone keeps the gradient of the rank's own heads."""
    original = mixing.ProjectionMixing._coefficient

    def coefficient(self: Any, pathway: str, term: str, head_dim: int, gammas: Any) -> Tensor:
        return self.lambda_q1 if (pathway, term) == ("q", "1") else original(self, pathway, term, head_dim, gammas)

    mixing.ProjectionMixing._coefficient = coefficient  # type: ignore[method-assign]


def anchor_gains_without_their_sum() -> None:
    anchors.per_head_rms_norm = lambda x, gain, eps, _: torch.nn.functional.rms_norm(x, gain.shape, gain, eps)


def gammas_without_their_sum() -> None:
    mixing.copy_to_tensor_model_parallel_region = lambda value, group: value


def anchors_detached_on_the_second_stage() -> None:
    _change_what_arrives(lambda context: context.detach() if dist.get_rank() == 1 else context)


def anchor_gradient_counted_twice() -> None:
    _change_what_arrives(lambda context: 2 * context - context.detach())


def _change_what_arrives(change: Callable[[Tensor], Tensor]) -> None:
    original = Wire.unpack

    def unpack(self: Wire, hidden_states: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden_states, context = original(self, hidden_states, context)
        return hidden_states, change(context) if self.opens and context is not None else context

    Wire.unpack = unpack  # type: ignore[method-assign]


def rows_without_group_interleave() -> None:
    """All rows of Q, then all of G, K and V, as a single GPU would lay them out."""

    def unpack(self: HeadLayout, packed: Tensor, components: str) -> dict[str, Tensor]:
        parts = torch.split(packed, [self.width(component) for component in components], dim=-1)
        return {c: part.unflatten(-1, (-1, self.head_dim)) for c, part in zip(components, parts, strict=True)}

    HeadLayout.unpack_groups = unpack  # type: ignore[method-assign]


def padding_in_the_softmax() -> None:
    """The rows that pad the vocabulary, more of them the more tensor-parallel ranks there are, take part."""
    original = gpt.vocab_parallel_cross_entropy
    gpt.vocab_parallel_cross_entropy = lambda logits, labels, _, group: original(
        logits, labels, logits.shape[-1] * group.size(), group
    )


def copies_of_the_anchor_never_summed() -> None:
    layer.share_over_stages = lambda anchor, is_original: _as_marked(anchor, is_original, pipeline_parallel=False)


def copies_counted_in_the_norm() -> None:
    optimizer.param_is_not_shared = lambda parameter: True


def copies_of_the_anchor_in_unlike_buckets() -> None:
    """Ranks of the distributed optimizer then own other parts of the matrices on each stage."""
    layer.share_over_stages = lambda anchor, is_original: _as_marked(anchor, is_original, shared_embedding=False)


def _as_marked(anchor: torch.nn.Module, is_original: bool, **changes: bool) -> None:
    anchors.share_over_stages(anchor, is_original=is_original)
    for parameter in anchor.parameters():
        for name, value in changes.items():
            setattr(parameter, name, value)


def keys_of_other_ranks_out_of_order() -> None:
    """Context-parallel ranks take what they gather for consecutive parts of the sequence."""
    core_attention.gather_context = lambda part, group: gather_from_sequence_parallel_region(part, True, group)


def keys_of_other_ranks_without_their_gradients() -> None:
    core_attention.gather_from_sequence_parallel_region = lambda part, tensor_parallel_output_grad, group: (
        gather_from_sequence_parallel_region(part, False, group)
    )


CONTROLS: list[tuple[Callable[[], None], str, Layout, str]] = [
    (one_coefficient_without_its_sum, "internal", Layout(tp=2), "gradient in step 0 (none) of .*lambda_q1"),
    (anchor_gains_without_their_sum, "static", Layout(tp=2), "gradient in step 0 (none) of .*anchor.q_norm"),
    (gammas_without_their_sum, "dynamic", Layout(tp=2), "gradient in step 0 (none) of .*dynamic_mixing.fc2"),
    (anchors_detached_on_the_second_stage, "static", Layout(pp=2), "gradient in step 0 (none) of .*anchor.linear_qkv"),
    (anchor_gradient_counted_twice, "h1", Layout(pp=2), "gradient in step 0 (none) of .*anchor.linear_qkv"),
    (anchor_gradient_counted_twice, "internal", Layout(pp=2, vpp=2), "gradient in step 0 (none) of .*linear_qkv"),
    (rows_without_group_interleave, "static", Layout(tp=2), "losses of step 0 (none)"),
    (rows_without_group_interleave, "gqa", Layout(tp=2), "losses of step 0 (none)"),
    (padding_in_the_softmax, "static", Layout(tp=2), "losses of step 0 (none)"),
    (copies_of_the_anchor_never_summed, "static", SOURCE_WIRE, "gradient in step 0 (none) of .*anchor.linear_qkv"),
    (copies_counted_in_the_norm, "static", SOURCE_WIRE, "norms of step 0 (none)"),
    (copies_of_the_anchor_in_unlike_buckets, "static", SOURCE_WIRE_DP, "parameter .*anchor.linear_qkv"),
    (keys_of_other_ranks_out_of_order, "static", Layout(cp=2), "losses of step 0 (none)"),
    (keys_of_other_ranks_without_their_gradients, "static", Layout(cp=2), "gradient in step 0 (none) of .*linear_qkv"),
]
"""Fault, variant, layout, and where the first sign of it must be."""


QUICK = (one_coefficient_without_its_sum, anchors_detached_on_the_second_stage, padding_in_the_softmax)


@pytest.mark.parametrize(
    ("fault", "case", "layout", "sign"),
    [
        pytest.param(*control, id=f"{control[0].__name__}-{control[1]}", marks=[] if control[0] in QUICK else SLOW)
        for control in CONTROLS
    ],
)
def test_the_matrix_sees(fault: Callable[[], None], case: str, layout: Layout, sign: str) -> None:
    way = "distributed optimizer" if layout.dp > 1 else "all-reduce"
    (single,) = run_on_ranks(1, run_points, Layout(), [(case, "all-reduce")], fault)
    ranks = run_on_ranks(layout.world_size, run_points, layout, [(case, way)], fault)
    found = differences(gathered(ranks, (case, way)), single[case, "all-reduce"])
    pattern = re.compile(sign.replace("(", r"\(").replace(")", r"\)"))
    assert any(pattern.match(difference) for difference in found), f"not seen among {found[:10]}"
