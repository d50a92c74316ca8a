#!/usr/bin/env python
"""Tokenise text into a Megatron dataset (PREFIX.bin, PREFIX.idx), or check one.

  python tools/preprocess_data.py --input corpus.jsonl.zst more/*.parquet --output-prefix data/train \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model --workers 8
  python tools/preprocess_data.py --check data/train

The output is used as '--data-path data/train': the prefix is taken as it is, nothing is appended to it.
PREFIX.json records the tokenizer and the counts, so that training refuses another tokenizer. If the tool is killed, or
the Hugging Face hub stops answering, the same command goes on where it stood (PREFIX.partial).
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.readers import SUFFIXES, TEXT_SPLITS
from megatron_exo.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec
from megatron_exo.data.validate import check_dataset, check_sidecar
from megatron_exo.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help=f"files ({' '.join(SUFFIXES)}), folders of them, or hf:NAME[:CONFIG[:SPLIT]] for a Hugging Face "
        "dataset, streamed; .json is read as JSON Lines",
    )
    parser.add_argument("--output-prefix", metavar="PREFIX", help="path of the dataset without suffix")
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES)
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="the SentencePiece .model; a Hugging Face folder or tokenizer.json; a folder with GPT-2's vocab.json and "
        "merges.txt (or encoder.json and vocab.bpe), or that vocabulary file",
    )
    parser.add_argument("--json-key", default="text", help="key or column with the text (default: %(default)s)")
    parser.add_argument(
        "--text-documents",
        choices=TEXT_SPLITS,
        default="file",
        help="a .txt file is one document, or one per block between blank lines (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the CPUs, %(default)s)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-document id (default: yes)",
    )
    parser.add_argument(
        "--empty-documents",
        choices=("skip", "error"),
        default="skip",
        help="what to do with a document without text, on which Megatron would fail (default: %(default)s, reported)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset, or unfinished work of another command"
    )
    parser.add_argument("--check", metavar="PREFIX", help="validate this dataset, all its tokens too, and stop")
    parser.add_argument("--vocab-size", type=int, help="with --check: the bound of token ids (default: PREFIX.json's)")
    args = parser.parse_args(argv)
    if args.check is None:
        needed = ("input", "output_prefix", "tokenizer_type", "tokenizer_model")
        missing = ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]
        if missing:
            parser.error(f"needs {', '.join(missing)} (or --check PREFIX alone)")
        if args.vocab_size is not None:
            parser.error("--vocab-size belongs to --check; a new dataset takes its vocabulary from the tokenizer")
    elif args.input is not None or args.output_prefix is not None:
        parser.error("--check validates an existing dataset; drop --input and --output-prefix")
    elif (args.tokenizer_type is None) != (args.tokenizer_model is None):
        parser.error("to compare the tokenizer too, --check needs both --tokenizer-type and --tokenizer-model")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    return args


def check(args: argparse.Namespace) -> None:
    check_dataset(args.check)
    sidecar = check_sidecar(args.check, args.tokenizer_type or "", args.tokenizer_model)
    vocab_size = args.vocab_size or (sidecar.vocab_size if sidecar else None)
    print(check_dataset(args.check, vocab_size, eod=sidecar.eod if sidecar else None, scan_tokens=True))


def run(args: argparse.Namespace) -> None:
    result = preprocess(
        args.input,
        args.output_prefix,
        TokenizerSpec(args.tokenizer_type, args.tokenizer_model),
        json_key=args.json_key,
        text_split=args.text_documents,
        append_eod=args.append_eod,
        skip_empty=args.empty_documents == "skip",
        workers=args.workers,
        overwrite=args.overwrite,
    )
    sidecar = result.sidecar
    if result.empty:
        more = ", ..." if sidecar.empty_documents > len(result.empty) else ""
        print(f"left out {sidecar.empty_documents} empty documents: {', '.join(result.empty)}{more}", file=sys.stderr)
    print(
        f"{args.output_prefix}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens ({sidecar.dtype}); "
        f"train with --data-path {args.output_prefix}"
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        run(args) if args.check is None else check(args)
    except (OSError, UserError) as error:
        sys.exit(f"preprocess_data: {error}")
    except KeyboardInterrupt:
        sys.exit("preprocess_data: interrupted")


if __name__ == "__main__":
    main()
