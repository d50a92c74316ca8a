"""Reads a checkpoint's index and the state that all ranks share, as data: no class is created that they do not need.

A ``torch_dist`` checkpoint is a folder with an index (``.metadata``, a pickle of PyTorch's distributed checkpoints)
and the bytes it points to (``*.distcp``). Among those is the state that all ranks share, with the arguments of the
run that saved it.
"""

from __future__ import annotations

import io
import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import safe_globals  # noqa: F401  its import registers Megatron's plain classes for torch.load
from megatron.core.rerun_state_machine import Call, Caller
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_exo.errors import UserError, reason
from megatron_exo.plain_pickle import check_saved, read_index_pickle

# What --rerun-mode keeps in a checkpoint after it has found something: Megatron leaves these out of its list.
torch.serialization.add_safe_globals([Call, Caller])

TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST_TRACKER = 18
"""Digits of an iteration; more are no number that was written there."""


class CheckpointError(UserError):
    """A checkpoint that a run cannot go on from: which folder, what is wrong, what to do."""


class DamagedCheckpointError(CheckpointError):
    """A folder that is not, or no longer, what was saved; says what is wrong, and leaves what to do to the caller."""


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of an iteration lies in the folder of a run."""
    return root / f"iter_{step:07d}"


def steps_of(root: Path) -> list[int]:
    """The iterations that have a folder in ``root``, ascending; whether they are whole is another question."""
    names = (path.name for path in root.glob("iter_*") if path.is_dir())
    return sorted(int(name.removeprefix("iter_")) for name in names if re.fullmatch(r"iter_\d{7,}", name))


def folder_named_in(tracker: Path) -> Path:
    """The folder of the checkpoint that a run's tracker names, beside it; it need not be there.

    Raises:
        FileNotFoundError: there is no tracker.
        CheckpointError: it names no iteration.
    """
    with tracker.open("rb") as file:
        text = file.read(_LONGEST_TRACKER + 1).decode(errors="replace").strip()
    if text == "release":
        return tracker.with_name(text)
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_TRACKER):
        raise CheckpointError(
            f"{tracker} does not name an iteration but {text[:40]!r}; write the number of a folder iter_N there"
        )
    return folder_of(tracker.parent, int(text))


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint, after a look at the files that it points to.

    Raises:
        DamagedCheckpointError: the index or one of the files is missing, cut off or not what it should be.
    """
    path = folder / ".metadata"
    if not path.is_file() or not (folder / "metadata.json").is_file():
        if any(folder.glob("mp_rank_*")):
            raise DamagedCheckpointError(f"{folder} is in Megatron's older format (mp_rank_*), which has no index")
        raise DamagedCheckpointError(f"{folder} is no complete checkpoint: it has no index")
    try:
        index = read_index_pickle(path.read_bytes())
        _check_content(index)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise DamagedCheckpointError(f"{path} is damaged: {reason(error)}") from error
    ends: dict[str, int] = {}
    for part in index.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        if (folder / name).resolve().parent != folder.resolve():
            raise DamagedCheckpointError(f"{folder} is no checkpoint of its own: {name} is a link to elsewhere")
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            state = "missing" if size is None else f"cut off: {size} bytes of {end}"
            raise DamagedCheckpointError(f"{folder} is no complete checkpoint: {name} is {state}")
    return index


def _check_content(index: Metadata) -> None:
    """Hold the parts of an index to their types, so that whoever reads it meets what it expects."""
    described, stored = index.state_dict_metadata, index.storage_data
    if not (isinstance(described, dict) and isinstance(stored, dict)):
        raise pickle.UnpicklingError("it has no list of parts")
    if not all(isinstance(kind, TensorStorageMetadata | BytesStorageMetadata) for kind in described.values()):
        raise pickle.UnpicklingError("it describes a part that is neither tensor nor object")
    for key, part in stored.items():
        is_placed = isinstance(key, MetadataIndex) and isinstance(part, _StorageInfo)
        if not is_placed or not all(type(number) is int and number >= 0 for number in (part.offset, part.length)):
            raise pickle.UnpicklingError("a part has no place")
        if type(part.relative_path) is not str or Path(part.relative_path).name != part.relative_path:
            raise pickle.UnpicklingError(f"it names a file outside of the checkpoint, {str(part.relative_path)[:80]!r}")


def check_objects(folder: Path, index: Metadata, share: tuple[int, int] = (0, 1)) -> None:
    """Read everything in a checkpoint that is no tensor as plain data: Megatron reads it without that restriction.

    Args:
        share: ``(i, n)`` to read every n-th file only, beginning with the i-th.

    Raises:
        DamagedCheckpointError: an object cannot be read, or is more than plain data.
    """
    parts: dict[str, list[tuple[str, _StorageInfo]]] = {}
    for key, part in index.storage_data.items():
        if isinstance(index.state_dict_metadata.get(key.fqn), BytesStorageMetadata):
            parts.setdefault(part.relative_path, []).append((key.fqn, part))
    for name in sorted(parts)[share[0] :: share[1]]:
        for object_name, part in parts[name]:
            _read_object(folder, part, f"{object_name} in {name}")


def check_files_of_ranks(folder: Path) -> bool:
    """Whether a folder is in Megatron's older format of one file a rank, whose files are then looked at.

    Megatron loads them as plain data; here they are held to sizes that can be loaded at all.

    Raises:
        DamagedCheckpointError: a file is damaged.
    """
    if (folder / "metadata.json").exists() or not any(folder.glob("mp_rank_0*")):
        return False
    for path in sorted(folder.glob("mp_rank_*/*.pt")):
        try:
            with path.open("rb") as file:
                check_saved(file)
        except Exception as error:  # damaged bytes raise whatever they like
            raise DamagedCheckpointError(f"{path} cannot be read: {reason(error)}") from error
    return True


def _read_object(folder: Path, part: _StorageInfo, what: str) -> Any:
    try:
        with (folder / part.relative_path).open("rb") as file:
            file.seek(part.offset)
            content = io.BytesIO(file.read(part.length))
        check_saved(content)
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise whatever they like
        raise DamagedCheckpointError(f"{folder}: {what} is damaged: {reason(error)}") from error


def read_shared_state(folder: Path, index: Metadata) -> dict[str, Any]:
    """What all ranks share: ``args``, ``iteration`` and so on; nothing if the folder was not saved by training.

    Raises:
        DamagedCheckpointError: its bytes cannot be read.
    """
    if (folder / "common.pt").exists():  # Megatron would take it instead of what is read here
        raise DamagedCheckpointError(f"{folder} has a common.pt, which this program never writes")
    part = next((part for key, part in index.storage_data.items() if re.match(r"common_state\b", key.fqn)), None)
    if part is None:
        return {}
    states = _read_object(folder, part, "its shared state")
    if not (isinstance(states, list) and states and isinstance(states[0], dict)):
        raise DamagedCheckpointError(f"{folder}: its shared state is damaged: it is no list of a dict")
    return states[0]


def read_saved_arguments(folder: Path, index: Metadata) -> Namespace:
    """The arguments of the run that saved a checkpoint, as they were after validation.

    Raises:
        CheckpointError: they cannot be read, or are not those of an ExoFormer.
    """
    state = read_shared_state(folder, index)
    if not state:
        raise CheckpointError(f"{folder} does not say what model it is of: it was not saved by this program's training")
    if not hasattr(state.get("args"), "exo_variant"):
        raise CheckpointError(f"{folder} is not of an ExoFormer; load it into the program that saved it")
    return state["args"]
