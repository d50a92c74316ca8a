"""Which errors become one line, who says it, and how the process ends."""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_exo import errors
from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.platform.storage import raise_storage_errors

HINT = "make room"


class Ended(BaseException):
    """In place of ``os._exit``, which would end the tests."""


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Raises an error inside ``one_line_errors``; returns how the process ends, its status and what it says."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def end_at_once(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end_at_once)

    def ending(error: BaseException, **environment: str) -> tuple[str, int, str]:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises((SystemExit, Ended)) as end, one_line_errors(HINT):
            raise error
        return type(end.value).__name__, end.value.args[0], capsys.readouterr().err

    return ending


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


def test_a_user_error_is_one_line_even_if_its_message_is_not(ending: Callable[..., tuple]) -> None:
    assert ending(UserError("this is wrong;\n  do that")) == ("SystemExit", 1, "error: this is wrong; do that\n")


def test_of_the_ranks_of_a_machine_the_first_speaks(ending: Callable[..., tuple]) -> None:
    assert ending(UserError("no"), RANK="8", LOCAL_RANK="0") == ("SystemExit", 1, "error: no\n")
    assert ending(UserError("no"), RANK="9", LOCAL_RANK="1") == ("SystemExit", 1, "")


def test_a_silent_rank_waits_for_the_one_that_speaks(
    ending: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    ending(UserError("no"), RANK="0", LOCAL_RANK="0")
    assert waits == []
    ending(UserError("no"), RANK="1", LOCAL_RANK="1")
    assert len(waits) == 1


def test_once_ranks_are_connected_each_speaks_and_leaves_without_waiting_for_the_others(
    ending: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_is_connected", lambda: True)
    assert ending(UserError("no"), RANK="9", LOCAL_RANK="1") == ("Ended", 1, "error: rank 9: no\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.pt"),
            "cannot write: No space left on device (a.pt); make",
        ),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), f"cannot write: {os.strerror(errno.EDQUOT)}; make room"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/r"), "cannot write: Read-only file system (/r); make room"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a.bin"),
            "Permission denied (a.bin); give this user access",
        ),
        (
            RuntimeError("worker 0: [Errno 28] No space left on device"),
            "cannot write: No space left on device; make room",
        ),
        (
            caused_by(RuntimeError("x"), OSError(errno.EFBIG, "File too large")),
            "cannot write: File too large; make room",
        ),
        (
            CheckpointException("write", {3: (RuntimeError("[Errno 28] No space left on device"), None)}),  # type: ignore[dict-item]
            "cannot write: No space left on device; make room",
        ),
        (
            CheckpointException("read", {3: (KeyError("λ"), None)}),  # type: ignore[dict-item]
            "a checkpoint failed to read: KeyError on rank 3: 'λ'",
        ),
        (CheckpointException("write", {}), "a checkpoint failed to write: see what rank 0 says"),
    ],
)
def test_trouble_with_storage_is_told_by_the_rank_that_has_it(
    ending: Callable[..., tuple], error: BaseException, message: str
) -> None:
    how, status, said = ending(error, RANK="3", LOCAL_RANK="3")
    assert (how, status) == ("Ended", 1)
    assert said.startswith(f"error: rank 3: {message}")
    assert said.count("\n") == 1


def test_ctrl_c_is_one_line_of_each_machine(ending: Callable[..., tuple]) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        assert ending(KeyboardInterrupt(), RANK="8", LOCAL_RANK="0") == ("Ended", 130, "interrupted\n")
        assert ending(KeyboardInterrupt(), RANK="9", LOCAL_RANK="1") == ("Ended", 130, "")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a second one would be a traceback
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.ENOENT, "No such file")])
def test_any_other_error_keeps_its_traceback(error: BaseException) -> None:
    with pytest.raises(type(error)), one_line_errors(HINT):
        raise error


def test_leaving_on_purpose_while_handling_a_full_disk_is_not_an_error() -> None:
    def give_up() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise SystemExit(0)  # noqa: B904

    with pytest.raises(SystemExit) as end, one_line_errors(HINT):
        give_up()
    assert end.value.code == 0


class FullDisk(io.RawIOBase):
    """A file on a disk with room for another 500 bytes."""

    room = 500

    def write(self, data: Any) -> int:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return len(data)


def test_pytorchs_writer_still_hides_that_a_disk_is_full() -> None:
    """Why ``platform.storage`` digs the operating system's error out of what the writer raises."""
    with pytest.raises(RuntimeError) as hidden:
        torch.save(torch.zeros(1000), FullDisk())
    assert os.strerror(errno.ENOSPC) not in str(hidden.value)

    def write(*args: object, **kwargs: object) -> tuple[int, Exception]:
        return 0, hidden.value

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        raise_storage_errors(write).__func__()
    assert raise_storage_errors(write).__func__(results_queue="a thread's") == (0, hidden.value)


def test_the_end_of_another_rank_is_one_line_and_an_error_of_our_own_keeps_its_traceback(
    ending: Callable[..., tuple],
) -> None:
    gloo = "[/build/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:658. This is typical\nof"
    assert ending(RuntimeError(gloo), RANK="3") == (
        "Ended",
        1,
        "error: rank 3: lost another rank: Connection closed by peer [127.0.0.1]:658; what has ended "
        "that one is said by itself, or by what has started it\n",
    )
    wrong_size = "[enforce fail at /build/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
    for error in (RuntimeError(wrong_size), RuntimeError("gloo: timed out"), ValueError(gloo)):
        with pytest.raises(type(error)), one_line_errors(HINT):
            raise error
