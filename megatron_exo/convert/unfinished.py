"""A folder that appears under its name only when it is whole, and that a second start goes on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_exo.checkpoints.integrity import sha256_of
from megatron_exo.errors import UserError
from megatron_exo.files import only_one_process, replacing, to_disk

STATE = ".conversion.json"
"""What of an unfinished folder is finished, and what it is made of; not in the finished one."""


class UnfinishedFolder:
    """``OUT.partial``, for as long as it is not ``OUT``; see :func:`unfinished`."""

    def __init__(self, path: Path, identity: Mapping[str, Any], finished: dict[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._finished = finished

    def has(self, name: str) -> bool:
        """Whether an earlier start, or this one, has finished the file, and it is what was written then."""
        file = self.path / name
        return name in self._finished and file.is_file() and sha256_of(file) == self._finished[name]

    def finish(self, name: str, sha256: str) -> None:
        """Record that a file is whole and on the disk."""
        self._finished[name] = sha256
        self.record()

    def record(self) -> None:
        """Write down what is finished so far."""
        with replacing(self.path / STATE) as file:
            json.dump({"identity": self._identity, "finished": self._finished}, file)


def check_free(out: Path) -> None:
    """Refuse to write where something is already.

    Raises:
        UserError: ``out`` is a file, or a folder with something in it.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        what = "is a file" if out.is_file() else "is not empty"
        raise UserError(f"{out} {what}; remove it, or give the folder another name")


@contextmanager
def unfinished(out: Path, identity: Mapping[str, Any]) -> Iterator[UnfinishedFolder]:
    """Make ``OUT.partial``, or go on with one of the same ``identity``, and rename it to ``out`` at the end.

    If the body raises, or the process is killed, the folder stays as it is for the next start. One left by a conversion
    of anything else is made anew.

    Args:
        identity: plain values that all files follow from.

    Raises:
        UserError: something is at ``out`` already, ``OUT.partial`` was not made by a conversion, or another process
            is at it.
    """
    check_free(out)
    path = out.with_name(out.name + ".partial")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file, in the way of the unfinished folder; remove it") from None
    with only_one_process(path, "give another folder"):
        folder = UnfinishedFolder(path, identity, _finished(path, identity))
        yield folder
        for file in path.iterdir():
            to_disk(file)
        to_disk(path)
        path.rename(out)
        to_disk(out.parent)
        (out / STATE).unlink()  # only now: without it, a next start would not know OUT.partial for its own


def _finished(path: Path, identity: Mapping[str, Any]) -> dict[str, str]:
    """What an earlier start has finished; nothing, and an empty folder, if that was something else."""
    state = _read_state(path)
    if state is None and any(file.name != f".{STATE}.new" for file in path.iterdir()):
        raise UserError(f"{path} is no unfinished conversion of this program; remove it, or give another folder")
    if state is not None and state["identity"] == dict(identity):
        return dict(state["finished"])
    for file in path.iterdir():
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    UnfinishedFolder(path, identity, {}).record()
    return {}


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        is_ours = isinstance(state["identity"], dict) and isinstance(state["finished"], dict)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return state if is_ours else None
