#!/usr/bin/env python
"""Tell in a few minutes whether this code runs on this machine's GPU, and computes there what a CPU computes.

  python tools/gpu_smoke.py --markdown smoke.md      # one GPU; nothing is downloaded
  python tools/gpu_smoke.py --cpu                    # the same program where there is none, CPU against CPU

Three variants (static mixing, dynamic mixing, internal anchor) run on the local backend and, where it is installed,
on Transformer Engine, in float32 and in bfloat16: build the model, forward, backward, 20 optimizer steps, save, resume
in a new model, and timed steps. Losses, logits and gradients are compared with a float32 run of the same weights and
batches on the CPU; the bounds, and why they are what they are, stand in megatron_exo/smoke/cases.py. Each case is run
in a process apart: one that fails leaves the others alone.

It needs torch, megatron-core, numpy and psutil, and about 3 GB in the temporary folder (TMPDIR) at the medium size.
Where the package is not installed, run it from the root of the repository with PYTHONPATH=. in front. The exit status
is 0 if everything passed and 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shlex
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.smoke.cases import BACKENDS, BOUNDS, DTYPES, SAME_DEVICE, SIZES, VARIANTS, Case, Result
from megatron_exo.smoke.process import Worker, WorkerError, start_checks
from megatron_exo.smoke.report import COLUMNS, as_json, cells, failures, markdown, summary, text_row

_CPU_TIMEOUT_S, _GPU_TIMEOUT_S = 1800.0, 300.0
_LOG_CHARACTERS = 100_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run the cases on the CPU too, not on cuda:0")
    parser.add_argument(
        "--sizes",
        choices=SIZES,
        help="medium: hidden size 1024, 8 layers, 1024 tokens (default); small: seconds on a CPU (default with --cpu)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything that was measured")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the table for docs/hardware.md")
    args = parser.parse_args(argv)
    args.sizes = args.sizes or ("small" if args.cpu else "medium")
    for path in (args.json, args.markdown):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path} cannot be written: there is no folder {path.parent}")
    return args


def run_cases(tested: Worker, reference: Worker, folder: Path, size: str, *, has_te: bool) -> Iterator[Result]:
    """The results, each as soon as it is there; references are computed ahead, on the CPU, while the GPU is at work."""
    references = {}
    for variant in VARIANTS:
        path = folder / f"{variant}.pt"
        references[variant] = path, reference.submit("record_reference", Case(variant, "local", "fp32", size), path)
    for variant, (path, recorded) in references.items():
        for backend in BACKENDS if has_te else BACKENDS[:1]:
            for dtype in DTYPES:
                case = Case(variant, backend, dtype, size)
                bounds = SAME_DEVICE if tested is reference and dtype == "fp32" else BOUNDS[dtype]
                if error := recorded.exception():
                    yield Result(case, error=f"not run, because the CPU failed: {error}")
                    continue
                try:
                    yield tested.submit("run_case", case, path, bounds).result()
                except WorkerError as error:
                    yield Result(case, error=str(error))
        path.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    on_gpu = not args.cpu
    facts = {
        "command": shlex.join(["python", "tools/gpu_smoke.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    results = []
    with one_line_errors(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_smoke-")))
        log = folder / "log"
        reference = stack.enter_context(Worker(partial(start_checks, False), log=log, timeout_s=_CPU_TIMEOUT_S))
        tested = reference
        if on_gpu:
            tested = stack.enter_context(Worker(partial(start_checks, True), log=log, timeout_s=_GPU_TIMEOUT_S))
        try:
            facts |= tested.submit("environment").result()
        except WorkerError as error:
            hint = "; without a GPU, --cpu runs the same program on the CPU" if on_gpu else ""
            raise UserError(f"no case was run, because the process for them could not start: {error}{hint}") from None
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))
        print(text_row(COLUMNS), flush=True)
        has_te = on_gpu and facts["transformer-engine"] != "not installed"
        for result in run_cases(tested, reference, folder, args.sizes, has_te=has_te):
            results.append(result)
            print(text_row(cells(result)), flush=True)
        for line in [line for result in results for line in failures(result)] + [summary(results)]:
            print(line)
        printed = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        if args.json is not None:
            args.json.write_text(as_json(facts, results, printed))
        if args.markdown is not None:
            args.markdown.write_text(markdown(facts, results))
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
