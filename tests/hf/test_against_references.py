"""The Hugging Face model computes what the author's implementation and the plain model compute, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_exo.convert.hugging_face import Stacked, hf_mapping
from megatron_exo.convert.mapping import PackedProjections, export_state, import_state
from megatron_exo.convert.reference import state_to_reference
from megatron_exo.hf import ExoFormerForCausalLM, modeling_exoformer
from megatron_exo.sizes import ModelSizes
from tests import golden_values, plain_reference
from tests.hf.models import GROUPED, SIZES, TIED, VARIANTS_AND_MORE, empty_model, hf_model, load, plain_model, tokens

TOLERANCE = 2e-5


def golden_model(name: str, attention: str = "sdpa") -> ExoFormerForCausalLM:
    source = golden_values.checkpoint("variants", name)
    state = export_state(hf_mapping(source.exo, source.sizes), source.state)
    return load(empty_model(source.exo, source.sizes, attention), state)


def golden_difference(name: str) -> float:
    expected = golden_values.expected("variants", name)
    with torch.no_grad():
        return float((golden_model(name)(expected["tokens"]).logits - expected["logits"]).abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", golden_values.VARIANT_NAMES)
def test_golden_logits_loss_and_gradients(name: str, attention: str) -> None:
    """The gradients of every parameter, carried back to the author's names, have the author's norms."""
    source, expected = golden_values.checkpoint("variants", name), golden_values.expected("variants", name)
    model = golden_model(name, attention)
    logits = model(expected["tokens"]).logits
    assert (logits - expected["logits"]).abs().max() < TOLERANCE

    losses = plain_reference.loss(logits, expected["labels"])
    losses[0].backward()
    for loss, key in zip(losses, ("loss", "cross_entropy", "z_square_mean"), strict=True):
        assert loss.item() == pytest.approx(float(expected[key]), rel=1e-5, abs=TOLERANCE), key

    gradients = {parameter: value.grad for parameter, value in model.named_parameters()}
    ours = import_state(hf_mapping(source.exo, source.sizes), gradients)
    norms = {
        key: float(gradient.norm()) for key, gradient in state_to_reference(source.exo, source.sizes, ours).items()
    }
    golden = {key.removeprefix("_orig_mod."): float(norm) for key, norm in expected["grad_norms"].items()}
    # What the author's model makes without using it has no gradient there and no counterpart here.
    assert norms.keys() <= golden.keys()
    assert not any(golden[key] for key in golden.keys() - norms.keys())
    for key, norm in norms.items():
        assert norm == pytest.approx(golden[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", golden_values.RELEASED_NAMES)
def test_golden_logits_of_the_released_layouts(name: str, attention: str) -> None:
    source, expected = (
        golden_values.checkpoint("released_formats", name),
        golden_values.expected("released_formats", name),
    )
    state = export_state(hf_mapping(source.exo, source.sizes), source.state)
    model = load(empty_model(source.exo, source.sizes, attention), state)
    with torch.no_grad():
        assert (model(expected["tokens"]).logits - expected["logits"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("sizes", [SIZES, GROUPED, TIED], ids=["multi-head", "grouped", "tied"])
@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_every_variant_is_the_plain_model(name: str, sizes: ModelSizes) -> None:
    """Logits, the ``labels`` loss, and the gradient of every element of every parameter."""
    exo = VARIANTS_AND_MORE[name]
    plain, model, ids = plain_model(exo, sizes), hf_model(name, sizes), tokens(2, 11)
    expected = plain(ids)
    output = model(ids, labels=ids)
    assert (output.logits - expected).abs().max() < TOLERANCE

    entropy = plain_reference.loss(expected[:, :-1], ids[:, 1:])[1]
    torch.testing.assert_close(output.loss, entropy, rtol=1e-5, atol=1e-5)
    entropy.backward()
    output.loss.backward()
    theirs = {key: _gradient(parameter) for key, parameter in model.named_parameters()}
    ours = import_state(hf_mapping(exo, sizes), theirs)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[key], _gradient(parameter), rtol=1e-3, atol=2e-6, msg=key)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def test_the_labels_loss_ignores_minus_100() -> None:
    model, ids = hf_model("e-exoformer"), tokens(2, 11)
    labels = ids.clone()
    labels[:, :6] = -100
    logits = model(ids).logits
    expected = plain_reference.loss(logits[:, 5:-1], ids[:, 6:])[1]
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)


# -- a wrong layout or a wrong equation does not go unnoticed ---------------------------------------------------


def _interleaved_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1), as other models do."""
    half = x.shape[-1] // 2
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [
        (Stacked, "to_theirs", lambda self, tensor: tensor.chunk(2)[::-1]),
        (modeling_exoformer, "rotate", _interleaved_rotation),
        (PackedProjections, "to_theirs", lambda self, tensor: tensor.chunk(len(self.their_names))),
        (
            PackedProjections,
            "to_theirs",
            lambda self, tensor, right=PackedProjections.to_theirs: right(self, tensor)[::-1],
        ),
    ],
    ids=["gate and up swapped", "interleaved rotation", "projections not unpacked", "projections in another order"],
)
def test_a_wrong_layout_changes_the_logits(
    owner: object, attribute: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert golden_difference("exoformer_elementwise") < TOLERANCE
    monkeypatch.setattr(owner, attribute, wrong)
    assert golden_difference("exoformer_elementwise") > 100 * TOLERANCE


def test_swapped_coefficients_change_the_logits() -> None:
    name = "exoformer_elementwise"
    model, expected = golden_model(name), golden_values.expected("variants", name)
    state = model.state_dict()
    swapped = {key: state[_other_term(key)] for key in state}
    with torch.no_grad():
        logits = load(empty_model(golden_values.checkpoint("variants", name).exo), swapped)(expected["tokens"]).logits
    assert (logits - expected["logits"]).abs().max() > 100 * TOLERANCE


def _other_term(name: str) -> str:
    return name[:-1] + {"1": "2", "2": "1"}[name[-1]] if "lambda_" in name else name
