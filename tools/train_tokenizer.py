#!/usr/bin/env python
"""Train a SentencePiece tokenizer on text, JSON Lines or Parquet files.

  python tools/train_tokenizer.py --input data/train.jsonl --output data/tokenizer --vocab-size 8192

The result, data/tokenizer.model, is used as '--tokenizer-type SentencePieceTokenizer --tokenizer-model
data/tokenizer.model'. Its ids 0 to 3 are unknown, begin, end of document and padding; nothing of the text is lost.
"""

from __future__ import annotations

import argparse
import sys

from megatron_exo.data.tokenizer_training import MODEL_TYPES, train_tokenizer
from megatron_exo.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="the inputs that tools/preprocess_data.py takes"
    )
    parser.add_argument(
        "--output", required=True, metavar="PATH", help="file to write (.model is appended), or a folder"
    )
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of ids (default: %(default)s)")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="(default: %(default)s)")
    parser.add_argument("--json-key", default="text", help="key or column with the text (default: %(default)s)")
    parser.add_argument(
        "--max-sentences",
        type=int,
        default=1_000_000,
        help="train on a random sample of so many lines, held in memory (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for name in ("vocab_size", "max_sentences"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        path = train_tokenizer(
            args.input,
            args.output,
            args.vocab_size,
            model_type=args.model_type,
            json_key=args.json_key,
            max_sentences=args.max_sentences,
        )
    except (OSError, UserError) as error:
        sys.exit(f"train_tokenizer: {error}")
    print(f"{path}: {args.vocab_size} ids; use --tokenizer-type SentencePieceTokenizer --tokenizer-model {path}")


if __name__ == "__main__":
    main()
