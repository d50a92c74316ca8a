#!/usr/bin/env python
"""Damage files of every kind that this project reads, and see what the programs' own readers make of them.

  python tools/fuzz_readers.py                                      # 3000 inputs of every kind
  python tools/fuzz_readers.py --kind idx --inputs 20000 --seed 7 --keep failures

Each kind begins with a valid small file, made by the project's own writers, which is then cut, spliced, overwritten
with random bytes and telling numbers, or edited in its structure. Every input is read in a worker process with bounded
memory and time. A reader may read it, or refuse it in one line; anything else is a failure, and the exit status is 1.

Input N of a kind depends on the seed alone, so a failure can be had again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_exo.fuzzing.kinds import KINDS, damaged
from megatron_exo.fuzzing.process import OUTCOMES, Result, fuzz
from megatron_exo.fuzzing.samples import STEP, make_samples


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of files (default: all)")
    parser.add_argument("--inputs", type=int, default=3000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=1024, metavar="MiB", help="of a worker (default: %(default)s)")
    parser.add_argument("--time-out", type=float, default=10.0, metavar="S", help="of an input (default: %(default)s)")
    parser.add_argument(
        "--samples", type=Path, metavar="DIR", help="valid files of an earlier call, or where to put them"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the inputs that failed there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and failures there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as scratch:
        samples = args.samples or Path(scratch) / "samples"
        if not (samples / STEP).is_dir():
            make_samples(samples)
        limits = {"memory": args.memory << 20, "time_out": args.time_out}
        results = {}
        print(_aligned(["kind", *OUTCOMES, "most memory", "inputs/s"]))
        for name in args.kind:
            results[name] = fuzz(name, samples, inputs=args.inputs, seed=args.seed, **limits)
            print(_row(name, results[name]), flush=True)
            if args.keep is not None:
                _keep(results[name], name, samples, args.seed, args.keep)
    if args.json is not None:
        args.json.write_text(json.dumps({name: vars(result) for name, result in results.items()}, indent=1) + "\n")
    return 1 if any(result.failures for result in results.values()) else 0


def _keep(result: Result, name: str, samples: Path, seed: int, folder: Path) -> None:
    kind = KINDS[name]()
    valid = kind.take(samples) if kind.take else (samples / kind.file).read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    for number, _, _ in result.failures:
        suffix = Path(kind.file).suffix or Path(kind.file).name
        (folder / f"{name}-{seed}-{number}{suffix}").write_bytes(damaged(kind, valid, name, seed, number))


def _row(name: str, result: Result) -> str:
    """The counts of a kind, and below them what went wrong."""
    counts = [f"{result.counts[outcome]:,}" for outcome in OUTCOMES]
    rate = sum(result.counts.values()) / result.seconds
    lines = [_aligned([name, *counts, f"{result.most_memory >> 20} MiB", f"{rate:.0f}"])]
    kinds = Counter((outcome, said) for _, outcome, said in result.failures)
    for (outcome, said), count in kinds.most_common(20):
        number = next(number for number, *what in result.failures if what == [outcome, said])
        lines.append(f"    input {number}, {count} time(s): {outcome}: {' '.join(said.split())[:200]}")
    return "\n".join(lines)


def _aligned(cells: Sequence[str]) -> str:
    return f"{cells[0]:<16}" + "".join(f"{cell:>17}" for cell in cells[1:])


if __name__ == "__main__":
    sys.exit(main())
