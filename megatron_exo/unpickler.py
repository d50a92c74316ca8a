"""Follows pickles opcode by opcode: what stands in one, and nothing that it would have run.

The ``pickle`` module would not do. Its unpickler in C hashes any key, and its memo grows with a number in the file and
not with the file; the one in Python takes ten times longer than what is here, and the index of a large run has tens of
millions of opcodes.
"""

from __future__ import annotations

import abc
import pickle
import struct
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

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
LARGEST_NUMBER = 1 << 20
"""What a call of anything but a tensor may be given: some classes allocate as many bytes or items."""


class Unpickler(abc.ABC):
    """Everything but the making of objects: subclasses say what those are."""

    @abc.abstractmethod
    def find_class(self, module: str, name: str) -> Any:
        """What stands for a class or function."""

    @abc.abstractmethod
    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What ``function(*args)`` stands for."""

    @abc.abstractmethod
    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        """What stands for a new object of a class, before :meth:`build` fills it."""

    @abc.abstractmethod
    def build(self, instance: Any, state: Any) -> None:
        """Fill an object."""

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
                    stack[-1] = self.new(stack[-1], ())
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
                demand(type(args) is tuple, "an object without arguments")
                stack[-1] = self.new(stack[-1], args)
            elif code == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif code == _REDUCE:
                args = stack.pop()
                demand(type(args) is tuple, "a call without arguments")
                stack[-1] = self.call(stack[-1], args)
            elif code == _TUPLE3:
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif code == _TUPLE:
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            elif code == _APPENDS:
                items, stack = stack, below.pop()
                demand(type(stack[-1]) is list, "items of something that is no list")
                stack[-1].extend(items)
            elif code == _APPEND:
                item = stack.pop()
                demand(type(stack[-1]) is list, "items of something that is no list")
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
                demand(type(name) is str and type(module) is str, "a class without a name")
                stack.append(self.find_class(module, name))
            elif code == _GLOBAL:
                middle = data.index(b"\n", place)
                end = data.index(b"\n", middle + 1)
                stack.append(self.find_class(data[place:middle].decode(), data[middle + 1 : end].decode()))
                place = end + 1
            elif code == _PROTO:
                demand(2 <= data[place] <= pickle.HIGHEST_PROTOCOL, f"protocol {data[place]}")
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
        demand(number == len(memo), "a note of a number that is not the next one")
        memo.append(value)


def _value(code: int, data: bytes, place: int) -> tuple[Any, int]:
    """The string, number or other plain value of an opcode, and where the next one begins."""
    if code in _CONSTANTS:
        return _CONSTANTS[code], place
    if code == _EMPTY_LIST:
        return [], place
    if code == _BINFLOAT:
        return struct.unpack_from(">d", data, place)[0], place + 8
    demand(code in _LENGTHS, f"the opcode {code}")
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
        raise refusal(f"keys of a {kind_of(target)}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str and not is_name(key) and not (type(key) is MetadataIndex and _is_plain_index(key)):
            raise refusal(f"a {kind_of(key)} for the key of a {kind_of(target)}")
        target[key] = value


def demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise refusal(otherwise)


def refusal(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it is damaged, or no plain data: it has {what}")


def is_name(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and abs(value) < LARGEST_NUMBER)


def kind_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _is_plain_index(index: MetadataIndex) -> bool:
    """Whether hashing it hashes nothing but names and numbers."""
    offset, position = index.offset, index.index
    return (
        type(index.fqn) is str
        and (offset is None or type(offset) is torch.Size)
        and (position is None or type(position) is int)
    )
