"""Text from a trained model: prompts of any lengths in one batch, token by token, on Megatron's layouts of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.inference import ExoInferenceWrapper, compute_logits
from megatron_exo.model.config import ExoTransformerConfig

Report = Callable[[int, int], None]
"""Told of each new token: the row of its prompt, and the token."""


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file, one a line; lines without text are left out.

    Raises:
        UserError: it cannot be read, or has no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path} cannot be read: {error}; pass a text file in UTF-8") from error
    if not lines:
        raise UserError(f"--prompts {path} has no line with text; write one prompt a line")
    return lines


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and for how long.

    Args:
        temperature: of the distribution; 0 takes the most likely token.
        top_k: choose among so many most likely tokens; 0 for all.
        top_p: choose among the most likely tokens that have this probability together, at least one.
        seed: each prompt has a generator of its own, so that its text does not depend on the others in its batch.

    Raises:
        UserError: naming the value that is out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_wrong, allowed in (
            ("max_new_tokens", self.max_new_tokens < 1, "1 or more"),
            ("temperature", not 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k < 0, "0 (all) or more"),
            ("top_p", not 0 < self.top_p <= 1, "above 0, up to 1"),
        ):
            if is_wrong:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} is out of range; pass {allowed}")

    def generators(self, count: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self.seed) for _ in range(count)]

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The next token of each row: logits [b, vocab] → int64 [b]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = (logits.float() / self.temperature).softmax(-1)
        ordered, tokens = probabilities.sort(-1, descending=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        before = ordered.cumsum(-1) - ordered  # of the tokens that are more likely
        is_out = (before >= self.top_p) | (ranks >= (self.top_k or ordered.shape[-1]))
        ordered = ordered.masked_fill(is_out & (ranks > 0), 0.0).cpu()
        chosen = [torch.multinomial(row, 1, generator=g) for row, g in zip(ordered, generators, strict=True)]
        return tokens.gather(-1, torch.stack(chosen).to(tokens.device)).squeeze(-1)


class CachedSteps:
    """Logits with a cache of mixed keys and values, :class:`~megatron_exo.inference.ExoInferenceWrapper`.

    Args:
        model: this rank's only chunk.
        tokens: int64 [b, s], written while generation goes on.
        chunk: how much of a prompt is read at once; ``None`` for all of it.
    """

    def __init__(self, model: torch.nn.Module, tokens: Tensor, chunk: int | None = None) -> None:
        self._context = StaticInferenceContext(max_batch_size=tokens.shape[0], max_sequence_length=tokens.shape[1])
        self._wrapper = ExoInferenceWrapper(model, self._context)
        self._wrapper.prep_model_for_inference()
        self._batch = self._wrapper.prep_inference_input(tokens)
        self._chunk = chunk
        self._seen = 0

    def after(self, end: int) -> Tensor | None:
        """[b, padded vocabulary] after ``end`` tokens, on the last stage; ends ascend from call to call."""
        if self._seen:
            self._context.enable_decode_mode()
        step = self._chunk or end
        logits = None
        with InferenceMode.active():
            for start, stop in pairwise([*range(self._seen, end, step), end]):
                window = self._wrapper.get_batch_for_context_window(self._batch, start, stop)
                logits = self._wrapper.run_one_forward_step(window)
        self._seen = end
        return None if logits is None else logits[:, -1]


class WholeSteps:
    """Logits of the whole text again at every step: slow, and what the cache is held against."""

    def __init__(
        self, model: torch.nn.Module, tokens: Tensor, vocab_size: int, config: ExoTransformerConfig, groups: Any
    ) -> None:
        self._model, self._tokens, self._vocab_size = model, tokens, vocab_size
        self._config, self._groups = config, groups

    def after(self, end: int) -> Tensor | None:
        """As :meth:`CachedSteps.after`."""
        logits = compute_logits([self._model], self._tokens[:, :end], self._vocab_size, self._config, self._groups)
        return None if logits is None else logits[:, -1]


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab_size: int,
    eod: int | None,
    longest: int,
    config: ExoTransformerConfig,
    pg_collection: ProcessGroupCollection,
    use_cache: bool = True,
    prefill_chunk: int | None = None,
    report: Report | None = None,
    is_finished: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue every prompt; the same on every rank.

    A prompt that is longer than the shortest goes on with its own tokens until they are used up, so nothing is padded,
    and each prompt gets the text that it would get alone.

    Args:
        model: this rank's only chunk.
        prompts: token ids, at least one each.
        vocab_size: ids that stand for tokens; the padding beyond is never chosen.
        eod: the token that ends a text, and is not part of it.
        longest: how many tokens a prompt and its continuation may have together.
        is_finished: whether a text needs no more tokens, asked with its row and its new tokens after each of them.

    Returns:
        The new tokens of each prompt.

    Raises:
        UserError: a prompt is empty, has ids outside of the vocabulary, or leaves no room.
    """
    check_prompts(prompts, sampling, vocab_size, longest)
    device = next(model.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(lengths) + sampling.max_new_tokens, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    steps: CachedSteps | WholeSteps
    if use_cache:
        steps = CachedSteps(model, tokens, prefill_chunk)
    else:
        steps = WholeSteps(model, tokens, vocab_size, config, pg_collection)
    generators, texts = sampling.generators(len(prompts)), [list[int]() for _ in prompts]
    open_rows = set(range(len(prompts)))
    for end in range(min(lengths), tokens.shape[1]):
        logits = steps.after(end)
        chosen = tokens.new_zeros(len(prompts))
        if logits is not None:
            writes = [row for row in sorted(open_rows) if end >= lengths[row]]
            if writes:
                chosen[writes] = sampling.choose(logits[writes, :vocab_size], [generators[row] for row in writes])
        if pg_collection.pp.size() > 1:
            last = dist.get_global_rank(pg_collection.pp, pg_collection.pp.size() - 1)
            dist.broadcast(chosen, src=last, group=pg_collection.pp)
        for row in sorted(open_rows):
            if end < lengths[row]:
                continue
            token = int(chosen[row])
            tokens[row, end] = token
            if token == eod:
                open_rows.discard(row)
                continue
            texts[row].append(token)
            if report is not None:
                report(row, token)
            if len(texts[row]) == sampling.max_new_tokens or (is_finished and is_finished(row, texts[row])):
                open_rows.discard(row)
        if not open_rows:
            break
    return texts


def check_prompts(prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int, longest: int) -> None:
    """Refuse what cannot be continued.

    Raises:
        UserError: naming the prompt, counted from 1.
    """
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} has no token; give at least one")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise UserError(f"prompt {number} has token {wrong}, the vocabulary has {vocab_size}; check the tokenizer")
        if len(prompt) + sampling.max_new_tokens > longest:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, and with --max-new-tokens {sampling.max_new_tokens} it is "
                f"longer than the {longest} that the model was trained on; pass fewer"
            )
