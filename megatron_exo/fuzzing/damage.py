"""Damages of bytes, of JSON, and of what is inside of compressed files."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Edit = Callable[[bytes, Random], bytes]
"""A valid file's content → a damaged one's."""

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFFFFFF, -0x80000000, 0xFFFFFFFF, 1 << 40,
            (1 << 62) - 1, (1 << 63) - 1, -(1 << 63))  # fmt: skip


def damage_bytes(data: bytes, rng: Random) -> bytes:
    """One to three changes anywhere, more often near the beginning, where formats keep their sizes."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(_DAMAGES)(content, rng)
    return bytes(content)


def _place(content: bytearray, rng: Random) -> int:
    end = min(len(content), 64) if rng.random() < 0.3 else len(content)
    return rng.randrange(end) if end else 0


def _flip_bits(content: bytearray, rng: Random) -> None:
    for _ in range(rng.randint(1, 8)):
        if content:
            content[_place(content, rng)] ^= 1 << rng.randrange(8)


def _overwrite(content: bytearray, rng: Random) -> None:
    begin = _place(content, rng)
    end = min(len(content), begin + rng.randint(1, 16))
    content[begin:end] = rng.randbytes(end - begin)


def _write_number(content: bytearray, rng: Random) -> None:
    begin, width = _place(content, rng), rng.choice((1, 2, 4, 8))
    number = rng.choice((*NUMBERS, len(content), len(content) + 1, len(content) - 1))
    order: Any = rng.choice(("little", "little", "big"))
    content[begin : begin + width] = (number % (1 << 8 * width)).to_bytes(width, order)


def _cut(content: bytearray, rng: Random) -> None:
    del content[_place(content, rng) :]


def _remove(content: bytearray, rng: Random) -> None:
    begin = _place(content, rng)
    del content[begin : begin + rng.choice((1, 4, 64, 1024))]


def _insert(content: bytearray, rng: Random) -> None:
    begin = _place(content, rng)
    content[begin:begin] = rng.randbytes(rng.choice((1, 4, 64)))


def _splice(content: bytearray, rng: Random) -> None:
    source, target = _place(content, rng), _place(content, rng)
    content[target:target] = content[source : source + rng.choice((4, 64, 4096))]


def _replace_all(content: bytearray, rng: Random) -> None:
    content[:] = rng.randbytes(rng.choice((0, 1, 8, 100, 5000)))


_DAMAGES = (_flip_bits, _flip_bits, _overwrite, _write_number, _write_number, _cut, _remove, _insert, _splice,
            _replace_all)  # fmt: skip


def damage_json(data: bytes, rng: Random) -> bytes:
    """Exchange, remove or repeat something at a random place of the document."""
    root = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 2))):
        holder: Any = root
        key: Any = 0
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        action = rng.randrange(5)
        if action == 0 and holder is not root:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "../../x", "\ud800", "0"))] = holder[key]
        else:
            holder[key] = _odd_value(rng, holder[key])
    text = json.dumps(root[0])
    return text.replace('"\\ud8ff"', "[" * 200_000, 1).encode()


def _odd_value(rng: Random, value: Any) -> Any:
    odd: list[Any] = [
        None, True, [], {}, "", "x" * 10_000, "../../../etc/passwd", "/etc/passwd", "a\nb", "\x00", "\ud800",
        "\ud8ff", 0.5, -1, 1e308, float("nan"), float("inf"), 10**30, -(10**30), int("9" * 4000), *NUMBERS,
        [value], [value, value], {"x": value}, str(value)[:1000], [[]] * 1000, {str(n): n for n in range(1000)},
    ]  # fmt: skip
    return rng.choice(odd)


def damage_json_line(data: bytes, rng: Random) -> bytes:
    """Damage one of the documents in a file of JSON lines."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = damage_json(lines[place], rng) if rng.random() < 0.9 else b"9" * 5000
    return b"\n".join(lines) + b"\n"


def damage_inside(unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes], bomb: bytes) -> Edit:
    """Damage the content of a compressed file, so that it unpacks; one in fifty unpacks to 2 GiB."""

    def edit(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.02:
            return pack(b'{"text": "') + bomb * 32
        inner = rng.choice((damage_bytes, damage_json_line))
        return pack(inner(unpack(data), rng))

    return edit
