#!/usr/bin/env python
"""Kill ranks of a training run at random moments, again and again, and see that nothing is lost.

  python tools/crash_campaign.py                        # 30 kills, two ranks, checkpoints written synchronously
  python tools/crash_campaign.py --async-save --seed 2
  python tools/crash_campaign.py --max-restarts         # torchrun itself starts the ranks again

A small model trains under torchrun and saves every other iteration, so that many kills fall into a save. At a random
moment after its first iteration one rank gets SIGKILL. Then, each time:

  - torchrun must end (or, with --max-restarts, go on) within 60 seconds;
  - the newest checkpoint that the run names must be complete (before it names any, a complete one may be there);
  - the next start must load exactly that one.

When the run has reached its end, its last checkpoint must equal, bit by bit, that of a run nobody disturbed: weights,
optimizer, and random states are then what they would have been, and no batch was taken twice or left out. The exit
status is 0 if all of this held.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from megatron_exo.errors import UserError, one_line_errors

_MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-3 --lr-decay-style constant --eval-iters 0 --eval-interval 100000 --log-interval 1 --num-workers 0 "
    "--hidden-dropout 0.1 --save-interval 2"
)
_PATIENCE_S = 60.0
"""For torchrun to notice a dead rank and end, and for a start to reach its first iteration twice over."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=120, help="length of one run (default: %(default)s)")
    parser.add_argument("--layout", default="--use-distributed-optimizer", help="arguments (default: %(default)s)")
    parser.add_argument("--async-save", action="store_true", help="checkpoints are written beside the training")
    parser.add_argument("--max-restarts", action="store_true", help="torchrun starts the ranks again, not this program")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the ranks (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every kill and what followed")
    return parser.parse_args(argv)


@dataclasses.dataclass
class Kill:
    """One kill and what was found after it."""

    rank: int
    iteration: int
    """The last one that the log names."""
    during_save: bool
    """Whether a newer checkpoint than the one that the run names had been begun."""
    newest_complete: int | None
    """The iteration of the checkpoint that the next start must load; ``None`` before the first."""
    seconds_to_end: float
    trouble: str = ""


class Job:
    """A training run under torchrun, in a process group of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path, restarts: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "torchrun.log"
        self.log.touch()
        self.forget()
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        words += ["--max-restarts", str(restarts), "-m", "megatron_exo.pretrain", *_MODEL.split()]
        words += [*shlex.split(args.layout), "--train-iters", str(args.iterations)]
        words += ["--save", str(folder), "--load", str(folder), *(["--async-save"] if args.async_save else [])]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
            )

    def forget(self) -> None:
        """Take what is printed from now on for another start's."""
        self._start_of_log = self.log.stat().st_size

    def printed(self) -> str:
        """What this start has printed."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_log)
            return file.read().decode(errors="replace")

    def iteration(self) -> int | None:
        found = re.findall(r"iteration\s+(\d+)/", self.printed())
        return int(found[-1]) if found else None

    def has_trained(self) -> bool:
        """Whether an iteration is done, or there will be none."""
        return self.iteration() is not None or self.is_over()

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def has_said(self, text: str) -> bool:
        """Whether it has, or will not."""
        return text in self.printed() or self.is_over()

    def are_gone(self, ranks: dict[int, psutil.Process]) -> bool:
        return not {rank.pid for rank in ranks.values()} & {rank.pid for rank in self.ranks().values()}

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):  # one that is being started has no rank yet
                    found[int(process.environ()["RANK"])] = process
        return found

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def loadable_iteration(folder: Path) -> int | None:
    """The iteration of the checkpoint that the next start must load: named, or whole before any was named."""
    from megatron_exo.checkpoints.integrity import newest_whole
    from megatron_exo.checkpoints.reading import TRACKER

    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else newest_whole(folder, checksums=True)


def newest_folder(folder: Path) -> int:
    return max((int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*")), default=0)


def trouble_with(folder: Path, iteration: int | None) -> str:
    """What is wrong with the checkpoint that the run names, or nothing."""
    from megatron_exo.checkpoints.integrity import damages

    return "; ".join(damages(folder / f"iter_{iteration:07d}", checksums=True)) if iteration is not None else ""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def run_undisturbed(args: argparse.Namespace, folder: Path) -> None:
    job = Job(args, folder)
    if job.process.wait() != 0:
        raise UserError(f"the run that nobody disturbs failed; see {job.log}")


def run_under_fire(args: argparse.Namespace, folder: Path, dice: random.Random, kills: int) -> Iterator[Kill]:
    """One run to its end, disturbed at most ``kills`` times.

    Raises:
        UserError: a start did not go on from the right checkpoint, or did not train.
    """
    job = Job(args, folder, restarts=kills if args.max_restarts else 0)
    try:
        while kills > 0 and not job.is_over():
            if not wait_for(job.has_trained, 5 * _PATIENCE_S):
                raise UserError(f"a start has trained nothing in {5 * _PATIENCE_S:.0f} s; see {job.log}")
            if dice.random() < 0.75:  # the first save of a process takes seconds, and would get most of the kills
                wait_for(partial(job.has_said, "saved checkpoint"), _PATIENCE_S)
            time.sleep(dice.uniform(0.0, 3.0))
            ranks = job.ranks()
            if len(ranks) < args.ranks or job.is_over():
                break  # the run has come to its end
            rank = dice.choice(sorted(ranks))
            try:
                ranks[rank].kill()
            except psutil.NoSuchProcess:
                continue  # it has come to its end in between
            killed_at, kills = time.monotonic(), kills - 1
            iteration = job.iteration() or 0
            gone = partial(job.are_gone, ranks) if args.max_restarts else job.is_over
            ended = wait_for(gone, _PATIENCE_S)
            seconds = time.monotonic() - killed_at
            newest = loadable_iteration(folder)
            kill = Kill(rank, iteration, newest_folder(folder) > (newest or 0), newest, round(seconds, 1))
            kill.trouble = trouble_with(folder, newest)
            if not ended:
                kill.trouble = f"the other ranks still run {_PATIENCE_S:.0f} s later"
            yield kill
            if kill.trouble:
                raise UserError(f"after a kill at iteration {iteration}: {kill.trouble}")
            if args.max_restarts:
                job.forget()
            else:
                job.end()
                job = Job(args, folder)
            _check_loaded(job, newest)
        if job.process.wait() != 0:
            raise UserError(f"the last start failed; see {job.log}")
    finally:
        job.end()


def _check_loaded(job: Job, newest: int | None) -> None:
    expected = "no checkpoint to load" if newest is None else f"loaded checkpoint {newest} "
    if not wait_for(partial(job.has_said, expected), 5 * _PATIENCE_S):
        raise UserError(f"a start has not said '{expected.strip()}'; see {job.log}")
    if expected not in job.printed():
        raise UserError(f"a start ended before '{expected.strip()}'; see {job.log}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with one_line_errors(), contextlib.ExitStack() as stack:
        from megatron_exo import platform

        platform.activate()
        from megatron_exo.checkpoints.inspection import compare

        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-campaign-")))
        dice, kills, runs = random.Random(args.seed), [], 0
        last = f"iter_{args.iterations:07d}"
        start = time.monotonic()
        run_undisturbed(args, folder / "undisturbed")
        while len(kills) < args.kills:
            runs += 1
            run = folder / f"run-{runs}"
            for kill in run_under_fire(args, run, dice, args.kills - len(kills)):
                kills.append(kill)
                left = (time.monotonic() - start) / len(kills) * (args.kills - len(kills)) / 60
                print(
                    f"kill {len(kills)}/{args.kills}: rank {kill.rank} at iteration {kill.iteration}"
                    f"{', in a save' if kill.during_save else ''}; ended in {kill.seconds_to_end:.1f} s; "
                    f"newest complete checkpoint {kill.newest_complete}; {left:.0f} min to go",
                    flush=True,
                )
            difference = compare(folder / "undisturbed" / last, run / last)
            if difference.tensors_differ() or difference.objects:
                raise UserError(
                    f"{run / last} is not what an undisturbed run gives; compare it with {folder}/undisturbed"
                )
        in_saves = sum(kill.during_save for kill in kills)
        slowest = max((kill.seconds_to_end for kill in kills), default=0.0)
        print(
            f"{len(kills)} kills in {runs} runs, {in_saves} of them in a save: every newest checkpoint was complete "
            f"and loaded, every run ended bit by bit as if undisturbed; ranks ended at most {slowest:.1f} s after one"
        )
        if args.json is not None:
            args.json.write_text(json.dumps([dataclasses.asdict(kill) for kill in kills]))


if __name__ == "__main__":
    main()
