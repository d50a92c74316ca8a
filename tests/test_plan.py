"""The plan that is printed before training."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_exo.accounting import flops_per_token, parameters
from megatron_exo.config import ExoConfig
from megatron_exo.plan import Layout, Plan, format_plan, human
from megatron_exo.presets import matching_of
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS

SIZES = ModelSizes(28, 1024, 16, 16, 64, 2048, vocab_size=50_257, seq_length=2048)
PLAN = Plan(
    exo=VARIANTS["dynamic-e-exoformer"].exo,
    sizes=SIZES,
    padded_vocab_size=50_304,
    layout=Layout(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        data_parallel_size=8,
        sequence_parallel=True,
    ),
    global_batch_size=128,
    micro_batch_size=4,
    train_iters=38_147,
    optimizer="adam, lr 0.003, WSD",
    device="NVIDIA H200 (nccl)",
    precision="bf16",
    transformer_impl="transformer_engine",
    matching=matching_of("450M"),
    train_tokens=10_000_000_000,
)


def one_line(plan: Plan) -> str:
    return " ".join(format_plan(plan).split())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_plan_fits_15_lines_with_aligned_labels(name: str) -> None:
    lines = format_plan(dataclasses.replace(PLAN, exo=VARIANTS[name].exo)).splitlines()
    assert len(lines) <= 15
    assert all(len(line) <= 110 for line in lines)
    assert len({len(line) - len(line[10:].lstrip()) for line in lines}) == 1


def test_a_plan_says_what_is_trained_how_and_on_what() -> None:
    text = one_line(PLAN)
    for expected in (
        f"dynamic-e-exoformer: {PLAN.exo.describe()}",
        "reported (450M, 10B tokens, one run): validation perplexity 14.09, mean accuracy 50.27%",
        "28 layers, hidden size 1024, 16 heads of 64, FFN 2048, vocabulary 50,257 (padded to 50,304)",
        f"{sum(parameters(PLAN.exo, SIZES).values()) / 1e6:.1f}M, padding left out: embedding 51.5M",
        "parameters, by depth, to base of 32 layers and FFN 2048: -1.76% of its parameters (-7,705,120), "
        "-3.53% of its FLOPs per token",
        "38,147 steps of 262,144 tokens (128 sequences of 2,048), 10.00B tokens in all (7,168 more than asked for, to "
        "end with a whole step); adam, lr 0.003, WSD",
        "tp 2 (sequence parallel), pp 4 (vpp 2), cp 1, dp 8: 64 processes, 4 micro-batches of 4 a step",
        "NVIDIA H200 (nccl), bf16, transformer_engine layers",
    ):
        assert expected in text


def test_the_compute_line_has_the_shares_of_what_the_variant_adds() -> None:
    forward = flops_per_token(PLAN.exo, SIZES)
    shares = ", ".join(
        f"{part} {100 * forward[part.replace(' ', '_')] / sum(forward.values()):.2f}%"
        for part in ("anchor", "gate", "mixing", "dynamic mixing")
    )
    assert f"GFLOP per token, forward and backward ({shares});" in one_line(PLAN)


def test_a_model_that_is_only_evaluated_has_no_training_in_its_plan() -> None:
    text = one_line(dataclasses.replace(PLAN, train_iters=0, optimizer="none"))
    assert "training none, evaluation only" in text
    assert f"compute {sum(flops_per_token(PLAN.exo, SIZES).values()) / 1e9:.3g} GFLOP per token, forward (" in text
    assert "in all" not in text


def test_the_reference_is_called_that() -> None:
    plan = dataclasses.replace(PLAN, exo=VARIANTS["base"].exo, sizes=dataclasses.replace(SIZES, num_layers=32))
    assert "parameters, by depth: this is the reference, base of 32 layers and FFN 2048" in one_line(plan)


def test_the_rule_says_what_was_made_equal_and_by_what() -> None:
    for rule, text in (("flops", "FLOPs, by depth, to base"), ("depth", "depth and parameters, by FFN width, to base")):
        assert text in one_line(dataclasses.replace(PLAN, matching=matching_of("450M", match=rule)))
    assert "match " not in one_line(dataclasses.replace(PLAN, matching=None))


def test_a_length_that_is_met_or_not_in_tokens_is_not_rounded() -> None:
    for tokens in (None, 38_147 * 262_144):
        assert "10.00B tokens in all; adam" in one_line(dataclasses.replace(PLAN, train_tokens=tokens))


def test_what_travels_between_stages_is_named_where_it_is_not_the_anchor() -> None:
    layout = dataclasses.replace(PLAN.layout, virtual_pipeline_model_parallel_size=None, wire="source")
    assert "pp 4, the anchor's source between stages, cp 1" in one_line(dataclasses.replace(PLAN, layout=layout))
    assert "between stages" not in one_line(PLAN)


def test_a_point_without_a_name_or_figures_claims_none() -> None:
    text = one_line(dataclasses.replace(PLAN, exo=ExoConfig(anchor="h0", pathways="v")))
    assert "no name in the paper: gate none, anchor h0, mixes V" in text
    assert "reported" not in text


def test_grouped_queries_and_tied_embeddings_are_named() -> None:
    sizes = dataclasses.replace(SIZES, num_query_groups=4, tied_embeddings=True)
    text = one_line(dataclasses.replace(PLAN, sizes=sizes, padded_vocab_size=50_257))
    assert "16 heads of 64 in 4 query groups, FFN 2048, vocabulary 50,257, tied embeddings" in text
    assert "padding" not in text
    assert "head 51.5M" not in text


@pytest.mark.parametrize(
    ("count", "text"), [(950, "950"), (14_500, "14.5k"), (438_540_000, "438.5M"), (1.0e10, "10.00B"), (2e13, "20.00T")]
)
def test_counts_are_shown_with_a_unit(count: float, text: str) -> None:
    assert human(count) == text
