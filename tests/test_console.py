"""The filter on standard output: what is shown, what is logged, what is recorded."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_exo import console
from megatron_exo.training_lines import IntervalReader, evaluation_record


class MegatronLog:
    """Prints iteration lines as Megatron's ``training_log`` does, quirk included: the first line resets no sums."""

    def __init__(self, start: int = 0, train_iters: int = 100, log_interval: int = 10, batch_size: int = 16) -> None:
        self.iteration, self.train_iters = start, train_iters
        self.log_interval, self.batch_size = log_interval, batch_size
        self.is_first = True
        self.reset()

    def reset(self) -> None:
        self.loss = self.seconds = 0.0
        self.advanced = self.skipped = self.nan = 0

    def step(self, loss: float, seconds: float = 0.5, skipped: bool = False, grad_norm: float = 1.361) -> None:
        self.iteration += 1
        self.seconds += seconds
        if skipped:
            self.skipped += 1
            self.nan += not math.isfinite(loss)
        else:
            self.advanced += 1
            self.loss += loss
        if self.is_first or self.iteration % self.log_interval == 0:
            self.print_line(grad_norm)
            if not self.is_first:
                self.reset()
        self.is_first = False

    def print_line(self, grad_norm: float) -> None:
        mean = self.loss / max(1, self.advanced)
        line = " [2026-11-29 16:20:01.123456]"
        line += f" iteration {self.iteration:8d}/{self.train_iters:8d} |"
        line += f" consumed samples: {self.iteration * self.batch_size:12d} |"
        line += f" elapsed time per iteration (ms): {1000 * self.seconds / (self.advanced + self.skipped):.1f} |"
        line += f" learning rate: {1.5e-4:.6E} | global batch size: {self.batch_size:5d} |"
        if mean >= 0:
            line += f" lm loss: {mean:.6E} | z loss: {mean / 1000:.6E} |"
        line += f" loss scale: {1.0:.1f} | grad norm: {grad_norm:.3f} |"
        line += f" number of skipped iterations: {self.skipped:3d} | number of nan iterations: {self.nan:3d} |"
        print(line, flush=True)


Capture = pytest.CaptureFixture[str]
"""Holds the stream that stands for the terminal under the console."""


def install(log_dir: Path | None, rank: int = 0, world_size: int = 2, full: bool = False) -> Any:
    return console.install(log_dir, rank=rank, world_size=world_size, seq_length=256, full=full)


