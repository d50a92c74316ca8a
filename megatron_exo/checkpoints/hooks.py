"""Where Megatron's saving is added to. Used only through :mod:`megatron_exo.platform.patches`.

The order of a save, synchronous or not: the old content of the folder goes, every rank writes its files and their
digests, the first rank writes Megatron's two index files, then the manifest, then the tracker, and then removes what is
not to be kept. Whenever it stops, the tracker names a whole checkpoint.
"""

from __future__ import annotations

import functools
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint.api import CheckpointException

from megatron_exo import console
from megatron_exo.checkpoints import failed_saves, retention
from megatron_exo.checkpoints.integrity import DIGEST_SUFFIX, MANIFEST, leave_digest
from megatron_exo.checkpoints.manifest import TOKENIZER_FOLDER, write_manifest
from megatron_exo.checkpoints.reading import TRACKER
from megatron_exo.files import replacing

_MARKS = (MANIFEST, "metadata.json", ".metadata")
"""The files without which a folder is no checkpoint, the telling one first."""


def emptied_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.save``: write into a folder without anything of an earlier checkpoint.

    The original warns and writes over what is there. Until it ends, the old index files and the new shards, or shards
    of more ranks than there are now, would look like a whole checkpoint.

    And let all ranks know before the tracker is written if the first could not write what it alone writes.

    A checkpoint that is still being written in the background is ended before the same one is saved again, as
    ``--rerun-mode`` may ask for.
    """
    in_flight: set[Path] = set()

    @functools.wraps(original)
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if MultiStorageClientFeature.is_enabled():
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        folder = Path(checkpoint_dir)
        if folder in in_flight:
            in_flight.discard(folder)
            from megatron.training.async_utils import maybe_finalize_async_save

            failed_saves.survived(maybe_finalize_async_save)(blocking=True)
        if dist.get_rank() == 0:
            failed_saves.noted(_empty)(folder)
        failed_saves.tell_all_ranks()
        with _removed_if_it_fails(folder):
            request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            if request is None:
                failed_saves.tell_all_ranks()
                return None
        in_flight.add(folder)
        ends = [*request.finalize_fns, failed_saves.tell_all_ranks, lambda: in_flight.discard(folder)]
        request.finalize_fns[:] = [_removed_if_it_fails(folder)(end) for end in ends]
        return request

    return save


def _empty(folder: Path) -> None:
    for name in _MARKS:
        (folder / name).unlink(missing_ok=True)
    for pattern in ("*.distcp", f"*{DIGEST_SUFFIX}"):
        for path in folder.glob(pattern):
            path.unlink()
    if (folder / TOKENIZER_FOLDER).is_dir():
        shutil.rmtree(folder / TOKENIZER_FOLDER)


@contextmanager
def _removed_if_it_fails(folder: Path) -> Iterator[None]:
    """Give the room of a checkpoint back that was begun and could not be ended, as all ranks have been told."""
    try:
        yield
    except (CheckpointException, failed_saves.SaveFailedError):
        if dist.get_rank() == 0:
            with suppress(OSError):
                _empty(folder)
                folder.rmdir()
        raise


def digested(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FileSystemWriterAsync.write_preloaded_data``: whoever has written a file leaves its digest beside it."""

    @functools.wraps(original)
    def write(transform_list: Any, local_proc_idx: int, write_bucket: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(transform_list, local_proc_idx, write_bucket, *args, **kwargs)
        if not kwargs.get("use_msc") and not isinstance(answer[1], BaseException):
            leave_digest(Path(write_bucket[0]))
        return answer

    return write


def manifest_last(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``save_config``, by which the first rank ends a checkpoint once all ranks have written: add the manifest."""

    @functools.wraps(original)
    def save_config(config: Any, checkpoint_dir: Any) -> None:
        original(config, checkpoint_dir)
        if not MultiStorageClientFeature.is_enabled():
            write_manifest(Path(checkpoint_dir))

    return failed_saves.noted(save_config)


class WithTracker:
    """In the place of Megatron's file access in ``megatron.training.checkpointing``: the tracker is replaced at once.

    The original truncates it and writes anew: a crash in between leaves a run without any checkpoint to load.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", **kwargs: Any) -> Any:
        if mode == "w" and Path(path).name == TRACKER and not MultiStorageClientFeature.is_enabled():
            return _tracker(Path(path))
        return self._original.open(path, mode, **kwargs)


@contextmanager
def _tracker(path: Path) -> Iterator[TextIO]:
    """The tracker to write; once it names the new checkpoint, old ones go."""
    content = io.StringIO()
    yield content
    try:
        with replacing(path) as file:
            file.write(content.getvalue())
    except OSError as error:
        if not failed_saves.is_tolerant():
            raise
        failed_saves.note(error)
        return
    failed_saves.succeeded()
    from megatron.training import get_args

    args = get_args()
    is_kept_track_of = (getattr(args, "keep_last", None) or getattr(args, "keep_every", None)) and args.save is not None
    newest = path.read_text(encoding="utf-8")
    if not is_kept_track_of or Path(args.save) != path.parent or not newest.isdecimal():
        return
    try:
        gone = retention.remove_old(path.parent, int(newest), keep_last=args.keep_last or 1, keep_every=args.keep_every)
    except OSError as error:  # the run goes on: it has what it needs
        console.say(f"old checkpoints in {path.parent} cannot be removed: {error.strerror} ({error.filename})")
        return
    if gone:
        console.say(f"removed checkpoint{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} from {path.parent}")
