#!/usr/bin/env python
"""Gather English prose from this Python installation into train.jsonl and validation.jsonl, without a network.

  python tools/build_demo_corpus.py --output-dir data

The text is Python's documentation topics, docstrings and comments of the standard library and of the installed
packages, and their descriptions: real English for trying things out, no substitute for a training corpus.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_exo.data.corpus import build_corpus, installed_sources
from megatron_exo.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for the two files")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        help="share of the documents to hold out; a document's split depends on its name alone (default: %(default)s)",
    )
    parser.add_argument(
        "--max-megabytes", type=float, default=24, help="stop at so much text (default: %(default)s, 1 MB = 10^6 bytes)"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the documents' order and split (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the CPUs, %(default)s)"
    )
    args = parser.parse_args(argv)
    if not 0 < args.validation_fraction < 1:
        parser.error(f"--validation-fraction must lie between 0 and 1, not {args.validation_fraction}")
    if not args.max_megabytes > 0:
        parser.error(f"--max-megabytes must be positive, not {args.max_megabytes}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        summary = build_corpus(
            installed_sources(),
            args.output_dir,
            validation_fraction=args.validation_fraction,
            max_bytes=round(args.max_megabytes * 1e6),
            seed=args.seed,
            workers=args.workers,
        )
    except (OSError, UserError) as error:
        sys.exit(f"build_demo_corpus: {error}")
    print(summary)
    print(f"wrote {args.output_dir / 'train.jsonl'} and {args.output_dir / 'validation.jsonl'}")


if __name__ == "__main__":
    main()
