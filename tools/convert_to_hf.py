#!/usr/bin/env python
"""Convert a training checkpoint to a Hugging Face folder, and see that it computes the same.

  python tools/convert_to_hf.py runs/a models/a                       # the checkpoint that the run would go on from
  python tools/convert_to_hf.py runs/a/iter_0002000 models/a --dtype bf16

One process on the CPU reads a checkpoint of any layout of ranks, with memory for about two of its tensors; the
verification at the end then runs Megatron's model and transformers' one after the other, which takes memory for one of
them in float32. A conversion that was killed leaves OUT.partial; the same command goes on with it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from megatron_exo import platform
from megatron_exo.errors import one_line_errors

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a run's folder, or an iter_N in it")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("keep", "fp32", "bf16", "fp16"),
        default="keep",
        help="of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size", type=size, default=size("4GB"), metavar="SIZE", help="of a file of weights (default: 4GB)"
    )
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not read the checkpoint's checksums first, and do not run both models afterwards",
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this repository, private if new")
    return parser.parse_args(argv)


def size(text: str) -> int:
    """Bytes, such as ``4GB`` or ``500MB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.lower())
    if match is None or not (count := int(float(match[1]) * UNITS[match[2]])):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 4GB or 500MB")
    return count


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with one_line_errors():
        os.environ.setdefault("MEGATRON_EXO_DEVICE", "cpu")
        platform.activate()
        from megatron_exo.convert.exporting import DTYPES, Options, export_checkpoint

        options = Options(DTYPES[args.dtype], args.shard_size, args.verify, args.push_to_hub)
        export_checkpoint(args.checkpoint, args.out, options)


if __name__ == "__main__":
    sys.exit(main())
