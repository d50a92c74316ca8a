"""Pickles of plain data, read so that nothing in them is executed and nothing in them ends the interpreter.

That a pickle names no function does not make it harmless: a few bytes can ask for a dict key that hashes for ever or
overflows the C stack, for an array of terabytes, or for a tensor beyond the bytes of its file. What is read here is
held to the few forms that PyTorch writes: protocols 2 and later, dicts with names for keys, objects that are made from
names and numbers, and tensors of exactly the bytes that follow.

The pickles are followed here and not by the ``pickle`` module. Its unpickler in C hashes any key, and its memo grows
with a number in the file and not with the file; the one in Python takes ten times longer than what is here, and the
index of a large run has tens of millions of opcodes.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import io
import math
import pickle
import re
import struct
import zipfile
from enum import Enum
from pathlib import PosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

(
    _PROTO, _FRAME, _STOP, _MARK, _NONE, _NEWTRUE, _NEWFALSE, _BININT, _BININT1, _BININT2, _LONG1, _BINFLOAT,
    _BINUNICODE, _SHORT_BINUNICODE, _SHORT_BINBYTES, _BINBYTES, _SHORT_BINSTRING, _EMPTY_LIST, _APPEND, _APPENDS,
    _EMPTY_DICT, _SETITEM, _SETITEMS, _EMPTY_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3, _TUPLE, _BINGET, _LONG_BINGET, _BINPUT,
    _LONG_BINPUT, _MEMOIZE, _GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _BUILD, _BINPERSID,
) = (
    getattr(pickle, name)[0]
    for name in """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    BINUNICODE SHORT_BINUNICODE SHORT_BINBYTES BINBYTES SHORT_BINSTRING EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE BINGET LONG_BINGET BINPUT
    LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
    """.split()
)  # fmt: skip
_unsigned, _signed = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from
_OBJECT = bytes([_NEWOBJ, _MEMOIZE, _EMPTY_DICT, _MEMOIZE, _MARK])
"""What follows the empty tuple of an object with fields."""
_SIZE = bytes([_MEMOIZE, _TUPLE1, _MEMOIZE, _REDUCE, _MEMOIZE])
"""What follows the pair in a ``torch.Size`` of two dimensions."""
_ITEM_SIZES = {name: dtype.itemsize for name, dtype in torch.storage._storage_type_to_dtype_map().items()}
_LARGEST_NUMBER = 1 << 20
"""What a call of anything but a tensor may be given: some classes allocate as many bytes or items."""


class _Unpickler:
    """Everything but the making of objects: subclasses say what those are."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a class or function."""
        raise NotImplementedError

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What ``function(*args)`` stands for."""
        raise NotImplementedError

    def new(self, kind: Any) -> Any:
        """An empty object of a class."""
        raise NotImplementedError

    def build(self, instance: Any, state: Any) -> None:
        """Fill an object."""
        raise NotImplementedError

    def persistent_load(self, pid: Any) -> Any:
        """What a reference to something outside of the pickle stands for."""
        raise pickle.UnpicklingError("it refers to something outside of the pickle")

    def load(self, data: bytes) -> Any:
        """What a pickle stands for.

        Raises:
            EOFError: it ends before its end, or takes more from its stack than there is.
            Exception: it is refused, or damaged, and leads to any other.
        """
        try:
            return self._follow(data)
        except (IndexError, struct.error) as error:
            raise EOFError("it is cut off or damaged") from error

    def _follow(self, data: bytes) -> Any:
        """Frequent opcodes come first and call few functions, for that is what takes the time.

        Nothing asks for the end of the data: behind a piece that is cut off there is no next opcode.
        """
        stack: list[Any] = []
        below: list[list[Any]] = []  # for each mark, the stack under it
        memo: list[Any] = []
        place = 0
        while True:
            code = data[place]
            place += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _LONG_BINGET:
                stack.append(memo[_unsigned(data, place)[0]])
                place += 4
            elif code == _BINGET:
                stack.append(memo[data[place]])
                place += 1
            elif code == _BININT1:
                stack.append(data[place])
                place += 1
            elif code == _MARK:
                below.append(stack)
                stack = []
            elif code == _EMPTY_TUPLE:
                if data[place : place + 5] == _OBJECT:
                    stack[-1] = self.new(stack[-1])
                    memo.append(stack[-1])
                    stack.append({})
                    memo.append(stack[-1])
                    below.append(stack)
                    stack = []
                    place += len(_OBJECT)
                else:
                    stack.append(())
            elif code == _BININT2:
                stack.append(data[place] | data[place + 1] << 8)
                place += 2
            elif code == _TUPLE2:
                pair = stack[-2], stack[-1]
                stack.pop()
                if data[place : place + 5] == _SIZE:
                    stack.pop()
                    size = self.call(stack[-1], (pair,))
                    memo += pair, (pair,), size
                    stack[-1] = size
                    place += len(_SIZE)
                else:
                    stack[-1] = pair
            elif code == _BUILD:
                state = stack.pop()
                self.build(stack[-1], state)
            elif code == _SETITEMS:
                items, stack = stack, below.pop()
                _set_items(stack[-1], items)
            elif code == _BININT:
                stack.append(_signed(data, place)[0])
                place += 4
            elif code == _EMPTY_DICT:
                stack.append({})
            elif code == _NEWOBJ:
                args = stack.pop()
                _demand(type(args) is tuple and not args, "an object made from arguments")
                stack[-1] = self.new(stack[-1])
            elif code == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif code == _REDUCE:
                args = stack.pop()
                _demand(type(args) is tuple, "a call without arguments")
                stack[-1] = self.call(stack[-1], args)
            elif code == _TUPLE3:
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif code == _TUPLE:
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            elif code == _APPENDS:
                items, stack = stack, below.pop()
                _demand(type(stack[-1]) is list, "items of something that is no list")
                stack[-1].extend(items)
            elif code == _APPEND:
                item = stack.pop()
                _demand(type(stack[-1]) is list, "items of something that is no list")
                stack[-1].append(item)
            elif code == _SETITEM:
                _, *items = stack[-3:]
                del stack[-2:]
                _set_items(stack[-1], items)
            elif code == _BINPUT:
                _put(memo, data[place], stack[-1])
                place += 1
            elif code == _LONG_BINPUT:
                _put(memo, _unsigned(data, place)[0], stack[-1])
                place += 4
            elif code == _BINPERSID:
                stack[-1] = self.persistent_load(stack[-1])
            elif code == _STACK_GLOBAL:
                name, module = stack.pop(), stack.pop()
                _demand(type(name) is str and type(module) is str, "a class without a name")
                stack.append(self.find_class(module, name))
            elif code == _GLOBAL:
                middle = data.index(b"\n", place)
                end = data.index(b"\n", middle + 1)
                stack.append(self.find_class(data[place:middle].decode(), data[middle + 1 : end].decode()))
                place = end + 1
            elif code == _PROTO:
                _demand(2 <= data[place] <= pickle.HIGHEST_PROTOCOL, f"protocol {data[place]}")
                place += 1
            elif code == _FRAME:
                place += 8
            elif code == _STOP:
                return stack.pop()
            else:
                value, place = _value(code, data, place)
                stack.append(value)


def _put(memo: list[Any], number: int, value: Any) -> None:
    if number < len(memo):
        memo[number] = value
    else:
        _demand(number == len(memo), "a note of a number that is not the next one")
        memo.append(value)


def _value(code: int, data: bytes, place: int) -> tuple[Any, int]:
    """The string, number or other plain value of an opcode, and where the next one begins."""
    if code in _CONSTANTS:
        return _CONSTANTS[code], place
    if code == _EMPTY_LIST:
        return [], place
    if code == _BINFLOAT:
        return struct.unpack_from(">d", data, place)[0], place + 8
    _demand(code in _LENGTHS, f"the opcode {code}")
    begin = place + _LENGTHS[code]
    end = begin + int.from_bytes(data[place:begin], "little")
    content = data[begin:end]
    if code == _LONG1:
        return int.from_bytes(content, "little", signed=True), end
    if code in (_SHORT_BINUNICODE, _BINUNICODE):
        return content.decode("utf-8", "surrogatepass"), end
    return content.decode("ascii") if code == _SHORT_BINSTRING else content, end


_CONSTANTS = {_NONE: None, _NEWTRUE: True, _NEWFALSE: False}
_LENGTHS = {_LONG1: 1, _SHORT_BINUNICODE: 1, _BINUNICODE: 4, _SHORT_BINBYTES: 1, _BINBYTES: 4, _SHORT_BINSTRING: 1}
"""Opcode → the bytes that say how many follow."""


def _set_items(target: Any, items: list[Any]) -> None:
    """Put keys and values, in turn, into a dict; only keys whose hash is quick and not deep."""
    if not isinstance(target, dict):
        raise _refusal(f"keys of a {_name(target)}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str and not _is_name(key) and not (type(key) is MetadataIndex and _is_plain_index(key)):
            raise _refusal(f"a {_name(key)} for the key of a {_name(target)}")
        target[key] = value


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _refusal(otherwise)


def _refusal(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it is damaged, or no plain data: it has {what}")


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
            _demand(len(args) == 1 and type(args[0]) is tuple, "a size without numbers")
            for size in args[0]:
                if type(size) is not int:
                    raise _refusal("a size without numbers")
        elif function is PosixPath:
            _demand(all(type(part) is str for part in args), "a path that is no name")
        else:
            is_enum = isinstance(function, type) and issubclass(function, Enum)
            _demand(is_enum or function is torch.serialization._get_layout, f"a call of {_name(function)}")
            _demand(len(args) == 1 and _is_name(args[0]), f"a {_name(function)} that is no name or number")
        return function(*args)

    def new(self, kind: Any) -> Any:
        if not isinstance(kind, type) or kind not in self.data_classes:  # in this order: other things may not hash
            raise _refusal("an object of another class than those of data")
        return object.__new__(kind)

    def build(self, instance: Any, state: Any) -> None:
        kind = type(instance)
        if kind not in self.data_classes:
            raise _refusal("a state of something that has none")
        if self.data_classes[kind]:
            instance.__setstate__(state)
            return
        _demand(type(state) is dict, "an object without fields")
        for name in state:
            if type(name) is not str:
                raise _refusal("an object without fields")
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

    def __init__(self) -> None:
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
    outline = _Outline()
    outline.load(data)
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