def records(log_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def test_an_iteration_line_becomes_one_short_line(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        log = MegatronLog(start=8, log_interval=1)
        log.step(4.241584)
    assert capsys.readouterr().out == (
        "iteration   9/100  loss 4.2416  lr 1.50e-04  grad norm 1.361  8,192 tokens/s  ETA 00:00:46\n"
    )


def test_an_iteration_line_becomes_a_record(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        MegatronLog().step(4.241584)
    assert records(tmp_path) == [
        {
            "kind": "train",
            "iteration": 1,
            "lm_loss": 4.241584,
            "z_loss": 0.004241584,
            "learning_rate": 1.5e-4,
            "grad_norm": 1.361,
            "seconds_per_iteration": 0.5,
            "tokens_per_second": 8192.0,
            "consumed_samples": 16,
            "consumed_tokens": 4096,
            "skipped_iterations": 0,
            "nan_iterations": 0,
        }
    ]


@pytest.mark.parametrize("start", [0, 20, 27])
@pytest.mark.parametrize("log_interval", [1, 3, 10])
def test_each_record_is_the_mean_since_the_record_before(
    start: int, log_interval: int, capsys: Capture, tmp_path: Path
) -> None:
    losses = {iteration: 9 - iteration / 30 + (iteration % 3) / 7 for iteration in range(start + 1, start + 31)}
    seconds = {iteration: 4.0 if iteration == start + 1 else 0.2 for iteration in losses}
    with install(tmp_path):
        log = MegatronLog(start=start, log_interval=log_interval)
        for iteration, loss in losses.items():
            log.step(loss, seconds[iteration])
    previous = start
    for record in records(tmp_path):
        own = range(previous + 1, record["iteration"] + 1)
        mean = sum(losses[iteration] for iteration in own) / len(own)
        # Megatron prints seven digits, and taking one mean out of another adds the errors of both.
        assert record["lm_loss"] == pytest.approx(mean, abs=4e-6)
        assert record["seconds_per_iteration"] == pytest.approx(sum(seconds[i] for i in own) / len(own), abs=1e-3)
        previous = record["iteration"]


def test_skipped_iterations_are_counted_once_and_leave_the_mean_alone(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        log = MegatronLog(log_interval=4)
        log.step(math.inf, skipped=True)
        for loss in (8.0, 7.0, 6.0):
            log.step(loss)
        log.step(5.0)
        log.step(math.nan, skipped=True)
        log.step(4.0)
        log.step(3.0)
    first, second, third = records(tmp_path)
    assert (first["lm_loss"], first["skipped_iterations"], first["nan_iterations"]) == (None, 1, 1)
    assert (second["lm_loss"], second["skipped_iterations"]) == (7.0, 0)
    assert (third["lm_loss"], third["skipped_iterations"], third["nan_iterations"]) == (4.0, 1, 1)
    lines = capsys.readouterr().out.splitlines()
    assert "loss n/a" in lines[0]
    assert lines[0].endswith("1 skipped  1 nan")
    assert "skipped" not in lines[1]


def test_an_interval_of_skipped_iterations_has_no_loss_though_megatron_prints_zero(
    capsys: Capture, tmp_path: Path
) -> None:
    with install(tmp_path):
        log = MegatronLog(log_interval=2)
        for loss, skipped in ((5.0, False), (4.0, False), (9.0, True), (9.0, True)):
            log.step(loss, skipped=skipped)
    assert [record["lm_loss"] for record in records(tmp_path)] == [5.0, 4.0, None]


def test_a_loss_that_megatron_leaves_out_is_null_and_not_an_error(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        log = MegatronLog(log_interval=1)
        log.step(5.0)
        log.step(math.nan, grad_norm=math.nan)
    assert (records(tmp_path)[1]["lm_loss"], records(tmp_path)[1]["grad_norm"]) == (None, None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("module", "printed"),
    [
        ("training", "' iteration {:8d}/{:8d} |'"),
        ("training", "' elapsed time per iteration (ms): {:.1f} |'"),
        ("training", "' {}: {:.6E} |'"),
        ("training", "' number of skipped iterations: {:3d} |'"),
        ("training", "should_reset = not is_first_iteration"),
        ("training", "f' validation{suffix} loss at {prefix} | '"),
        ("training", "'{} value: {:.6E} | '"),
        ("checkpointing", "f'checkpoint from iteration {int(iteration):7d} to {args.save} '"),
        ("checkpointing", "f'  successfully loaded checkpoint from {load_dir} '"),
    ],
)
def test_megatron_still_prints_what_is_read_here(module: str, printed: str) -> None:
    source = importlib.metadata.distribution("megatron-core").locate_file(f"megatron/training/{module}.py")
    assert printed in Path(str(source)).read_text()


def test_unknown_and_missing_fields_do_not_disturb() -> None:
    line = (
        " [2026-11-29 16:20:01.123456] iteration        5/     100 | consumed samples:           80 | "
        "elapsed time per iteration (ms): 812.3 | throughput per GPU (TFLOP/s/GPU): 3.1 | global batch size:    16 | "
        "lm loss: 4.0E+00 | loss scale: 1.0 | something: new | params norm: 9.1 |"
    )
    interval = IntervalReader().read(line)
    assert interval is not None
    assert dict(interval.losses) == {"lm loss": 4.0}
    assert interval.fields["params norm"] == 9.1


@pytest.mark.parametrize(
    ("line", "record", "shown"),
    [
        (
            " validation loss at iteration 10 | lm loss value: 4.100000E+00 | lm loss PPL: 6.034029E+01 | "
            "z loss value: 2.000000E-03 | z loss PPL: 1.002002E+00 | ",
            {"kind": "validation", "iteration": 10, "lm_loss": 4.1, "z_loss": 0.002},
            "validation at iteration 10: loss 4.1000, perplexity 60.34",
        ),
        (
            " validation loss at iteration 100 on validation set | lm loss value: 4.000000E+00 | ",
            {"kind": "validation", "iteration": 100, "lm_loss": 4.0},
            "validation at iteration 100: loss 4.0000, perplexity 54.60",
        ),
        (
            " validation loss at iteration 100 on test set | lm loss value: 4.000000E+00 | ",
            {"kind": "test", "iteration": 100, "lm_loss": 4.0},
            "test at iteration 100: loss 4.0000, perplexity 54.60",
        ),
        (
            " validation-wiki loss at iteration 7 | lm loss value: nan | ",
            {"kind": "validation", "iteration": 7, "set": "wiki", "lm_loss": None},
            "validation (wiki) at iteration 7: loss n/a",
        ),
    ],
)
def test_validation_lines_are_shown_and_recorded(
    line: str, record: dict[str, Any], shown: str, capsys: Capture, tmp_path: Path
) -> None:
    with install(tmp_path):
        for text in ("-" * 80, line, "-" * 80):
            print(text)
    assert capsys.readouterr().out == shown + "\n"
    assert records(tmp_path) == [record]
    assert evaluation_record(line) == record


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "  [2026-11-29 16:20:01.1] successfully saved checkpoint from iteration      10 to /runs/my run "
            "[ t 1/2, gtp_remat 1/1, p 1/1 ]",
            "saved checkpoint 10 to /runs/my run",
        ),
        (
            "  successfully loaded checkpoint from /runs/a [ t 1/2, gtp_remat 1/1, p 1/1 ] at iteration 10",
            "loaded checkpoint 10 from /runs/a",
        ),
        (
            "  successfully loaded checkpoint from /runs/a [ t 1/2, gtp_remat 1/1, p 1/1 ] at iteration 0",
            "loaded the weights of /runs/a, and nothing else: training begins with them",
        ),
        (
            "    will not load any checkpoints and will start from random",
            "no checkpoint to load: random weights",
        ),
        ("[exiting program at iteration 10] datetime: 2026-11-29 16:20:01.1 ", "exiting program at iteration 10"),
        (
            "[exiting program after receiving SIGTERM.] datetime: 2026-11-29 16:20:01.1 ",
            "exiting program after receiving SIGTERM",
        ),
        ("[after training is done] datetime: 2026-11-29 16:20:01.1 ", "training is done"),
        ("ERROR: Invalid metadata file x. Exiting", "ERROR: Invalid metadata file x. Exiting"),
    ],
)
def test_checkpoints_and_exits_are_shown(line: str, shown: str, capsys: Capture) -> None:
    with install(None):
        print(line)
    assert capsys.readouterr().out == shown + "\n"


def test_the_flood_goes_to_the_log_alone(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path, rank=3, world_size=16):
        print("  accumulate_allreduce_grads_in_fp32 .............. True")
        print("no newline", end="")
    assert capsys.readouterr().out == ""
    log = (tmp_path / "rank-03.log").read_text()
    assert log == "  accumulate_allreduce_grads_in_fp32 .............. True\nno newline\n"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_what_our_own_code_says_is_shown_and_logged(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        console.say("variant  base")
    console.say("without a console")
    assert capsys.readouterr().out == "variant  base\nwithout a console\n"
    assert (tmp_path / "rank-0.log").read_text() == "variant  base\n"


def test_full_shows_every_line_as_it_is_and_still_records(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path, full=True):
        print("flood")
        MegatronLog().step(4.0)
    log = (tmp_path / "rank-0.log").read_text()
    assert capsys.readouterr().out == log
    assert log.startswith("flood\n [2026")
    assert records(tmp_path)[0]["lm_loss"] == 4.0


def test_logging_and_warnings_go_to_the_log_and_errors_to_the_terminal_too(capsys: Capture, tmp_path: Path) -> None:
    logger = logging.getLogger("megatron.core.test")
    logger.setLevel(logging.INFO)
    with install(tmp_path):
        logger.info("setting up")
        logger.error("rank 3 is gone")
        warnings.warn("no Apex", stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out.endswith("ERROR megatron.core.test: rank 3 is gone\n")
    assert "setting up" not in captured.out + captured.err
    log = (tmp_path / "rank-0.log").read_text()
    assert "INFO megatron.core.test: setting up\n" in log
    assert "WARNING py.warnings:" in log
    assert "no Apex" in log


def test_logging_to_the_terminal_is_restored_and_other_handlers_stay(tmp_path: Path) -> None:
    root = logging.getLogger()
    to_terminal, to_file = logging.StreamHandler(sys.stderr), logging.FileHandler(tmp_path / "own.log")
    root.addHandler(to_terminal)
    root.addHandler(to_file)
    before = set(root.handlers)
    try:
        with install(tmp_path):
            assert to_terminal not in root.handlers
            assert to_file in root.handlers
        assert set(root.handlers) == before
    finally:
        root.removeHandler(to_terminal)
        root.removeHandler(to_file)
        to_file.close()


def test_a_line_in_pieces_is_one_line(capsys: Capture, tmp_path: Path) -> None:
    with install(tmp_path):
        for piece in (" validation loss at ", "iteration 3 | lm loss", " value: 2.0E+00 |", " \nnext"):
            sys.stdout.write(piece)
    assert records(tmp_path) == [{"kind": "validation", "iteration": 3, "lm_loss": 2.0}]


def test_standard_output_is_restored_also_after_an_error(capsys: Capture, tmp_path: Path) -> None:
    before = sys.stdout
    with pytest.raises(RuntimeError, match="out of memory"), install(tmp_path) as installed:
        raise RuntimeError("out of memory")
    assert sys.stdout is before
    print("late", file=installed)  # a handler may have kept the stream
    assert capsys.readouterr().out == "late\n"


def test_without_a_folder_nothing_is_written(capsys: Capture, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with install(None):
        MegatronLog().step(4.0)
    assert "loss 4.0000" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_appends_and_starts_a_new_line_after_a_crash(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "iteration": 1, "lm_loss": 9.0}\n{"kind": "tra')
    with install(tmp_path):
        MegatronLog(start=1).step(8.0)
    *_, torn, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert torn == '{"kind": "tra'
    assert json.loads(last)["iteration"] == 2


def test_lines_of_several_threads_are_not_lost(capsys: Capture, tmp_path: Path) -> None:
    def write(name: int) -> None:
        for number in range(100):
            sys.stdout.write(f"{name}-{number}\n")

    with install(tmp_path):
        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{name}-{number}" for name in range(4) for number in range(100))
