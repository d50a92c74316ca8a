"""Pickles of plain data, read so that nothing in them is executed and nothing in them ends the interpreter.

That a pickle names no function does not make it harmless: a few bytes can ask for a dict key that hashes for ever or
overflows the C stack, for an array of terabytes, or for a tensor beyond the bytes of its file. What is read here is
held to the few forms that PyTorch writes: protocols 2 and later, dicts with names for keys, objects that are made from
names and numbers, and tensors of exactly the bytes that follow.

Python's own unpickler in Python is used, not the one in C: its memo grows with the file and not with a number in it.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from enum import Enum
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    SHORT_BINBYTES BINBYTES SHORT_BINSTRING EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE1
    TUPLE2 TUPLE3 TUPLE BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""
_ITEM_SIZES = {name: dtype.itemsize for name, dtype in torch.storage._storage_type_to_dtype_map().items()}
_LARGEST_NUMBER = 1 << 20
"""What a call of anything but a tensor may be given: some classes allocate as many bytes or items."""


class _Unpickler(pickle._Unpickler):
    """Everything but the making of objects: subclasses say what those are."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What ``function(*args)`` stands for."""
        raise NotImplementedError

    def new(self, kind: Any) -> Any:
        """An empty object of a class."""
        raise NotImplementedError

    def build(self, instance: Any, state: Any) -> None:
        """Fill an object."""
        raise NotImplementedError

    def load_reduce(self) -> None:
        args = self.stack.pop()
        _demand(type(args) is tuple, "a call without arguments")
        self.stack[-1] = self.call(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        _demand(args == () and type(args) is tuple, "an object made from arguments")
        self.stack[-1] = self.new(self.stack[-1])

    def load_build(self) -> None:
        state = self.stack.pop()
        self.build(self.stack[-1], state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(self.stack[-1], key, value)

    def _set(self, target: Any, key: Any, value: Any) -> None:
        is_name = _is_name(key) or (type(key) is MetadataIndex and _is_plain_index(key))
        _demand(is_name and isinstance(target, dict), f"a {type(key).__name__} for the key of a {_name(target)}")
        target[key] = value

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"it is damaged, or no plain data: it has {otherwise}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and abs(value) < _LARGEST_NUMBER)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _is_plain_index(index: MetadataIndex) -> bool:
    """Whether hashing it hashes nothing but names and numbers."""
    offset, position = index.offset, index.index
    return (
        type(index.fqn) is str
        and (offset is None or type(offset) is torch.Size)
        and (position is None or type(position) is int)
    )


# -- the index of a checkpoint ------------------------------------------------------------------------------------


class _IndexUnpickler(_Unpickler):
    """Plain data classes of PyTorch's checkpoints, sizes and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_CHECKPOINTS) and "." not in name:
            found = super().find_class(module, name)
            is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
            if is_data and found.__module__.startswith(_CHECKPOINTS):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index does not need")

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function is torch.Size:
            is_shape = len(args) == 1 and type(args[0]) is tuple and all(type(size) is int for size in args[0])
            _demand(is_shape, "a size without numbers")
        else:
            is_enum = isinstance(function, type) and issubclass(function, Enum)
            _demand(is_enum or function is torch.serialization._get_layout, f"a call of {_name(function)}")
            _demand(len(args) == 1 and _is_name(args[0]), f"a {_name(function)} that is no name or number")
        return function(*args)

    def new(self, kind: Any) -> Any:
        _demand(isinstance(kind, type) and dataclasses.is_dataclass(kind), f"an object of {_name(kind)}")
        return object.__new__(kind)

    def build(self, instance: Any, state: Any) -> None:
        _demand(not isinstance(instance, type) and dataclasses.is_dataclass(instance), f"a state of {_name(instance)}")
        if hasattr(instance, "__setstate__"):
            instance.__setstate__(state)
            return
        _demand(isinstance(state, dict) and all(isinstance(key, str) for key in state), "an object without fields")
        instance.__dict__.update(state)  # past the __setattr__ of frozen ones, as the original does


_CHECKPOINTS = "torch.distributed.checkpoint."
_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout")}


def read_index_pickle(data: bytes) -> Metadata:
    """The content of a ``.metadata`` file.

    Raises:
        pickle.UnpicklingError: it names anything that an index does not need; nothing has been executed.
        Exception: it is damaged, and the bytes lead to any other.
    """
    index = _IndexUnpickler(io.BytesIO(data)).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    return index


def reason(error: BaseException) -> str:
    """Why something could not be read, in some words: PyTorch says it in the middle of a page of advice."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f"it names {named[1]}, which is no plain data" if named else str(error)
    return f"{type(error).__name__}: {what}".splitlines()[0].split(". ")[0][:300]


# -- what torch.save wrote ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Named:
    """A class or function, by name: never looked up."""

    name: str


class _Made:
    """An object that the file would make."""


class _Outline(_Unpickler):
    """Follows a pickle of ``torch.save`` without making any object of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, int] = {}
        """Record → bytes that the pickle says it has."""

    def find_class(self, module: str, name: str) -> Any:
        return _Named(f"{module}.{name}")

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        _demand(isinstance(function, _Named), f"a call of a {type(function).__name__}")
        if function.name == "collections.OrderedDict":
            _demand(args == (), "an OrderedDict made from a list")
            return {}
        if function.name.endswith("multiarray._reconstruct"):
            _demand(len(args) == 3 and args[1] == (0,), "an array that is not made empty")
        elif function.name != "torch.Size" and not function.name.startswith("torch._utils._rebuild_"):
            _demand(all(_is_modest(arg) for arg in args), f"a {function.name} made from more than names and numbers")
        return _Made()

    def new(self, kind: Any) -> Any:
        _demand(isinstance(kind, _Named), f"an object of a {type(kind).__name__}")
        return _Made()

    def build(self, instance: Any, state: Any) -> None:
        _demand(isinstance(instance, _Made | dict), f"a state of a {type(instance).__name__}")

    def persistent_load(self, pid: Any) -> Any:
        is_storage = type(pid) is tuple and len(pid) == 5 and isinstance(pid[1], _Named)
        _demand(is_storage and isinstance(pid[2], str) and type(pid[4]) is int, "a reference that is no storage")
        kind = pid[1].name.rpartition(".")[2]
        size = 1 if kind == "UntypedStorage" else _ITEM_SIZES.get(kind, 0)
        _demand(size > 0 and pid[4] >= 0, f"a storage of {pid[1].name}")
        self.storages[pid[2]] = max(self.storages.get(pid[2], 0), pid[4] * size)
        return _Made()


def _is_modest(arg: Any) -> bool:
    if isinstance(arg, int):
        return abs(arg) < _LARGEST_NUMBER
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
    _demand(file.read(4) == b"PK\x03\x04", "another beginning than torch.save writes")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        _demand(all(entry.compress_type == zipfile.ZIP_STORED for entry in entries), "compressed records")
        _demand(sum(entry.file_size for entry in entries) <= size, "records of more bytes than the file")
        sizes = {entry.filename: entry.file_size for entry in entries}
        pickles = [name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
        _demand(len(pickles) == 1 and len(sizes) == len(entries), "no list of its content, or several")
        data = archive.read(pickles[0])
    outline = _Outline(data)
    outline.load()
    folder = pickles[0].removesuffix("data.pkl")
    for key, needed in outline.storages.items():
        found = sizes.get(f"{folder}data/{key}")
        _demand(found is not None and found >= needed, f"a tensor of {needed} bytes in a record of {found or 0}")
    file.seek(0)


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuse a tensor that is more than its bytes: repeated over a small storage, it would grow when it is copied.

    Raises:
        pickle.UnpicklingError: it is not strided, not on the CPU, or has more elements than its storage.
    """
    _demand(tensor.layout == torch.strided and tensor.device.type == "cpu", "a tensor without bytes of its own")
    elements = math.prod(tensor.shape)
    stored = tensor.untyped_storage().nbytes()
    _demand(elements * tensor.itemsize <= stored, f"a tensor of {elements} elements in {stored} bytes")
