"""The plain model computes what the author's implementation computes, and what the paper's equations say beyond it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_exo.config import PATHWAYS, ExoConfig
from megatron_exo.convert.reference import state_to_reference
from megatron_exo.variants import VARIANTS
from tests import golden_values
from tests.plain_reference import PlainExoFormer, PlainSizes, loss, parameter_shapes, random_state

# Two float32 programs that sum in different orders; observed differences are below 3e-6.
TOLERANCE = 2e-5
SIZES = PlainSizes()
GROUPED = PlainSizes(num_query_groups=2)
GATED = VARIANTS["gated"].exo
TOKENS = torch.randint(SIZES.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))


def logits(exo: ExoConfig, sizes: PlainSizes, state: dict[str, Tensor]) -> Tensor:
    model = PlainExoFormer(exo, sizes)
    model.load_state_dict(state)
    with torch.no_grad():
        return model(TOKENS)


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("name", golden_values.VARIANT_NAMES)
def test_logits_losses_and_gradients_are_the_authors(name: str) -> None:
    source, expected = golden_values.checkpoint("variants", name), golden_values.expected("variants", name)
    model = golden_values.plain_model(source)

    output = model(expected["tokens"])
    total, entropy, z_square_mean = loss(output, expected["labels"], z_loss_weight=1e-5)
    total.backward()

    assert difference(output, expected["logits"]) <= TOLERANCE
    assert entropy.item() == pytest.approx(expected["cross_entropy"], abs=TOLERANCE)
    assert z_square_mean.item() == pytest.approx(expected["z_square_mean"], abs=TOLERANCE)
    assert total.item() == pytest.approx(expected["loss"], abs=TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norms = {name: g.norm().item() for name, g in state_to_reference(source.exo, source.sizes, gradients).items()}
    assert norms == pytest.approx(expected["grad_norms"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", golden_values.RELEASED_NAMES)
def test_released_formats_give_the_authors_logits(name: str) -> None:
    source, expected = (
        golden_values.checkpoint("released_formats", name),
        golden_values.expected("released_formats", name),
    )
    output = golden_values.plain_model(source)(expected["tokens"])
    assert difference(output, expected["logits"]) <= TOLERANCE
    assert loss(output, expected["labels"])[1].item() == pytest.approx(expected["cross_entropy"], abs=TOLERANCE)


@pytest.mark.parametrize("key", golden_values.ADAMW_KEYS)
def test_forty_steps_of_adamw_follow_the_authors_curve(key: str) -> None:
    model = golden_values.plain_model(golden_values.checkpoint("training", f"{key}.init"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, golden_values.learning_rate_scale)
    curve: dict[str, list[float]] = {"cross_entropy": [], "grad_norm": []}
    for batch in golden_values.training_batches():
        total, entropy, _ = loss(model(batch[:, :-1]), batch[:, 1:], z_loss_weight=1e-5)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve["cross_entropy"].append(entropy.item())
        curve["grad_norm"].append(norm.item())

    expected = golden_values.training_curves(key)
    assert len(curve["cross_entropy"]) == golden_values.NUM_TRAINING_STEPS
    # Observed on one CPU: 5e-7. Other CPUs sum in other orders, and the differences grow over the steps.
    assert curve["cross_entropy"] == pytest.approx(expected["cross_entropy"], abs=1e-4)
    assert curve["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("sizes", [SIZES, GROUPED], ids=["mha", "gqa"])
def test_every_parameter_of_every_variant_gets_a_gradient(name: str, sizes: PlainSizes) -> None:
    exo = VARIANTS[name].exo
    model = PlainExoFormer(exo, sizes)
    loss(model(TOKENS[:, :-1]), TOKENS[:, 1:])[0].backward()
    without = {
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    }
    frozen = {f"decoder.layers.{(exo.source_layer or 0) - 1}.anchor.linear_qkv.weight"}
    assert without == (frozen if exo.anchor_weights == "frozen" else set())


@pytest.mark.parametrize("name", ["e-exoformer", "dynamic-e-exoformer-h2", "e-nuresformer", "resformer"])
def test_no_token_sees_a_later_one(name: str) -> None:
    exo = VARIANTS[name].exo
    model = PlainExoFormer(exo, SIZES)
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SIZES.vocab_size
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert difference(before[:, 7:], after[:, 7:]) > 0.01


@pytest.mark.parametrize("anchor", ["internal", "h0", "h1", "h2"])
@pytest.mark.parametrize("granularity", ["scalar", "headwise", "elementwise"])
def test_without_its_anchor_terms_and_with_unit_lambdas_the_model_is_the_gated_one(
    anchor: str, granularity: str
) -> None:
    exo = GATED.replace(anchor=anchor, pathways="qkvg", anchor_norm="kv", granularity=granularity, drop_anchor="qkvg")
    state = random_state(exo, GROUPED)
    for name, value in state.items():
        if ".lambda_" in name:
            value.fill_(1.0)
    gated = {name: state[name] for name in parameter_shapes(GATED, GROUPED)}
    assert difference(logits(exo, GROUPED, state), logits(GATED, GROUPED, gated)) <= TOLERANCE
    assert difference(logits(exo.replace(drop_anchor=""), GROUPED, state), logits(GATED, GROUPED, gated)) > 0.01


@pytest.mark.parametrize(("anchor", "first_mixed"), [("internal", 1), ("h0", 0), ("h1", 1), ("h2", 2)])
def test_layers_up_to_the_source_are_not_mixed(anchor: str, first_mixed: int) -> None:
    exo = GATED.replace(anchor=anchor, pathways="qkvg")
    mixed = {name.split(".")[2] for name in parameter_shapes(exo, SIZES) if ".lambda_" in name}
    assert mixed == {str(n) for n in range(first_mixed, SIZES.num_layers)}


def test_a_dropped_current_term_leaves_its_projection_without_influence() -> None:
    exo = VARIANTS["e-exoformer"].exo.replace(drop_current="g")
    state = random_state(exo, GROUPED)
    before = logits(exo, GROUPED, state)
    for name, value in state.items():
        if name.endswith("self_attention.linear_qkv.weight"):
            # Per query group: two heads of Q, then two heads of G, of 8 channels each.
            value.unflatten(0, (2, -1))[:, 16:32].normal_()
    assert torch.equal(before, logits(exo, GROUPED, state))
    assert difference(before, logits(exo.replace(drop_current=""), GROUPED, state)) > 0.01


def test_dynamic_mixing_at_zero_is_static_mixing_with_half_the_lambdas() -> None:
    static, dynamic = VARIANTS["e-exoformer"].exo, VARIANTS["dynamic-e-exoformer"].exo
    state = random_state(dynamic, SIZES)
    for name, value in state.items():
        if ".dynamic_mixing.fc2." in name:
            value.zero_()
    halved = {name: state[name] * (0.5 if ".lambda_" in name else 1) for name in parameter_shapes(static, SIZES)}
    assert difference(logits(dynamic, SIZES, state), logits(static, SIZES, halved)) <= TOLERANCE


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_dynamic_outputs_belong_to_the_mixed_pathways_in_order(pathway: str) -> None:
    """A γ far in the sigmoid's tail switches exactly its own term off."""
    exo = VARIANTS["dynamic-e-exoformer"].exo
    state = random_state(exo, SIZES)
    for name, value in state.items():
        if name.endswith("dynamic_mixing.fc2.bias"):
            value[2 * PATHWAYS.index(pathway)] = -1000
    assert difference(logits(exo, SIZES, state), logits(exo.replace(drop_anchor=pathway), SIZES, state)) <= TOLERANCE


