"""Pickles of plain data, read so that nothing in them is executed and nothing in them ends the interpreter.

That a pickle names no function does not make it harmless: a few bytes can ask for a dict key that hashes for ever or
overflows the C stack, for an array of terabytes, or for a tensor beyond the bytes of its file. What is read here is
held to the few forms that PyTorch writes: protocols 2 and later, dicts with names for keys, objects that are made from
names and numbers, and tensors of exactly the bytes that follow (``unpickler.py`` follows the pickles themselves).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import io
import math
import pickle
import zipfile
from enum import Enum
from pathlib import PosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_exo.unpickler import LARGEST_NUMBER, Unpickler, demand, is_name, kind_of, refusal

# -- the index of a checkpoint ------------------------------------------------------------------------------------


class _IndexUnpickler(Unpickler):
    """Plain data classes of PyTorch's checkpoints, sizes, dtypes and paths, and nothing else."""

    def __init__(self) -> None:
        self.data_classes: dict[type, bool] = {}
        """Those that the index has named so far, and whether they take their state in themselves."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module.startswith(_CHECKPOINTS) and "." not in name:
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type) and found.__module__.startswith(_CHECKPOINTS):
                if issubclass(found, Enum):
                    return found
                if dataclasses.is_dataclass(found):
                    self.data_classes[found] = hasattr(found, "__setstate__")
                    return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index does not need")

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function is torch.Size:
            demand(len(args) == 1 and type(args[0]) is tuple, "a size without numbers")
            for size in args[0]:
                if type(size) is not int:
                    raise refusal("a size without numbers")
        elif function is PosixPath:
            demand(all(type(part) is str for part in args), "a path that is no name")
        else:
            is_enum = isinstance(function, type) and issubclass(function, Enum)
            demand(is_enum or function is torch.serialization._get_layout, f"a call of {kind_of(function)}")
            demand(len(args) == 1 and is_name(args[0]), f"a {kind_of(function)} that is no name or number")
        return function(*args)

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        if not isinstance(kind, type) or kind not in self.data_classes:  # in this order: other things may not hash
            raise refusal("an object of another class than those of data")
        if args:
            raise refusal("an object made from arguments")
        return object.__new__(kind)

    def build(self, instance: Any, state: Any) -> None:
        kind = type(instance)
        if kind not in self.data_classes:
            raise refusal("a state of something that has none")
        if self.data_classes[kind]:
            instance.__setstate__(state)
            return
        demand(type(state) is dict, "an object without fields")
        for name in state:
            if type(name) is not str:
                raise refusal("an object without fields")
        instance.__dict__.update(state)  # past the __setattr__ of frozen ones, as the original does


_CHECKPOINTS = "torch.distributed.checkpoint."
_PLAIN = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,  # where the checkpoint was written, if it was given as a path
}


def read_index_pickle(data: bytes) -> Metadata:
    """The content of a ``.metadata`` file.

    Raises:
        pickle.UnpicklingError: it names anything that an index does not need; nothing has been executed.
        Exception: it is damaged, and the bytes lead to any other.
    """
    collects = gc.isenabled()
    gc.disable()  # it would look through millions of new objects, of which none is garbage
    try:
        index = _IndexUnpickler().load(data)
    finally:
        if collects:
            gc.enable()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    return index


# -- what torch.save wrote ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Named:
    """A class or function, by name: never looked up."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Made:
    """An object that the file would make."""

    kind: str = ""


_CALLER, _CALL = (f"megatron.core.rerun_state_machine.{name}" for name in ("Caller", "Call"))
"""The tuples with names in which ``--rerun-mode`` keeps what it has found."""


_ITEM_SIZES = {name: dtype.itemsize for name, dtype in torch.storage._storage_type_to_dtype_map().items()}


