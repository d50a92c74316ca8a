#!/usr/bin/env python
"""Draw the loss curves of one or more training runs into a picture, and print them as one line each.

  python tools/plot_curve.py runs/base runs/e-exoformer --output curves.png --reference "unigram entropy=6.98"

A run is the folder it saved to (or its logs, or a metrics.jsonl). Runs that were resumed are one curve.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from megatron_exo.curves import AXES, draw, read_run, summary
from megatron_exo.data.statistics import unigram_entropy
from megatron_exo.errors import UserError


def reference(text: str) -> tuple[str, float]:
    """``NAME=VALUE``, as an argparse type."""
    name, separator, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not separator or not name or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a number for VALUE")
    return name, number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, help="picture to write (default: loss.png in the first run's folder)")
    parser.add_argument("--x", choices=AXES, default="tokens", help="horizontal axis (default: %(default)s)")
    parser.add_argument(
        "--reference",
        type=reference,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="draw a horizontal line at a loss; may be given several times",
    )
    parser.add_argument(
        "--unigram-entropy",
        metavar="PREFIX",
        help="draw the entropy of the token frequencies of a dataset: below it, a model has learned from context",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    first = args.runs[0]
    output = args.output or (first.parent if first.is_file() else first) / "loss.png"
    try:
        runs = [read_run(path) for path in args.runs]
        names = [run.name for run in runs]
        for run, path in zip(runs, args.runs, strict=True):
            if names.count(run.name) > 1:
                run.name = str(path)
            for notice in run.notices:
                print(f"plot_curve: {notice}", file=sys.stderr)
            print(summary(run))
        references = dict(args.reference)
        if args.unigram_entropy is not None:
            references["unigram entropy"] = unigram_entropy(args.unigram_entropy)
            print(f"unigram entropy of {args.unigram_entropy}: {references['unigram entropy']:.4f} nats per token")
        draw(runs, output, x=args.x, references=references)
    except (UserError, OSError) as error:
        sys.exit(f"plot_curve: {error}")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