@pytest.mark.parametrize(
    ("control", "granularity"),
    [("qk-bias", "elementwise"), ("embedding-residual", "elementwise"), ("embedding-residual", "scalar")],
)
def test_a_control_at_zero_is_the_gated_model(control: str, granularity: str) -> None:
    exo = GATED.replace(control=control, granularity=granularity)
    state = random_state(exo, GROUPED)
    gated = logits(GATED, GROUPED, {name: state[name] for name in parameter_shapes(GATED, GROUPED)})
    assert difference(logits(exo, GROUPED, state), gated) > 0.01
    for name in state.keys() - parameter_shapes(GATED, GROUPED).keys():
        state[name].zero_()
    assert difference(logits(exo, GROUPED, state), gated) <= TOLERANCE


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    """With K, V rows, anchors and λ of each group copied to its heads, 2 groups and 4 heads compute the same."""
    exo = VARIANTS["e-exoformer"].exo
    grouped, full = random_state(exo, GROUPED), {}
    for name, value in grouped.items():
        if name.endswith("linear_qkv.weight"):
            q, g, k, v = value.unflatten(0, (2, -1)).split([16, 16, 8, 8], dim=1)
            q, g = (x.unflatten(1, (2, 8)).flatten(0, 1) for x in (q, g))
            k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
            value = torch.cat([q, g, k, v], dim=1).flatten(0, 1)
        elif ".lambda_k" in name or ".lambda_v" in name:
            value = value.view(2, 8).repeat_interleave(2, dim=0).flatten()
        full[name] = value
    assert difference(logits(exo, GROUPED, grouped), logits(exo, SIZES, full)) <= TOLERANCE


def test_post_norm_makes_the_scale_of_the_lambdas_irrelevant() -> None:
    exo = VARIANTS["e-exoformer-postnorm-vg"].exo
    state = random_state(exo, SIZES)
    doubled = {name: value * (2 if ".lambda_" in name else 1) for name, value in state.items()}
    # Not exact: the norm's epsilon does not scale along.
    assert difference(logits(exo, SIZES, state), logits(exo, SIZES, doubled)) <= 1e-3
    without = exo.replace(post_norm="")
    state, doubled = ({n: s[n] for n in parameter_shapes(without, SIZES)} for s in (state, doubled))
    assert difference(logits(without, SIZES, state), logits(without, SIZES, doubled)) > 0.01


def test_a_tied_output_layer_is_the_embedding() -> None:
    tied = PlainSizes(tied=True)
    state = random_state(GATED, tied)
    untied = state | {"output_layer.weight": state["embedding.word_embeddings.weight"]}
    assert "output_layer.weight" not in state
    assert torch.equal(logits(GATED, tied, state), logits(GATED, SIZES, untied))