class _Outline(Unpickler):
    """Follows a pickle of ``torch.save`` without making any object of it."""

    def __init__(self) -> None:
        self.storages: dict[str, int] = {}
        """Record → bytes that the pickle says it has."""

    def find_class(self, module: str, name: str) -> Any:
        return _Named(f"{module}.{name}")

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        demand(isinstance(function, _Named), f"a call of a {type(function).__name__}")
        if function.name == "collections.OrderedDict":
            demand(args == (), "an OrderedDict made from a list")
            return {}
        if function.name.endswith("multiarray._reconstruct"):
            demand(len(args) == 3 and args[1] == (0,), "an array that is not made empty")
        elif function.name != "torch.Size" and not function.name.startswith("torch._utils._rebuild_"):
            demand(all(_is_modest(arg) for arg in args), f"a {function.name} made from more than names and numbers")
        return _Made()

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        demand(isinstance(kind, _Named), f"an object of a {type(kind).__name__}")
        if args:
            names_and_numbers = args[1:] if kind.name == _CALL and args[0] == _Made(_CALLER) else args
            is_modest = all(_is_modest(arg) for arg in names_and_numbers)
            demand(kind.name in (_CALLER, _CALL) and is_modest, "an object made from arguments")
        return _Made(kind.name)

    def build(self, instance: Any, state: Any) -> None:
        demand(isinstance(instance, _Made | dict), f"a state of a {type(instance).__name__}")

    def persistent_load(self, pid: Any) -> Any:
        is_storage = type(pid) is tuple and len(pid) == 5 and isinstance(pid[1], _Named)
        demand(is_storage and isinstance(pid[2], str) and type(pid[4]) is int, "a reference that is no storage")
        kind = pid[1].name.rpartition(".")[2]
        size = 1 if kind == "UntypedStorage" else _ITEM_SIZES.get(kind, 0)
        demand(size > 0 and pid[4] >= 0, f"a storage of {pid[1].name}")
        self.storages[pid[2]] = max(self.storages.get(pid[2], 0), pid[4] * size)
        return _Made()


def _is_modest(arg: Any) -> bool:
    if isinstance(arg, int):
        return abs(arg) < LARGEST_NUMBER
    return arg is None or isinstance(arg, str | bytes | float | _Named)


def check_saved(file: BinaryIO) -> None:
    """Refuse what ``torch.load(weights_only=True)`` cannot read without harm; it leaves the file at its beginning.

    ``weights_only`` alone keeps a file from running code. It does not keep it from ending the interpreter: the sizes of
    records and tensors are believed.

    Raises:
        pickle.UnpicklingError: the file is compressed, no plain data, or says that it holds more than it does.
        Exception: it is damaged, and the bytes lead to any other.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    demand(file.read(4) == b"PK\x03\x04", "another beginning than torch.save writes")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        demand(all(entry.compress_type == zipfile.ZIP_STORED for entry in entries), "compressed records")
        demand(sum(entry.file_size for entry in entries) <= size, "records of more bytes than the file")
        sizes = {entry.filename: entry.file_size for entry in entries}
        pickles = [name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
        demand(len(pickles) == 1 and len(sizes) == len(entries), "no list of its content, or several")
        data = archive.read(pickles[0])
    outline = _Outline()
    outline.load(data)
    folder = pickles[0].removesuffix("data.pkl")
    for key, needed in outline.storages.items():
        found = sizes.get(f"{folder}data/{key}")
        demand(found is not None and found >= needed, f"a tensor of {needed} bytes in a record of {found or 0}")
    file.seek(0)


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuse a tensor that is more than its bytes: repeated over a small storage, it would grow when it is copied.

    Raises:
        pickle.UnpicklingError: it is not strided, not on the CPU, or has more elements than its storage.
    """
    demand(tensor.layout == torch.strided and tensor.device.type == "cpu", "a tensor without bytes of its own")
    elements = math.prod(tensor.shape)
    stored = tensor.untyped_storage().nbytes()
    demand(elements * tensor.itemsize <= stored, f"a tensor of {elements} elements in {stored} bytes")
