"""A dataset that has its name only once it is whole, and that a second start of the same command goes on with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_exo.data.index_format import write_index
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.validate import check_dataset
from megatron_exo.errors import UserError
from megatron_exo.files import only_one_process, replacing, to_disk

STATE = "state.json"
"""How far the files beside it have come, and on what request. It is replaced at once, so it is never half written."""
SUFFIX = ".partial"

_SAVE_INTERVAL_S = 15.0  # so much work is lost at most when the process is killed
_SUFFIXES = (".bin", ".json", ".idx")
"""The files of a dataset, in the order in which they get their names: without an index there is no dataset."""


class UnfinishedError(UserError):
    """A dataset that cannot be written where it is wanted: what is in the way, what to do."""


class UnfinishedDataset:
    """The folder ``PREFIX.partial``; see :func:`unfinished_dataset`.

    Attributes:
        position: what was passed to :meth:`mark` last, by this start or an earlier one; ``None`` at the beginning.
        documents, tokens: what is written.
        complete: whether all that is left to do is :meth:`publish`.
    """

    def __init__(self, folder: Path, dtype: np.dtype, request: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self.folder = folder
        self.dtype = dtype
        self._request = request
        self.position: Any = state["position"]
        self.documents: int = state["documents"]
        self.tokens: int = state["tokens"]
        self.complete: bool = state["complete"]
        self._files: list[BinaryIO] = []
        self._saved_at = time.monotonic()
        self._marked = self._state()
        if not self.complete:
            if not (folder / STATE).is_file():
                self._save(self._marked)
            self._open()

    @property
    def prefix(self) -> str:
        """The dataset's files in the folder, without suffix."""
        return str(self.folder / "data")

    def _open(self) -> None:
        """Open the tokens and the lengths at the end of what the state knows; whatever is behind it goes."""
        with ExitStack() as opened:
            for name, size in (("data.bin", self.tokens * self.dtype.itemsize), ("data.lengths", self.documents * 4)):
                file = opened.enter_context(open(self.folder / name, "ab"))
                if file.tell() < size:
                    raise UnfinishedError(
                        f"{self.folder / name} is shorter than {STATE} says; remove {self.folder} to begin anew"
                    )
                file.truncate(size)
                self._files.append(file)
            opened.pop_all()

    def append(self, tokens: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        """Write tokens behind those before, and how long the documents are that end in them.

        Args:
            tokens: of the dataset's dtype, [n]. Those of an unfinished document may come in several calls.
            lengths: of whole documents, in order, [documents].
        """
        tokens_file, lengths_file = self._files
        tokens_file.write(np.ascontiguousarray(tokens, dtype=self.dtype))
        lengths_file.write(np.ascontiguousarray(lengths, dtype="<i4"))
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def mark(self, position: Any) -> None:
        """Note what was written so far, and from where in the input to go on; saved every few seconds.

        Args:
            position: plain values, as JSON has them.
        """
        self.position = position
        self._marked = self._state()
        if time.monotonic() - self._saved_at >= _SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Bring what was written up to the last :meth:`mark` to the disk, and then the state that says so."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self._save(self._marked)
        self._saved_at = time.monotonic()

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("documents", "tokens", "position", "complete")}

    def _save(self, state: Mapping[str, Any]) -> None:
        with replacing(self.folder / STATE) as file:
            content = {"request": self._request, **state}
            json.dump(content | {"sha256": _digest(content)}, file)

    def finish(self, sidecar: Sidecar) -> None:
        """Write the index and the description, and check the whole.

        Raises:
            DatasetError: the files are not what they should be.
        """
        self.save()
        self.close()
        write_index(Path(f"{self.prefix}.idx"), self.dtype, np.memmap(self.folder / "data.lengths", "<i4", "r"))
        sidecar.save(f"{self.prefix}.json")
        check_dataset(self.prefix, vocab_size=sidecar.vocab_size)
        for suffix in _SUFFIXES:
            to_disk(Path(self.prefix + suffix))
        self.complete = True
        self._save(self._state())

    def publish(self, prefix: str) -> Sidecar:
        """Give the finished files their names, in place of what has them, and remove the folder."""
        if Path(f"{self.prefix}.idx").exists():
            Path(f"{prefix}.idx").unlink(missing_ok=True)
        for suffix in _SUFFIXES:
            if Path(self.prefix + suffix).exists():  # else an earlier start came this far
                os.replace(self.prefix + suffix, prefix + suffix)
        to_disk(self.folder.parent)
        (self.folder / "data.lengths").unlink(missing_ok=True)
        (self.folder / STATE).unlink()  # last: without it the folder would be nobody's
        self.folder.rmdir()
        return Sidecar.load(f"{prefix}.json")

    def close(self) -> None:
        """Close the files; what is behind the last saved mark will be written again."""
        for file in self._files:
            file.close()
        self._files.clear()


