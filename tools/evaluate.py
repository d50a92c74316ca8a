#!/usr/bin/env python
"""Score a trained model: tasks of lm-evaluation-harness, and the loss on datasets, document by document.

  python tools/evaluate.py runs/a --tasks paper --out a.json        # the paper's six tasks, 5 examples before each
  python tools/evaluate.py models/a --tasks arc_easy,piqa           # a Hugging Face folder
  python tools/evaluate.py runs/a --data data/demo-valid            # perplexity on a .bin/.idx pair
  torchrun --nproc-per-node 4 tools/evaluate.py runs/a --tasks paper --tensor-model-parallel-size 2
  python tools/evaluate.py --download paper                         # where there is a network: fetch the tasks' data

A checkpoint is evaluated on any layout of ranks: processes beyond those of tensor, pipeline and context parallelism
share the questions. The numbers are those of its exported folder, whatever the batch. The file of results has versions,
standard errors and the score of every question and document, for paired tests. For a checkpoint, any further argument
is Megatron's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_exo import platform
from megatron_exo.errors import UserError, one_line_errors

if TYPE_CHECKING:
    from megatron_exo.evaluation.subjects import Subject

DTYPES = ("float32", "bfloat16", "float16")


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "model", type=Path, nargs="?", metavar="MODEL", help="a run's folder, an iter_N in it, or one with config.json"
    )
    parser.add_argument("--tasks", metavar="NAME,…", help="`paper` for its six, or any that the harness knows")
    parser.add_argument("--data", action="append", default=[], metavar="PREFIX", help="may be given several times")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="(default: 5 for `paper`, else the task's own)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many questions or documents, for a trial")
    parser.add_argument(
        "--include-path",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="with tasks of your own as the harness's YAML files, which may name Python functions: trust it like code",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the choice of examples (default: %(default)s)")
    parser.add_argument(
        "--bootstrap-iters", type=int, default=100_000, metavar="N", help="for standard errors (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of a folder's model (default: as it was written)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of results, as JSON (default: only the table)")
    parser.add_argument("--download", metavar="NAME,…", help="only fetch the data of tasks, into $HF_HOME")
    args, megatron = parser.parse_known_args(argv)
    if args.download is None and (args.model is None or not (args.tasks or args.data)):
        parser.error("pass a MODEL, and --tasks or --data to evaluate it on")
    for name in ("batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: pass 1 or more")
    return args, megatron


def main(argv: list[str] | None = None) -> None:
    args, megatron = parse_args(argv)
    with one_line_errors(), _packages_named():
        if args.download is not None:
            _download(args)
            return
        for prefix in args.data:  # before the model is loaded, which takes long
            _check_exists(prefix)
        platform.activate()
        names, manager = _tasks(args.tasks, args.include_path) if args.tasks else ([], None)
        subject = _subject(args, megatron)
        started = time.monotonic()
        results = _results(args, subject, names, manager)
        if subject.is_speaker:
            from megatron_exo.evaluation.report import table, write_results

            results["seconds"] = round(time.monotonic() - started, 3)
            print(table(results))
            if args.out is not None:
                write_results(results, args.out)
                print(f"written to {args.out}")
        _leave()


@contextlib.contextmanager
def _packages_named() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f"{error}; evaluation needs the extra eval: bash tools/setup_env.sh eval") from error


def _results(args: argparse.Namespace, subject: Subject, names: list[str], manager: Any) -> dict[str, Any]:
    from megatron_exo.evaluation.perplexity import score_dataset
    from megatron_exo.evaluation.report import versions

    results: dict[str, Any] = {
        "model": subject.describe(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "settings": {"batch_size": args.batch_size, "limit": args.limit, "seed": args.seed, "context": subject.longest},
    }
    if names:
        from megatron_exo.evaluation.harness import PAPER_FEWSHOT, TaskOptions, run_tasks

        is_paper = args.tasks == "paper" and args.num_fewshot is None
        options = TaskOptions(
            batch_size=args.batch_size,
            num_fewshot=PAPER_FEWSHOT if is_paper else args.num_fewshot,
            limit=args.limit,
            bootstrap_iters=args.bootstrap_iters,
            seed=args.seed,
        )
        results |= run_tasks(subject, names, manager, options) or {}
    if args.data:
        scores = [score_dataset(subject, prefix, batch_size=args.batch_size, limit=args.limit) for prefix in args.data]
        results["datasets"] = {score.prefix: score.as_json() for score in scores}
    return results


def _check_exists(prefix: str) -> None:
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            raise UserError(f"--data {prefix}: there is no {prefix}{end}; give the prefix of a .bin/.idx pair")


def _tasks(names: str, include: list[Path]) -> tuple[list[str], Any]:
    """Every task that is asked for, with its data at hand."""
    from megatron_exo.evaluation.harness import PAPER_TASKS, load_tasks, task_manager

    wanted = PAPER_TASKS if names == "paper" else [name for name in names.split(",") if name]
    manager = task_manager(wanted, include)
    return load_tasks(wanted, manager), manager


def _download(args: argparse.Namespace) -> None:
    names, _ = _tasks(args.download, args.include_path)
    print(f"the data of {', '.join(names)} is in {os.environ.get('HF_HOME', '~/.cache/huggingface')}")


def _subject(args: argparse.Namespace, megatron: list[str]) -> Subject:
    """The model, on this rank."""
    import torch

    from megatron_exo import console
    from megatron_exo.evaluation.subjects import Checkpoint, Folder

    if not (args.model / "config.json").is_file():
        if args.dtype is not None:
            raise UserError(f"--dtype {args.dtype} is for Hugging Face folders; a checkpoint takes --bf16 or --fp16")
        quietly = console.install(None, rank=0, world_size=1, seq_length=1)  # Megatron says much while it starts
        with quietly, contextlib.redirect_stdout(io.StringIO()):
            return Checkpoint(args.model, megatron)
    if megatron:
        raise UserError(f"{megatron[0]} is Megatron's, and {args.model} is a Hugging Face folder; leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{args.model} is a Hugging Face folder, which one process evaluates; start one")
    return Folder(args.model, None if args.dtype is None else getattr(torch, args.dtype))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
