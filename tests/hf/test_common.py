"""What transformers expects of every causal language model.

Its own common tests (``ModelTesterMixin``, ``GenerationTesterMixin``) live in a folder that is in no package, so these
are the properties that they check, as far as they concern a text-only decoder.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, set_seed

from megatron_exo.hf import ExoFormerConfig, ExoFormerForCausalLM, ExoFormerModel
from tests.hf.models import GROUPED, SIZES, SOME, TIED, VARIANTS_AND_MORE, empty_model, hf_model, tokens

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
every_kind = pytest.mark.parametrize("name", SOME)


def logits(model: PreTrainedModel, ids: Tensor, **arguments: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


def gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# -- forward ----------------------------------------------------------------------------------------------------


def test_forward_starts_with_the_usual_arguments() -> None:
    for model_class in (ExoFormerModel, ExoFormerForCausalLM):
        names = list(inspect.signature(model_class.forward).parameters)
        assert names[1:5] == ["input_ids", "attention_mask", "position_ids", "cache"]


@every_kind
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_and_attentions_have_their_shapes(name: str, attention: str) -> None:
    model, ids = hf_model(name, GROUPED, attention), tokens(2, 7)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, output_attentions=attention == "eager")
        base = model.model(ids).last_hidden_state
    assert [tuple(state.shape) for state in output.hidden_states] == [(2, 7, 32)] * (GROUPED.num_layers + 1)
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(ids))
    torch.testing.assert_close(output.hidden_states[-1], base)
    if attention == "eager":
        assert len(output.attentions) == GROUPED.num_layers
        for weights in output.attentions:
            assert weights.shape == (2, 4, 7, 7)
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))
            assert not weights.triu(1).any()


@every_kind
def test_hidden_states_keep_their_gradients(name: str) -> None:
    model, ids = hf_model(name, attention="eager"), tokens(1, 5)
    output = model(ids, output_hidden_states=True, output_attentions=True)
    for tensor in (*output.hidden_states[:-1], *output.attentions):
        tensor.retain_grad()
    output.logits.square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in output.hidden_states[:-1])
    assert all(tensor.grad is not None for tensor in output.attentions)


@every_kind
def test_the_output_is_the_same_twice_as_a_tuple_and_from_embeddings(name: str) -> None:
    model, ids = hf_model(name), tokens(2, 7)
    first = logits(model, ids)
    assert torch.equal(logits(model, ids), first)
    with torch.no_grad():
        assert torch.equal(model(ids, return_dict=False)[0], first)
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, first)
        generated = model.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(generated, model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4,
                                                     do_sample=False, pad_token_id=0)[:, 7:])  # fmt: skip
        for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
            with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
                model(**wrong)


@every_kind
def test_sdpa_and_eager_agree_with_and_without_padding(name: str) -> None:
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    eager, sdpa = (hf_model(name, GROUPED, attention) for attention in ("eager", "sdpa"))
    torch.testing.assert_close(logits(eager, ids), logits(sdpa, ids), **CLOSE)
    padded = [logits(model, ids, attention_mask=mask) for model in (eager, sdpa)]
    torch.testing.assert_close(padded[0][mask == 1], padded[1][mask == 1], **CLOSE)


def test_the_attention_implementation_can_be_changed() -> None:
    model, ids = hf_model("e-exoformer"), tokens(1, 5)
    assert model(ids, output_attentions=False).attentions is None
    model.set_attn_implementation("eager")
    assert model(ids, output_attentions=True).attentions is not None


@every_kind
def test_logits_to_keep_are_the_last_or_the_named_ones(name: str) -> None:
    model, ids = hf_model(name), tokens(2, 7)
    whole = logits(model, ids)
    torch.testing.assert_close(logits(model, ids, logits_to_keep=2), whole[:, -2:])
    torch.testing.assert_close(logits(model, ids, logits_to_keep=torch.tensor([0, 3])), whole[:, [0, 3]])


# -- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_a_new_model_starts_as_the_paper_says(name: str) -> None:
    """Its first loss is the logarithm of the vocabulary, λ and γ have their values, and every weight is set."""
    exo, ids = VARIANTS_AND_MORE[name], tokens(2, 9)
    model = empty_model(exo)
    for parameter in model.parameters():
        assert parameter.isfinite().all()
    assert model(ids, labels=ids).loss.item() == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=1e-6)
    for key, parameter in model.named_parameters():
        if key.endswith(("lm_head.weight", "o_proj.weight", "down_proj.weight", "fc2.weight", ".bias", "_residual")):
            assert not parameter.any(), key
        elif "lambda_" in key:
            assert (parameter == exo.lambda_init).all(), key
        elif key.endswith("norm.weight"):
            assert (parameter == 1).all(), key
        else:
            assert 0.015 < parameter.std() < 0.025, key
            assert parameter.abs().max() <= 0.06, key


def test_a_tied_head_starts_as_the_embedding_and_stays_it(tmp_path: Path) -> None:
    model = empty_model(VARIANTS_AND_MORE["e-exoformer"], TIED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.any()
    model.save_pretrained(tmp_path)
    again = ExoFormerForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("sizes", [SIZES, TIED], ids=["untied", "tied"])
def test_embeddings_can_be_resized(sizes: object) -> None:
    model, ids = hf_model("e-exoformer", sizes), tokens(2, 7)
    before = logits(model, ids)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model.get_output_embeddings().weight.shape == (70, 32)
    after = logits(model, ids)
    assert after.shape == (2, 7, 70)
    torch.testing.assert_close(after[..., :64], before)
    logits(model, torch.full((1, 2), 69))
    model.resize_token_embeddings(50)
    torch.testing.assert_close(logits(model, ids % 50)[..., :50].shape, torch.Size((2, 7, 50)))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == sizes.tied_embeddings  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_saved_models_load_as_they_were(name: str, tmp_path: Path) -> None:
    model, ids = hf_model(name), tokens(2, 7)
    model.save_pretrained(tmp_path)
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is ExoFormerForCausalLM
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(again, ids), logits(model, ids))
    frozen = {key for key, parameter in again.named_parameters() if not parameter.requires_grad}
    assert frozen == {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    is_frozen = VARIANTS_AND_MORE[name].anchor_weights == "frozen"
    assert frozen == ({f"model.anchor.{c}_proj.weight" for c in "qkvg"} if is_frozen else set())


def test_the_base_model_loads_from_the_whole_and_the_whole_from_the_base(tmp_path: Path) -> None:
    model, ids = hf_model("dynamic-e-exoformer"), tokens(2, 7)
    model.save_pretrained(tmp_path / "whole")
    base = AutoModel.from_pretrained(tmp_path / "whole")
    assert type(base) is ExoFormerModel
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    whole, loading = ExoFormerForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(loading["missing_keys"]) == {"lm_head.weight"}
    assert torch.equal(whole.model.anchor.q_proj.weight, model.model.anchor.q_proj.weight)
    assert not whole.lm_head.weight.any()  # as a new head is


def test_what_a_file_lacks_is_initialised_and_what_it_has_is_not_touched(tmp_path: Path) -> None:
    model = hf_model("dynamic-e-exoformer")
    state = model.state_dict()
    lacking = "model.layers.1.self_attn.mixing.lambda_v1"
    model.save_pretrained(tmp_path, state_dict={key: value for key, value in state.items() if key != lacking})
    again, loading = ExoFormerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(loading["missing_keys"]) == {lacking}
    for key, value in again.state_dict().items():
        assert torch.equal(value, torch.ones_like(value) if key == lacking else state[key]), key


@every_kind
def test_sharded_files_load_with_little_memory_and_onto_devices(name: str, tmp_path: Path) -> None:
    model, ids = hf_model(name), tokens(2, 7)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for settings in (
        {"low_cpu_mem_usage": True},
        {"device_map": "cpu"},
        {"device_map": "auto"},
        {"device_map": {"": "cpu"}},
    ):
        again = ExoFormerForCausalLM.from_pretrained(tmp_path, **settings)
        assert torch.equal(logits(again, ids), logits(model, ids)), settings


@every_kind
def test_layers_can_wait_on_the_disk(name: str, tmp_path: Path) -> None:
    """accelerate moves each layer, and all that goes into it, to where it computes."""
    model, ids = hf_model(name), tokens(2, 7)
    model.save_pretrained(tmp_path / "model")
    places: dict[str, object] = {"model": "cpu", "lm_head": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    places |= {f"model.{part}": "cpu" for part in ("embed_tokens", "norm", "rotary_emb", "layers.0")}
    places |= {"model.anchor": "disk"} if model.model.anchor is not None else {}
    del places["model"]
    again = ExoFormerForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert again.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    torch.testing.assert_close(logits(again, ids), logits(model, ids))


def test_automatic_placement_splits_no_layer() -> None:
    from accelerate import infer_auto_device_map, init_empty_weights

    with init_empty_weights():
        model = empty_model(VARIANTS_AND_MORE["dynamic-e-exoformer-h1"])
    limits = {0: 45_000, 1: 45_000, "cpu": 10**9}
    places = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=model._no_split_modules)
    assert len(set(places.values())) > 1
    assert not [part for part in places if part.startswith("model.layers.") and part.count(".") > 2]


# -- training ---------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool) -> None:
    model, ids = hf_model(name).train(), tokens(2, 9)
    expected = gradients(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_activation_checkpointing
    found = gradients(model, ids)
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], **CLOSE)
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing


@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_every_parameter_that_acts_is_trained(name: str) -> None:
    exo = VARIANTS_AND_MORE[name]
    model = hf_model(name)
    found = gradients(model, tokens(2, 9))
    idle = [f".lambda_{p}1" for p in exo.drop_anchor] + [f".anchor.{p}_" for p in exo.drop_anchor]
    idle += [f".lambda_{p}2" for p in exo.drop_current] + [f".self_attn.{p}_proj" for p in exo.drop_current]
    for key, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in key for part in idle):
            assert found[key].any(), key


@every_kind
def test_a_few_steps_lower_the_loss(name: str) -> None:
    set_seed(0)
    model, ids = empty_model(VARIANTS_AND_MORE[name]).train(), tokens(2, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss < 2.0


def test_attention_dropout_acts_in_training_only() -> None:
    model, ids = hf_model("e-exoformer", attention_dropout=0.5), tokens(2, 9)
    assert torch.equal(logits(model, ids), logits(model, ids))
    model.train()
    assert not torch.equal(logits(model, ids), logits(model, ids))


# -- numbers and configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = hf_model(name), tokens(2, 9)
    expected = logits(model, ids).log_softmax(-1)
    half = logits(model.to(dtype), ids)
    assert half.dtype is dtype
    divergence = (expected.exp() * (expected - half.float().log_softmax(-1))).sum(-1)
    assert divergence.max() < (5e-2 if dtype is torch.bfloat16 else 1e-3)


def test_the_dtype_of_a_file_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    hf_model("e-exoformer", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert ExoFormerForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16
    assert ExoFormerForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype is torch.bfloat16
    assert ExoFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype is torch.float32


def test_scaled_rotary_embeddings_come_from_transformers() -> None:
    plain = hf_model("e-exoformer")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": SIZES.rotary_base}
    scaled = empty_model(VARIANTS_AND_MORE["e-exoformer"], rope_parameters=rope)
    scaled.load_state_dict(plain.state_dict())
    ids = tokens(1, 6)
    doubled = torch.arange(6)[None] * 2
    mask = torch.ones_like(ids)
    torch.testing.assert_close(
        logits(scaled, ids, attention_mask=mask, position_ids=doubled), logits(plain, ids), **CLOSE
    )


def test_interventions_are_asked_for_at_loading(tmp_path: Path) -> None:
    hf_model("e-exoformer").save_pretrained(tmp_path)
    changed = ExoFormerForCausalLM.from_pretrained(tmp_path, drop_anchor="kv")
    assert torch.equal(logits(changed, tokens(2, 7)), logits(hf_model("without-anchor-of-kv"), tokens(2, 7)))


def test_the_auto_classes_know_the_model() -> None:
    config = AutoConfig.for_model(
        "exoformer", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    assert type(config) is ExoFormerConfig
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert type(AutoModelForCausalLM.from_config(config)) is ExoFormerForCausalLM
    assert type(AutoModel.from_config(config)) is ExoFormerModel


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    model, ids = hf_model("dynamic-e-exoformer-h1"), tokens(2, 7)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), logits(model, ids))
