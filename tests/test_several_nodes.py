"""Two hosts, torchrun on each, TP 2 × PP 2 across them: trained, killed on one side, resumed; and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, hosts, why_not
from tests.programs import MOCK_DATA, MODEL

WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
RUN = "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-iters 1 --eval-interval 1000 --log-interval 1"
RUN += " --num-workers 0 --save-interval 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Host]]:
    with hosts(2) as pair:
        yield pair


class Job:
    """One torchrun per host, with a folder that the hosts share and a log for each."""

    def __init__(self, pair: list[Host], folder: Path, words: str, address: str | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.pair = pair
        self.logs = [folder / f"{host.name}.log" for host in pair]
        launcher = f"--nnodes 2 --nproc-per-node 2 --master-addr {address or pair[0].address} --master-port 29533"
        self.agents = [
            host.start(
                [sys.executable, "-m", "torch.distributed.run", *launcher.split(), "--node-rank", str(number)]
                + ["-m", "megatron_exo.pretrain", *f"{MODEL} {MOCK_DATA} {RUN} {words}".split()],
                log,
            )
            for number, (host, log) in enumerate(zip(pair, self.logs, strict=True))
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for host, agent in zip(self.pair, self.agents, strict=True):
            host.signal(signal.SIGKILL)
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
    with Job(pair, tmp_path / "1", f"--train-iters 12 --save {whole} --load {whole}") as job:
        assert job.wait() == [0, 0], job.printed()[-3000:]
        # The table of ranks: who is where, and what.
        rows = re.findall(r"^(\d) +(exohost\d) +cpu +(\d) +(\d) +(\d) +(\d)$", job.printed(), re.MULTILINE)
        assert rows == [
            ("0", "exohost1", "0", "0", "0", "0"),
            ("1", "exohost1", "1", "0", "0", "0"),
            ("2", "exohost2", "0", "1", "0", "0"),
            ("3", "exohost2", "1", "1", "0", "0"),
        ]

    long = f"--train-iters 12 --lr-decay-iters 12 --save {broken} --load {broken}"
    with Job(pair, tmp_path / "2", long) as job:
        deadline = time.monotonic() + 240
        while not (broken / "latest_checkpointed_iteration.txt").exists():
            assert time.monotonic() < deadline, job.printed()[-3000:]
            time.sleep(0.02)
        pair[1].signal(signal.SIGKILL)
        killed_at = time.monotonic()
        assert job.agents[0].wait(60) != 0
        assert time.monotonic() - killed_at < 60
    with Job(pair, tmp_path / "3", long) as job:
        assert job.wait() == [0, 0], job.printed()[-3000:]
        assert re.search(r"loaded checkpoint (4|8|12) ", job.printed())
    assert _losses(broken) == pytest.approx(_losses(whole), abs=2e-6)  # as printed, with six decimals


def test_a_host_that_does_not_come_is_named(pair: list[Host], tmp_path: Path) -> None:
    words = f"--train-iters 2 --save {tmp_path / 'run'} --exo-start-timeout 10"
    with Job(pair, tmp_path / "1", words) as job:
        # The second host's ranks are held before they answer.
        deadline = time.monotonic() + 120
        while not any(b"megatron_exo.pretrain" in _command(pid) for pid in pair[1].processes()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pair[1].signal(signal.SIGSTOP)
        assert job.agents[0].wait(180) != 0
        assert "2 of 4 ranks have not come within 10 s: 2-3" in job.logs[0].read_text(errors="replace")


def _command(pid: int) -> bytes:
    """Of a rank; torchrun's own names the module, too."""
    with contextlib.suppress(OSError):
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        return b"" if b"torch.distributed.run" in command else command
    return b""
