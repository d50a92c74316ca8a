#!/usr/bin/env python
"""Make a Megatron dataset (PREFIX.bin, PREFIX.idx) of public shards of GPT-2 tokens, such as FineWeb-Edu's.

  hf download kjj0/finewebedu10B-gpt2 --repo-type dataset --local-dir shards
  python tools/convert_shards.py --input shards/finewebedu_train_*.bin --output-prefix data/train
  python tools/convert_shards.py --input shards/finewebedu_val_*.bin --output-prefix data/validation

A shard has a header of 256 int32 (magic 20240520, version 1, number of tokens) and uint16 tokens, as llm.c and
modded-nanogpt lay them out; documents are separated by token 50256. Every token is kept, in the order of the stream.
The headers are checked against the files' sizes, and every token against the vocabulary. If the tool is killed, the
same command goes on where it stood.
"""

from __future__ import annotations

import argparse
import sys

from megatron_exo.data.shard_conversion import VOCAB_SIZE, convert_shards
from megatron_exo.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec
from megatron_exo.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="SHARD", help="the shards, in the order of the stream"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the dataset without suffix")
    parser.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, help="with --tokenizer-model: GPT-2's tokenizer, to be recorded"
    )
    parser.add_argument("--tokenizer-model", metavar="PATH", help="its files, as for tools/preprocess_data.py")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset, or unfinished work of another command"
    )
    args = parser.parse_args(argv)
    if (args.tokenizer_type is None) != (args.tokenizer_model is None):
        parser.error("to record the tokenizer, pass both --tokenizer-type and --tokenizer-model")
    return args


def run(args: argparse.Namespace) -> None:
    spec = None if args.tokenizer_type is None else TokenizerSpec(args.tokenizer_type, args.tokenizer_model)
    sidecar = convert_shards(args.input, args.output_prefix, spec, overwrite=args.overwrite)
    if spec is None:
        print(
            f"no tokenizer was given to record: runs are held to a vocabulary of {VOCAB_SIZE}, not to GPT-2's files "
            "(--tokenizer-type, --tokenizer-model)",
            file=sys.stderr,
        )
    print(
        f"{args.output_prefix}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens of {len(args.input)} "
        f"shards; train with --data-path {args.output_prefix}"
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        run(args)
    except (OSError, UserError) as error:
        sys.exit(f"convert_shards: {error}")
    except KeyboardInterrupt:
        sys.exit("convert_shards: interrupted")


if __name__ == "__main__":
    main()
