"""With and without a cache, in chunks, in batches and in packed rows, the model says the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from megatron_exo.hf import ExoFormerForCausalLM
from tests.hf.models import GROUPED, SIZES, SOME, hf_model, tokens

NEW_TOKENS = 20
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
pytestmark = pytest.mark.parametrize("name", SOME)


def greedy(model: ExoFormerForCausalLM, prompt: Tensor, **settings: object) -> Tensor:
    # Without a mask, transformers would take tokens of the prompt that happen to be the padding token for padding.
    defaults = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    return model.generate(prompt, **{**defaults, "max_new_tokens": NEW_TOKENS, "do_sample": False, **settings})


def greedy_by_hand(model: ExoFormerForCausalLM, prompt: Tensor, new_tokens: int) -> Tensor:
    """The whole text again for every token."""
    with torch.no_grad():
        for _ in range(new_tokens):
            following = model(prompt, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            prompt = torch.cat([prompt, following], dim=1)
    return prompt


@pytest.mark.parametrize(
    ("length", "new_tokens"), [(1, NEW_TOKENS), (7, NEW_TOKENS), pytest.param(20, 64, marks=pytest.mark.slow)]
)
def test_greedy_text_is_the_same_with_any_cache_and_without(name: str, length: int, new_tokens: int) -> None:
    model, prompt = hf_model(name), tokens(2, length)
    expected = greedy_by_hand(model, prompt, new_tokens)
    assert len(expected[0, length:].unique()) > 3, "a text that repeats itself at once shows little"
    for settings in (
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"logits_to_keep": 1},
    ):
        if length > 1 or "prefill_chunk_size" not in settings:
            text = greedy(model, prompt, max_new_tokens=new_tokens, **settings)
            assert torch.equal(text, expected), settings


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("chunks", [(12,), (5, 4, 3), (1,) * 12], ids=str)
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(name: str, chunks: tuple[int, ...], static: bool) -> None:
    model, ids = hf_model(name, GROUPED), tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids).logits
        parts = [model(part, cache=cache).logits for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)


def test_the_cache_holds_keys_and_values_and_nothing_else(name: str) -> None:
    model = hf_model(name, GROUPED)
    with torch.no_grad():
        cache = model(tokens(2, 12)).cache
    layers = [vars(layer) for layer in cache.layers]
    assert len(layers) == GROUPED.num_layers
    for layer in layers:
        tensors = {key: tuple(value.shape) for key, value in layer.items() if isinstance(value, Tensor)}
        assert tensors == dict.fromkeys(("keys", "values"), (2, GROUPED.num_query_groups, 12, GROUPED.kv_channels))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_of_a_padded_batch_give_what_each_gives_alone(name: str, attention: str) -> None:
    model = hf_model(name, attention=attention)
    prompts = [tokens(1, length, seed=length) for length in (3, 9, 6)]
    width = max(prompt.shape[1] for prompt in prompts)
    batch = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    texts = {kind: greedy(model, batch, attention_mask=mask, cache_implementation=kind) for kind in (None, "static")}
    with torch.no_grad():
        logits = model(batch, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for row, prompt in enumerate(prompts):
        alone = greedy(model, prompt)
        for text in texts.values():
            assert torch.equal(text[row, width - prompt.shape[1] :], alone[0])
        with torch.no_grad():
            torch.testing.assert_close(logits[row, -prompt.shape[1] :], model(prompt).logits[0], **CLOSE)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_documents_do_not_see_each_other(name: str, use_cache: bool, attention: str) -> None:
    model = hf_model(name, attention=attention)
    documents = [tokens(1, length, seed=length) for length in (5, 1, 8)]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        logits = model(packed, position_ids=positions, use_cache=use_cache).logits
        alone = torch.cat([model(document).logits for document in documents], dim=1)
        not_separated = model(packed).logits
    torch.testing.assert_close(logits, alone, **CLOSE)
    assert (not_separated - alone).abs().max() > 0.01


def test_beams_and_samples_run_and_a_cache_is_continued(name: str) -> None:
    model, prompt = hf_model(name), tokens(2, 5)
    beams = greedy(model, prompt, num_beams=3, num_return_sequences=2)
    assert beams.shape == (4, 5 + NEW_TOKENS)
    torch.manual_seed(0)
    samples = greedy(model, prompt, do_sample=True, top_k=5, temperature=0.7)
    torch.manual_seed(0)
    assert torch.equal(samples, greedy(model, prompt, do_sample=True, top_k=5, temperature=0.7, use_cache=False))

    first = greedy(model, prompt, max_new_tokens=8, return_dict_in_generate=True)
    second = greedy(model, first.sequences, max_new_tokens=NEW_TOKENS - 8, cache=first.cache)
    assert torch.equal(second, greedy(model, prompt))


def test_a_mask_as_long_as_the_text_so_far_works_beside_a_cache(name: str) -> None:
    model, ids = hf_model(name, SIZES), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions).logits
        first = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5])
        rest = model(ids[:, 5:], attention_mask=mask, position_ids=positions[:, 5:], cache=first.cache).logits
    torch.testing.assert_close(rest, whole[:, 5:], **CLOSE)