@contextmanager
def unfinished_dataset(
    prefix: str,
    dtype: np.dtype,
    request: Mapping[str, Any],
    *,
    overwrite: bool = False,
    lasting: tuple[type[UserError], ...] = (),
) -> Iterator[UnfinishedDataset]:
    """Make ``PREFIX.partial``, or go on with one of the same request; the body finishes and publishes it.

    If the process is killed, or the body raises, the folder is left for the next start. A :class:`UserError` that is
    not ``lasting`` would come again, so that it removes the folder.

    Args:
        dtype: of the tokens.
        request: plain values that the dataset follows from.
        overwrite: allow for a dataset at ``PREFIX``, and for unfinished work of another request.
        lasting: errors that a second start may not meet.

    Raises:
        UnfinishedError: something is in the way, the folder is not from here or damaged, or belongs to another request.
        UserError: another process is at it.
    """
    folder = Path(prefix + SUFFIX)
    if Path(prefix).name == "" or Path(prefix).is_dir():
        raise UnfinishedError(f"{prefix} is a folder; --output-prefix is a path without suffix, such as {prefix}/train")
    state = _load(folder)
    if not (state and state["complete"] and state["request"] == request):
        _refuse_existing(prefix, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UnfinishedError(f"{folder} is a file, in the way of unfinished work; remove it") from None
    with only_one_process(folder, "choose another --output-prefix"):
        state = _load(folder)  # as whoever held the folder has left it
        if state is not None and state["request"] != request:
            _refuse_other(folder, state["request"], request, overwrite)
            state = None
        if state is None:
            _clear(folder)
            state = {"documents": 0, "tokens": 0, "position": None, "complete": False}
        dataset = UnfinishedDataset(folder, dtype, request, state)
        try:
            if dataset.position is not None:
                print(f"going on after {dataset.documents:,} documents of {folder}", file=sys.stderr)
            yield dataset
        except BaseException as error:
            if isinstance(error, UserError) and not isinstance(error, lasting):
                dataset.close()
                shutil.rmtree(folder)
            elif not dataset.complete and dataset._files:
                dataset.save()
                print(f"what is done is kept in {folder}; the same command goes on with it", file=sys.stderr)
            raise
        finally:
            dataset.close()


def describe_file(path: Path) -> list[Any]:
    """What tells an input from another, and from itself after a change, in a request."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _refuse_existing(prefix: str, overwrite: bool) -> None:
    existing = [prefix + suffix for suffix in (".bin", ".idx", ".json") if os.path.exists(prefix + suffix)]
    if existing and not overwrite:
        raise UnfinishedError(f"{' and '.join(existing)} exist(s) already; pass --overwrite or another --output-prefix")


def _refuse_other(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], overwrite: bool) -> None:
    if overwrite:
        return
    names = ", ".join(name for name in {**before, **now} if before.get(name) != now.get(name))
    raise UnfinishedError(
        f"{folder} is unfinished work of another command (it differs in: {names}); repeat that command to go on with "
        "it, or pass --overwrite to begin anew"
    )


def _clear(folder: Path) -> None:
    """Empty a folder that is ours."""
    names = {file.name for file in folder.iterdir()}
    if names - {f".{STATE}.new"} and STATE not in names:
        raise UnfinishedError(f"{folder} is no unfinished dataset of this program; remove it, or write elsewhere")
    for file in folder.iterdir():
        file.unlink()


def _load(folder: Path) -> dict[str, Any] | None:
    """The state of a folder, or ``None`` if it has none.

    Raises:
        UnfinishedError: it cannot be read.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        sound = state.pop("sha256") == _digest(state)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UnfinishedError(f"{folder / STATE} is damaged; remove {folder} to begin anew")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    """With it, what is read is what was written, and its values need no further check."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
