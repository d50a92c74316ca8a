"""Files that a crash leaves either as they were or whole, and names that stay in their folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from megatron_exo.errors import UserError


def is_plain_name(name: Any) -> bool:
    """Whether something that a file says is the name of a file in a folder, and leads nowhere else."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file to write that takes the place of ``path`` only once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        to_disk(path.parent)  # the new name, too
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_one_process(folder: Path, instead: str) -> Iterator[None]:
    """Hold a folder for this process; the lock goes with the process, however that ends.

    Raises:
        UserError: another process holds it; the message ends in what to do ``instead``.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {folder}; wait for it, or {instead}") from None
        except OSError:  # a filesystem without locks
            pass
        yield
    finally:
        os.close(descriptor)
