#!/usr/bin/env python
"""Continue prompts with a trained model: a checkpoint of a run, on any layout of ranks, or a Hugging Face folder.

  python tools/generate.py runs/a --prompt "The list of all"
  python tools/generate.py runs/a/iter_0002000 --prompts prompts.txt --temperature 0.8 --top-p 0.95 --seed 1
  torchrun --nproc-per-node 4 tools/generate.py runs/a --prompt "…" --tensor-model-parallel-size 2 \\
      --pipeline-model-parallel-size 2
  python tools/generate.py exported/ --prompt "The list of all"         # a folder with config.json

Without --temperature the most likely token is taken, and the text is the same with and without the cache, alone and in
a batch, on every layout, and from the exported folder. One prompt is printed as it grows. A folder is loaded by this
project's code, never by code in it. Any further argument is Megatron's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_exo import platform
from megatron_exo.errors import UserError, one_line_errors

if TYPE_CHECKING:
    from megatron_exo.generation import Sampling


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a run's folder, an iter_N in it, or a folder with config.json"
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times: one batch")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    prompts.add_argument(
        "--ids", action="append", metavar="'1 2 3'", help="token ids in place of text; ids are printed"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="among the K most likely; 0 for all (default)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="among those that have P together")
    parser.add_argument("--seed", type=int, default=0, help="of each prompt's choices (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="read the whole text again for each token")
    parser.add_argument("--prefill-chunk", type=int, metavar="N", help="read a prompt N tokens at a time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write prompts, texts and ids")
    args, megatron = parser.parse_known_args(argv)
    if args.prefill_chunk is not None and args.prefill_chunk < 1:
        parser.error(f"--prefill-chunk {args.prefill_chunk}: pass 1 or more")
    return args, megatron


def main(argv: list[str] | None = None) -> None:
    args, megatron = parse_args(argv)
    with one_line_errors():
        platform.activate()
        from megatron_exo.generation import Sampling, read_prompts

        sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
        texts = args.prompt or args.ids or read_prompts(args.prompts)
        if (args.model / "config.json").is_file():
            if megatron:
                raise UserError(f"{megatron[0]} is Megatron's, and {args.model} is a Hugging Face folder; leave it out")
            _with_transformers(args, sampling, texts)
        else:
            _with_megatron(args, megatron, sampling, texts)


def _ids_of(texts: Sequence[str], are_ids: bool, encode: Callable[[str], list[int]]) -> list[list[int]]:
    if not are_ids:
        return [encode(text) for text in texts]
    try:
        return [[int(word) for word in text.split()] for text in texts]
    except ValueError as error:
        raise UserError(f"--ids takes numbers with spaces between them: {error}") from error


class Printer:
    """Shows the continuation of a single prompt as it grows."""

    def __init__(self, prompt: str, decode: Callable[[list[int]], str], before: list[int]) -> None:
        self._decode, self._ids, self._shown = decode, list(before), len(decode(before))
        print(prompt, end="", flush=True)

    def __call__(self, row: int, token: int) -> None:
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else in the middle of a character
            print(text[self._shown :], end="", flush=True)
            self._shown = len(text)


def _with_megatron(args: argparse.Namespace, megatron: list[str], sampling: Sampling, texts: list[str]) -> None:
    import torch.distributed as dist

    from megatron_exo import console
    from megatron_exo.generation import generate
    from megatron_exo.trained_model import load_trained_model

    if args.ids is None and "--tokenizer-type" not in megatron:
        _check_tokenizer(args.model)
    is_shown = os.environ.get("RANK", "0") == "0"
    quietly = console.install(None, rank=0, world_size=1, seq_length=1)  # Megatron says much while it starts
    with quietly, contextlib.redirect_stdout(io.StringIO()):
        model = load_trained_model(args.model, megatron)
    if model.start.args.data_parallel_size > 1:
        raise UserError(
            f"{model.start.args.world_size} processes are more than tensor- times pipeline-parallel ones; each would "
            "generate the same text, start fewer"
        )
    tokenizer = model.start.tokenizer
    decode = _spaced if args.ids else tokenizer.detokenize
    prompts = _ids_of(texts, args.ids is not None, tokenizer.tokenize)
    report = Printer(texts[0], decode, prompts[0]) if len(texts) == 1 and is_shown else None
    new = generate(
        model.chunks[0],
        prompts,
        sampling,
        vocab_size=model.start.vocab_size,
        eod=None if args.ids else tokenizer.eod,
        longest=model.start.args.max_position_embeddings,
        config=model.start.model_config.transformer,
        pg_collection=model.groups,
        use_cache=not args.no_cache,
        prefill_chunk=args.prefill_chunk,
        report=report,
    )
    if is_shown:
        _finish(args, texts, prompts, new, decode, is_printed=report is not None)
    dist.barrier()
    dist.destroy_process_group()


def _check_tokenizer(path: Path) -> None:
    from megatron_exo.checkpoints.inspection import checkpoint_at, described_as_here, read_description

    folder = checkpoint_at(path)
    with described_as_here(folder):
        kind = read_description(folder)["arguments"]["tokenizer_type"]
    if kind == "NullTokenizer":
        raise UserError(f"{path} was trained on mock data, without a tokenizer; pass --ids '1 2 3' in place of text")


def _with_transformers(args: argparse.Namespace, sampling: Sampling, texts: list[str]) -> None:
    from megatron_exo.hf.generating import continue_with_transformers, load

    model, tokenizer = load(args.model, needs_tokenizer=args.ids is None)
    decode = _spaced if args.ids else tokenizer.decode
    prompts = _ids_of(texts, args.ids is not None, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    report = Printer(texts[0], decode, prompts[0]) if len(texts) == 1 else None
    new = continue_with_transformers(
        model,
        prompts,
        sampling,
        eod=None if args.ids else tokenizer.eos_token_id,
        use_cache=not args.no_cache,
        prefill_chunk=args.prefill_chunk,
        report=report,
    )
    _finish(args, texts, prompts, new, decode, is_printed=report is not None)


def _spaced(ids: list[int]) -> str:
    return "".join(f" {token}" for token in ids)


def _finish(
    args: argparse.Namespace,
    texts: Sequence[str],
    prompts: Sequence[list[int]],
    new: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    *,
    is_printed: bool,
) -> None:
    continued = [decode(a + b)[len(decode(a)) :] for a, b in zip(prompts, new, strict=True)]
    if is_printed:
        print()
    else:
        for text, continuation in zip(texts, continued, strict=True):
            print(f"{text}{continuation}\n" + "-" * 40)
    if args.json is not None:
        columns = zip(texts, continued, prompts, new, strict=True)
        records = [{"prompt": a, "text": b, "prompt_ids": c, "ids": d} for a, b, c, d in columns]
        args.json.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
