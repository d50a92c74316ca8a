"""``--exo-tolerate-failed-saves``: a full disk costs the checkpoints it has no room for, on every rank alike."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_exo.checkpoints.integrity import damages
from megatron_exo.checkpoints.reading import TRACKER, steps_of
from megatron_exo.platform.storage import raise_storage_errors
from tests.programs import MOCK_DATA, MODEL, one_line, run_program
from tests.ranks import run_on_ranks

RUN = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --train-iters 8"
RUN += " --eval-interval 99 --log-interval 1 --num-workers 0 --save-interval 2 --exo-tolerate-failed-saves"
FILLER = "filler"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a writer may not have ended yet


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes free, or fewer if others write at the same time."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with contextlib.suppress(OSError), (disk / FILLER).open("wb") as file:
        file.write(b"x" * (free - leave))


def _run(arguments: list[str]) -> tuple[int, str]:
    """Train; exit status and output."""
    from megatron_exo.pretrain import main

    sys.argv, sys.stdout = ["pretrain", *arguments], io.StringIO()
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    assert isinstance(status, int)
    return status, sys.stdout.getvalue()


def _pretrain(arguments: list[str], disk: Path, full_from: int, free_from: int) -> tuple[int, str, list[int]]:
    """Train on a disk that is full from one iteration on, and has room again from another; (status, output, steps)."""
    from megatron.training import training

    import megatron_exo.forward_step as forward_step

    steps: list[int] = []
    original = forward_step.forward_step

    def step(*args: object) -> object:
        iteration = training.get_args().curr_iteration + 1
        if iteration not in steps:
            steps.append(iteration)
            if training.get_args().rank == 0 and iteration == full_from:
                fill(disk, leave=100_000)
            if training.get_args().rank == 0 and iteration == free_from:
                (disk / FILLER).unlink()
        return original(*args)  # type: ignore[arg-type]

    forward_step.forward_step = step  # type: ignore[assignment]
    return *_run(arguments), steps


@pytest.mark.parametrize("how", ["", "--async-save"], ids=["in the foreground", "in the background"])
def test_a_run_outlives_a_disk_that_is_full_for_a_while(disk: Path, how: str) -> None:
    arguments = f"{MODEL} {MOCK_DATA} {RUN} --save {disk} --load {disk} {how}".split()
    first, second = run_on_ranks(2, _pretrain, arguments, disk, 3, 7, process_group=False)
    assert (first[0], second[0]) == (0, 0)
    assert first[2] == second[2] == list(range(1, 9))
    lost = first[1].count("a checkpoint could not be written: ")
    assert lost >= 1
    assert os.strerror(errno.ENOSPC) in first[1]
    assert "could not be written" not in second[1]
    whole = steps_of(disk)
    assert len(whole) == 4 - lost  # nothing is left of those that failed
    assert whole == [2, 8] if how == "" else whole[-1] == 8  # in the background, others may be written in time
    assert (disk / TRACKER).read_text() == "8"
    assert [damages(disk / f"iter_{step:07d}", checksums=True) for step in whole] == [[] for _ in whole]


def _pretrain_with_an_error(arguments: list[str], where: str) -> tuple[int, str]:
    """Train with what only the first rank writes failing in the second save."""
    from megatron_exo.checkpoints import hooks, manifest

    saves = []

    @contextlib.contextmanager
    def failing(path: Path) -> Iterator[io.StringIO]:
        saves.append(path)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with original(path) as file:
            yield file

    owner = {"manifest": manifest, "tracker": hooks}[where]
    original = owner.replacing  # type: ignore[attr-defined]
    owner.replacing = failing  # type: ignore[attr-defined]
    return _run(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "--async-save"], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("where", ["manifest", "tracker"])
def test_what_only_the_first_rank_writes_fails_for_all_of_them(tmp_path: Path, where: str, how: str) -> None:
    arguments = f"{MODEL} {MOCK_DATA} {RUN} --save {tmp_path} --load {tmp_path} --train-iters 6 {how}".split()
    first, second = run_on_ranks(2, _pretrain_with_an_error, arguments, where, process_group=False)
    assert (first[0], second[0]) == (0, 0)
    assert first[1].count("a checkpoint could not be written: [Errno 28] No space left on device; the run goes on") == 1
    assert steps_of(tmp_path) == ([2, 6] if where == "manifest" else [2, 4, 6])
    assert (tmp_path / TRACKER).read_text() == "6"


def test_a_failed_write_keeps_no_view_of_what_was_to_be_written() -> None:
    """In a cycle, the collector of Python 3.12.1 crashes on a view of a BytesIO."""
    data = io.BytesIO(b"a shard")

    def write(results_queue: object) -> tuple[int, Exception]:
        try:
            view = data.getbuffer()
            try:
                raise OSError(errno.ENOSPC, "full", str(len(view)))
            except OSError as error:
                raise RuntimeError("unexpected pos 704 vs 598") from error
        except RuntimeError as error:
            return 0, error

    _, error = raise_storage_errors(write).__func__(results_queue="a thread's")
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None
    data.write(b"which it could not while there is a view of it" * 10)


def _train_on_a_disk_that_fills_up() -> None:
    from megatron_exo import platform

    platform.activate()
    from megatron.training import training

    import megatron_exo.forward_step as forward_step
    from megatron_exo.pretrain import main

    original = forward_step.forward_step

    def step(*args: object) -> object:
        disk = Path(sys.argv[-1])
        if training.get_args().curr_iteration == 2 and not (disk / FILLER).exists():
            fill(disk, leave=100_000)
        return original(*args)  # type: ignore[arg-type]

    forward_step.forward_step = step  # type: ignore[assignment]
    main()


def test_a_run_that_lost_its_last_checkpoint_says_so_and_fails(disk: Path) -> None:
    arguments = f"{MODEL} {MOCK_DATA} {RUN} --train-iters 4 --save {disk} --load {disk}".split()
    outcome = run_program(_train_on_a_disk_that_fills_up, arguments)
    assert outcome.status == 1
    assert re.fullmatch(
        r"rank 0: the run is over, but its last checkpoint could not be written: rank 0: .*No space left on device.*; "
        "make room and start again with the same command, which trains again what came after the one before",
        one_line(outcome.err),
    )
    assert "iteration 4/4" in outcome.out
    assert (disk / TRACKER).read_text() == "2"
