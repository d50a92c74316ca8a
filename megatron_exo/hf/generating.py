"""Continue prompts with the model in a Hugging Face folder, by transformers' own ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from megatron_exo.generation import Sampling, check_prompts
from megatron_exo.hf import ExoFormerForCausalLM
from megatron_exo.hf.loading import load_model, load_tokenizer


def load(folder: Path, *, needs_tokenizer: bool) -> tuple[ExoFormerForCausalLM, Any]:
    """The model of a folder by this package's code, and its tokenizer if it is needed.

    Raises:
        UserError: the folder does not hold them.
    """
    model = load_model(ExoFormerForCausalLM, folder)
    return model, load_tokenizer(folder) if needs_tokenizer else None


class _Rows(BaseStreamer):
    """Hands the new tokens of a single prompt on; the first that comes is the prompt."""

    def __init__(self, report: Callable[[int, int], None], eod: int | None) -> None:
        self._report, self._eod, self._has_prompt = report, eod, False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt and int(value.flatten()[0]) != self._eod:
            self._report(0, int(value.flatten()[0]))
        self._has_prompt = True

    def end(self) -> None:
        pass


@torch.no_grad()
def continue_with_transformers(
    model: ExoFormerForCausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    eod: int | None,
    use_cache: bool = True,
    prefill_chunk: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt; as :func:`megatron_exo.generation.generate`, with shorter prompts padded.

    Greedy text is the same as there. Sampled text is not: transformers draws for the batch as a whole.

    Raises:
        UserError: a prompt is empty, has ids outside of the vocabulary, or leaves no room.
    """
    check_prompts(prompts, sampling, model.config.vocab_size, model.config.max_position_embeddings)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
        choice = {"do_sample": True, "temperature": sampling.temperature}
        choice |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        use_cache=use_cache,
        prefill_chunk_size=prefill_chunk,
        eos_token_id=eod,
        pad_token_id=0 if eod is None else eod,
        **choice,
    )
    streamer = None if report is None else _Rows(report, eod)
    whole = model.generate(tokens, attention_mask=mask, generation_config=config, streamer=streamer)
    new = whole[:, longest:].tolist()
    return [row[: row.index(eod)] if eod is not None and eod in row else row for row in new]
