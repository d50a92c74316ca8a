"""A signal that announces the end of a job: the iteration in progress ends, a checkpoint is saved, the status is 0."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_exo.checkpoints.integrity import damages, newest_whole
from megatron_exo.checkpoints.reading import TRACKER, steps_of
from megatron_exo.launch import ROOT
from tests.programs import MOCK_DATA, MODEL

RUN = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --log-interval 1"
RUN += " --eval-interval 1000000 --save-interval 1000000 --num-workers 0"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "megatron_exo.pretrain"],
    "the script": ["bash", str(ROOT / "examples" / "pretrain_exoformer.sh")],
}


def start(launcher: str, run: Path, iterations: int) -> subprocess.Popen[bytes]:
    command = list(LAUNCHERS[launcher])
    at = command.index("-m", 3) if launcher == "torchrun" else len(command)
    command[at:at] = ["--nproc-per-node", "2"]
    command += f"{MODEL} {MOCK_DATA} {RUN} --train-iters {iterations} --save {run} --load {run}".split()
    run.mkdir(exist_ok=True)
    with (run / "out").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What a test starts, and what is left of it at the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for job in started:
        if job.poll() is None:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
            job.wait()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def iterations(run: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^iteration +(\d+)/", (run / "out").read_text(), flags=re.M)]


def rank_of(job: subprocess.Popen[bytes], rank: str) -> psutil.Process:
    (found,) = (each for each in psutil.Process(job.pid).children() if each.environ().get("RANK") == rank)
    return found


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_and_ends_the_job_with_status_0_and_it_goes_on_from_there(
    tmp_path: Path, jobs: list[subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "run"
    jobs.append(start("torchrun", run, 1_000_000))
    wait_for(lambda: iterations(run) or jobs[0].poll() is not None)
    rank_of(jobs[0], "1").send_signal(signal.SIGUSR1)
    assert jobs[0].wait(120) == 0, (run / "out").read_text()[-2000:]
    (saved,) = steps_of(run)
    assert saved == iterations(run)[-1]
    assert (run / TRACKER).read_text() == str(saved)
    assert damages(run / f"iter_{saved:07d}", checksums=True) == []
    jobs.append(start("torchrun", run, 1_000_000))
    wait_for(lambda: iterations(run)[-1] > saved or jobs[1].poll() is not None)
    assert f"loaded checkpoint {saved} from {run}" in (run / "out").read_text()
    assert saved + 1 in iterations(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("torchrun", signal.SIGTERM), ("the script", signal.SIGTERM), ("the script", signal.SIGUSR1)],
)
def test_a_signal_to_the_launcher_reaches_the_ranks_in_time_to_save(
    tmp_path: Path, jobs: list[subprocess.Popen[bytes]], launcher: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    jobs.append(start(launcher, run, 1_000_000))
    wait_for(lambda: iterations(run) or jobs[0].poll() is not None)
    jobs[0].send_signal(number)
    status = jobs[0].wait(120)
    assert (status == 0) == (launcher == "the script")  # torchrun's own says that it was ended by a signal
    (saved,) = steps_of(run)
    assert saved == iterations(run)[-1]
    assert (run / TRACKER).read_text() == str(saved)
    assert damages(run / f"iter_{saved:07d}", checksums=True) == []


@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_save_and_end_too(tmp_path: Path, jobs: list[subprocess.Popen[bytes]]) -> None:
    run = tmp_path / "run"
    jobs.append(start("torchrun", run, 1_000_000))
    wait_for(lambda: iterations(run) or jobs[0].poll() is not None)
    ranks = psutil.Process(jobs[0].pid).children()
    jobs[0].kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert (len(gone), alive) == (2, [])
    assert newest_whole(run, checksums=True) == iterations(run)[-1]
