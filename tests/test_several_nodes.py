"""Two hosts, torchrun on each, TP 2 × PP 2 across them: trained, killed on one side, resumed; and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from megatron_exo.checkpoints.integrity import damages, newest_whole
from megatron_exo.checkpoints.reading import TRACKER
from tests.hosts import Host, hosts, why_not
from tests.programs import MOCK_DATA, MODEL

WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
RUN = "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-iters 1 --eval-interval 1000 --log-interval 1"
RUN += " --num-workers 0 --save-interval 4 --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Host]]:
    with hosts(2) as pair:
        yield pair


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LAUNCHER = (sys.executable, "-m", "megatron_exo.launch")


class Job:
    """One torchrun, or our launcher, per host, with a folder that the hosts share and a log for each."""

    def __init__(
        self,
        pair: list[Host],
        folder: Path,
        words: str,
        address: str | None = None,
        starts: Sequence[int] = (0, 1),
        program: Sequence[str] = TORCHRUN,
        per_host: int = 2,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.pair = [pair[number] for number in starts]
        self.logs = [folder / f"{host.name}.log" for host in self.pair]
        meeting = (
            f"--nnodes 2 --nproc-per-node {per_host} --master-addr {address or pair[0].address} --master-port 29533"
        )
        ranks = ["-m", "megatron_exo.pretrain"] if program is TORCHRUN else []
        training = f"{MODEL} {MOCK_DATA} {RUN} --tensor-model-parallel-size {per_host} {words}".split()
        self.agents = [
            pair[number].start([*program, *meeting.split(), "--node-rank", str(number), *ranks, *training], log)
            for number, log in zip(starts, self.logs, strict=True)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for host, agent in zip(self.pair, self.agents, strict=True):
            host.end()
            agent.wait()

    def wait(self, seconds: float = 240.0) -> list[int]:
        """The exit statuses."""
        try:
            return [agent.wait(seconds) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(log.read_text(errors="replace")[-2000:] for log in self.logs)) from None

    def printed(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


def _losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return {record["iteration"]: record["lm_loss"] for record in records if record["kind"] == "train"}


def test_a_run_over_two_hosts_is_killed_on_one_and_goes_on_from_its_checkpoint(
    pair: list[Host], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # Left alone the run would never end: it cannot do so before it is killed.
    words = "--train-iters 1000000 --lr-decay-iters 12 --save {0} --load {0}"
    with Job(pair, tmp_path / "1", words.format(whole) + " --exit-interval 12") as job:
        assert job.wait() == [0, 0], job.printed()[-3000:]
        # The table of ranks: who is where, and what.
        rows = re.findall(r"^(\d) +(exohost\d) +cpu +(\d) +(\d) +(\d) +(\d)$", job.printed(), re.MULTILINE)
        assert rows == [
            ("0", "exohost1", "0", "0", "0", "0"),
            ("1", "exohost1", "1", "0", "0", "0"),
            ("2", "exohost2", "0", "1", "0", "0"),
            ("3", "exohost2", "1", "1", "0", "0"),
        ]

    with Job(pair, tmp_path / "2", words.format(broken)) as job:
        wait_for(job, lambda: (broken / TRACKER).exists())
        pair[1].signal(signal.SIGKILL)
        killed_at = time.monotonic()
        assert job.agents[0].wait(60) != 0
        assert time.monotonic() - killed_at < 60
    named = int((broken / TRACKER).read_text())
    with Job(pair, tmp_path / "3", words.format(broken) + " --exit-interval 12") as job:
        assert job.wait() == [0, 0], job.printed()[-3000:]
        assert f"loaded checkpoint {named} " in job.printed()
    expected, losses = _losses(whole), _losses(broken)
    assert len(expected) == 12
    assert {step: losses[step] for step in expected} == pytest.approx(expected, abs=2e-6)  # as printed: six decimals


def test_ranks_of_both_hosts_start_again_by_themselves_after_one_is_killed(pair: list[Host], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = f"--max-restarts 3 --train-iters 1000000 --lr-decay-style constant --save {run} --load {run}"
    with Job(pair, tmp_path / "1", words, program=LAUNCHER, per_host=1) as job:
        wait_for(job, lambda: (run / TRACKER).exists())
        (rank,) = filter(_is_rank, pair[1].processes())
        os.kill(rank, signal.SIGKILL)
        wait_for(job, lambda: re.search(r"loaded checkpoint \d+ ", job.printed()))
        trained = len(re.findall("^iteration", job.printed(), flags=re.M))
        wait_for(job, lambda: len(re.findall("^iteration", job.printed(), flags=re.M)) > trained)
        job.agents[0].send_signal(signal.SIGTERM)
        assert job.wait() == [0, 0], job.printed()[-3000:]


def test_a_host_that_falls_silent_ends_the_job_and_it_goes_on_from_its_checkpoint(
    pair: list[Host], tmp_path: Path
) -> None:
    """No process has ended and no connection is closed: the cable is pulled."""
    run = tmp_path / "run"
    endless = f"--train-iters 1000000 --lr-decay-style constant --save {run} --load {run} --exo-lost-host-timeout 8"
    with Job(pair, tmp_path / "1", endless) as job:
        wait_for(job, lambda: (run / TRACKER).exists())
        pair[1].set_cable("down")
        pulled_at = time.monotonic()
        try:
            statuses = job.wait(60)
        finally:
            pair[1].set_cable("up")
        assert time.monotonic() - pulled_at < 30
        assert 0 not in statuses
        first, second = (log.read_text(errors="replace") for log in job.logs)
        assert "error: host exohost2 (ranks 2-3) gave no sign of life for 8 s (--exo-lost-host-timeout)" in first
        assert "error: host exohost1 (ranks 0-1), where all ranks have met, has not answered for 8 s" in second
    named = int((run / TRACKER).read_text())  # a newer one may be whole, and all ranks not have been told
    assert damages(run / f"iter_{named:07d}", checksums=True) == []
    with Job(pair, tmp_path / "2", f"{endless} --exit-interval {named + 2}") as job:
        assert job.wait() == [0, 0], job.printed()[-3000:]
        assert f"loaded checkpoint {named} " in job.printed()


def test_a_host_that_stops_on_its_way_up_is_named(pair: list[Host], tmp_path: Path) -> None:
    words = f"--train-iters 2 --save {tmp_path / 'run'} --exo-start-timeout 10"
    with Job(pair, tmp_path / "1", words, per_host=1) as job:
        # The second host's rank is held before it answers.
        wait_for(job, lambda: any(map(_is_rank, pair[1].processes())))
        pair[1].signal(signal.SIGSTOP)
        assert job.agents[0].wait(180) != 0
        assert "1 of 2 ranks have not come within 10 s: 1;" in job.logs[0].read_text(errors="replace")


def test_a_host_that_is_not_there_or_calls_elsewhere_is_named_before_torchrun_waits_for_it(
    pair: list[Host], tmp_path: Path
) -> None:
    words = f"--train-iters 2 --save {tmp_path / 'run'} --exo-start-timeout 6"
    alone = {"program": LAUNCHER, "starts": [0]}
    with Job(pair, tmp_path / "1", words, **alone) as job:  # type: ignore[arg-type]
        assert job.wait(60) == [1]
        assert job.printed().splitlines()[-1] == (
            "error: 1 of 2 nodes have not come within 6 s: 1; start each with its own --node-rank and --master-addr "
            "10.77.0.1, or give them more time with --exo-start-timeout"
        )
    for address, reason in (("10.77.0.9", "(no route to host|timed out)"), ("10.77.0.1", "connection refused")):
        with Job(pair, tmp_path / "2", words, address, [1], LAUNCHER) as job:
            assert job.wait(60) == [1]
            assert re.fullmatch(
                f"error: node 1 on exohost2 cannot meet the others at --master-addr {address}, --master-port 29533, "
                f"within 6 s: {reason}; check the address, that the port is open, and that the host of node 0 is up\n",
                job.printed(),
            )


def test_the_launcher_starts_ranks_on_two_hosts_and_a_signal_to_one_ends_them_all_with_status_0(
    pair: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = f"--train-iters 1000000 --lr-decay-style constant --save-interval 1000000 --save {run}"
    with Job(pair, tmp_path / "1", words, program=LAUNCHER, per_host=1) as job:
        wait_for(job, lambda: "iteration       2/" in job.printed())
        job.agents[1].send_signal(signal.SIGTERM)
        assert job.wait() == [0, 0], job.printed()[-3000:]
        assert "SIGTERM is passed on to 1 rank, which saves and ends" in job.printed()
    assert newest_whole(run, checksums=True) is not None


def wait_for(job: Job, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, job.printed()[-3000:]
        time.sleep(0.02)


def _is_rank(pid: int) -> bool:
    """Whether a process is a rank; what has started it names the same module or script, what it forks says the same."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return _says_rank(process) and not _says_rank(psutil.Process(process.ppid()))
    return False


def _says_rank(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return re.search(r" -u (-m megatron_exo.pretrain|\S*pretrain_exoformer.sh) ", command) is not None
