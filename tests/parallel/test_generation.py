"""Decoding with a key-value cache gives the logits of a full forward pass, on every layout that can generate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.generation import Sampling, generate
from megatron_exo.inference import ExoInferenceWrapper
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer
from tests.plain_reference import PlainSizes, random_state
from tests.ranks import RankError, run_on_ranks

MHA = PlainSizes(num_layers=4)
GQA = PlainSizes(num_layers=4, num_attention_heads=8, num_query_groups=4)
LENGTH = 9
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)]
QUICK_CASES = [
    ("dynamic-e-exoformer", MHA),
    ("e-exoformer-h1", MHA),
    ("s-nuresformer", MHA),
    ("dynamic-e-exoformer", GQA),
]
ALL_CASES = [(name, MHA) for name in VARIANTS]
WHOLE_PROMPTS = [[1], [4], [LENGTH - 1], [LENGTH]]
"""Where prefill steps end; every position after the last one is decoded alone."""
CHUNKED_PROMPTS = [[3, 6], [1, 3, LENGTH]]
TOLERANCE = 1e-5


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, MHA.vocab_size, (2, length), generator=torch.Generator().manual_seed(5))


def _trainer(name: str, sizes: PlainSizes, layout: Layout) -> Trainer:
    exo = VARIANTS[name].exo
    return Trainer(exo, sizes, layout, random_state(exo, sizes, seed=7))


def _wrapper(trainer: Trainer, wrapper_class: type = ExoInferenceWrapper) -> Any:
    """With a cache that has more room than is needed."""
    return wrapper_class(trainer.chunks[0], StaticInferenceContext(max_batch_size=3, max_sequence_length=LENGTH + 2))


def _decode(wrapper: Any, tokens: Tensor, prefill_ends: Sequence[int]) -> Tensor | None:
    """[b, s, padded vocabulary] on the last stage: prefill up to each end in turn, then one token at a time."""
    context = wrapper.inference_context
    context.config.materialize_only_last_token_logits = False
    wrapper.prep_model_for_inference()
    steps = []
    with InferenceMode.active():
        batch = wrapper.prep_inference_input(tokens)
        for start, end in pairwise([0, *prefill_ends, *range(prefill_ends[-1] + 1, tokens.shape[1] + 1)]):
            if start >= prefill_ends[-1]:
                context.enable_decode_mode()
            steps.append(wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(batch, start, end)))
    return None if steps[0] is None else torch.cat(steps, dim=1)


def _errors(
    layout: Layout,
    cases: Sequence[tuple[str, PlainSizes]],
    prompts: Sequence[Sequence[int]],
    wrapper_class: type = ExoInferenceWrapper,
) -> list[Tensor] | None:
    """Per case [prompts, s]: how far the logits of each position are off, on the last stage.

    The prompts of a case share one cache, so each finds what the one before left there.
    """
    errors = []
    for name, sizes in cases:
        trainer = _trainer(name, sizes, layout)
        full = trainer.logits(_tokens())
        wrapper = _wrapper(trainer, wrapper_class)
        decoded = [_decode(wrapper, _tokens(), prompt) for prompt in prompts]
        if full is not None:
            off = [logits[..., : sizes.vocab_size].float() - full for logits in decoded if logits is not None]
            errors.append(torch.stack(off).abs().amax(dim=(1, 3)))
    return errors or None


def _on_last_stage(layout: Layout, results: list[list[Tensor] | None]) -> list[list[Tensor]]:
    found = [result for result in results if result is not None]
    assert len(found) == layout.tp
    return found


@pytest.mark.parametrize(
    ("layout", "cases"),
    [pytest.param(layout, QUICK_CASES, id=f"{layout}-quick") for layout in LAYOUTS]
    + [pytest.param(layout, ALL_CASES, id=f"{layout}-all", marks=pytest.mark.slow) for layout in LAYOUTS[-1:]],
)
def test_prefill_and_decode_give_the_logits_of_a_full_forward_pass(
    layout: Layout, cases: list[tuple[str, PlainSizes]]
) -> None:
    results = run_on_ranks(layout.world_size, _errors, layout, cases, WHOLE_PROMPTS)
    for errors in _on_last_stage(layout, results):
        for case, error in zip(cases, errors, strict=True):
            assert error.shape == (len(WHOLE_PROMPTS), LENGTH), case
            assert error.max() < TOLERANCE, f"{case}: {error}"


@pytest.mark.parametrize(
    "layout",
    # The last one's masks are Megatron's.
    [Layout(), Layout(pp=2), Layout(transformer={"attention_backend": AttnBackend.local})],
    ids=str,
)
def test_a_prompt_may_be_prefilled_in_chunks(layout: Layout) -> None:
    results = run_on_ranks(layout.world_size, _errors, layout, QUICK_CASES, CHUNKED_PROMPTS)
    for errors in _on_last_stage(layout, results):
        for case, error in zip(QUICK_CASES, errors, strict=True):
            assert error.max() < TOLERANCE, f"{case}: {error}"


def _finished_texts() -> tuple[list[list[int]], list[list[int]]]:
    """Of two prompts: whole, and the first finished after two tokens."""
    trainer = _trainer(*QUICK_CASES[0], Layout())
    settings: dict[str, Any] = {
        "vocab_size": MHA.vocab_size,
        "eod": None,
        "longest": LENGTH,
        "config": trainer.config,
        "pg_collection": trainer.pg_collection,
    }
    arguments = trainer.chunks[0], [[5, 6], [7]], Sampling(max_new_tokens=5)
    whole = generate(*arguments, **settings)
    ended = generate(*arguments, **settings, is_finished=lambda row, tokens: row == 0 and len(tokens) == 2)
    return whole, ended


def test_a_text_that_needs_no_more_tokens_gets_none_and_the_others_go_on() -> None:
    ((whole, ended),) = run_on_ranks(1, _finished_texts)
    assert [len(text) for text in whole] == [5, 5]
    assert ended == [whole[0][:2], whole[1]]


def test_bf16_decodes_to_within_its_rounding_of_a_full_forward_pass() -> None:
    layout = Layout(pp=2, bf16=True)
    (errors,) = _on_last_stage(layout, run_on_ranks(2, _errors, layout, QUICK_CASES, WHOLE_PROMPTS))
    for case, error in zip(QUICK_CASES, errors, strict=True):
        assert error.max() < 0.1, f"{case}: {error}"


def test_stages_cannot_talk_through_megatrons_own_receive_buffer() -> None:
    layout = Layout(pp=2)
    # Where no anchor rides along, the same program runs with Megatron's wrapper; so it is the width that ends it below.
    without_anchor = run_on_ranks(2, _errors, layout, [("gated", MHA)], [[4]], GPTInferenceWrapper)
    assert _on_last_stage(layout, without_anchor)[0][0].max() < TOLERANCE
    with pytest.raises(RankError):
        run_on_ranks(2, _errors, layout, [("dynamic-e-exoformer", MHA)], [[4]], GPTInferenceWrapper)


def test_megatrons_own_wrapper_lets_a_chunk_see_its_future() -> None:
    # The day this fails, Megatron masks chunks itself and our mask can go.
    ((error,),) = run_on_ranks(1, _errors, Layout(), [("gated", MHA)], [[3, 6]], GPTInferenceWrapper)
    assert error[0, :3].max() < TOLERANCE
    assert error[0, 3] > 1e-2


def _refusal(layout: Layout) -> str:
    trainer = _trainer("dynamic-e-exoformer", MHA, layout)
    with pytest.raises(UserError) as refusal:
        _wrapper(trainer)
    with pytest.raises(UserError):
        ExoInferenceWrapper(trainer.chunks, StaticInferenceContext(1, LENGTH))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(pp=2, vpp=2),
            "generation does not support virtual pipeline stages: Megatron's inference runs one model chunk per rank; "
            "load the same checkpoint without virtual stages",
        ),
        (
            Layout(tp=2, sp=True),
            "generation does not support sequence parallelism: the one token of a decode step cannot be cut over "
            "ranks; load the same checkpoint without --sequence-parallel",
        ),
        (
            Layout(cp=2),
            "generation does not support context parallelism: each rank's cache holds whole sequences; "
            "load the same checkpoint with --context-parallel-size 1",
        ),
    ],
    ids=["virtual stages", "sequence parallelism", "context parallelism"],
)
def test_layouts_that_cannot_generate_are_refused_in_one_line(layout: Layout, message: str) -> None:
    assert run_on_ranks(layout.world_size, _refusal, layout) == [message] * layout.world_size


def _generate_from_a_checkpoint(trained: Layout, layout: Layout, folder: Path) -> float:
    tokens = _tokens(8)  # sequence parallelism cuts them over the ranks
    trainer = _trainer("dynamic-e-exoformer", MHA, trained)
    full = trainer.logits(tokens)
    trainer.save(folder)
    exo = VARIANTS["dynamic-e-exoformer"].exo
    generator = Trainer(exo, MHA, layout)
    generator.load(folder)
    decoded = _decode(_wrapper(generator), tokens, [4])
    assert full is not None
    assert decoded is not None
    return float((decoded[..., : MHA.vocab_size] - full).abs().max())


@pytest.mark.slow
def test_a_checkpoint_trained_with_sequence_parallelism_generates_without(tmp_path: Path) -> None:
    errors = run_on_ranks(2, _generate_from_a_checkpoint, Layout(tp=2, sp=True), Layout(tp=2), tmp_path)
    assert max(errors) < TOLERANCE


def _refusal_of_a_chunk() -> str:
    trainer = _trainer("e-exoformer", MHA, Layout())
    wrapper = _wrapper(trainer)
    trainer.config.transformer_impl = "transformer_engine"
    _decode(wrapper, _tokens(), [4])
    with pytest.raises(UserError) as refusal:
        _decode(wrapper, _tokens(), [3, 6])
    return str(refusal.value)


def test_transformer_engine_refuses_to_prefill_in_chunks() -> None:
    (message,) = run_on_ranks(1, _refusal_of_a_chunk)
    assert message.startswith("a prompt cannot be prefilled in chunks with --transformer-impl transformer_engine")
