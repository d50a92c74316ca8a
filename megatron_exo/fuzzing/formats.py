"""Damages of one format each, behind what would refuse damaged bytes: checksums, lengths and signatures stay right."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from random import Random
from typing import Any

from megatron_exo.fuzzing.damage import NUMBERS, damage_bytes, damage_json


def damage_zip(data: bytes, rng: Random) -> bytes:
    """Damage one file of a ``torch.save`` archive, and write the archive anew with checksums that are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))
    name = pickled if rng.random() < 0.8 else rng.choice(list(entries))
    damage = damage_pickle if name == pickled and rng.random() < 0.5 else damage_bytes
    entries[name] = damage(entries[name], rng)
    how = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        for each, content in entries.items():
            archive.writestr(zipfile.ZipInfo(each), content, how)
    return damage_bytes(packed.getvalue(), rng) if rng.random() < 0.05 else packed.getvalue()


def damage_pickle(data: bytes, rng: Random) -> bytes:
    """Put opcodes into a pickle that ask for code, for much memory, or for deep or long work."""
    huge = rng.choice((1 << 20, 1 << 28, (1 << 31) - 1, 1 << 40, (1 << 62) - 1))
    depth = rng.choice((10, 1000, 300_000))
    wide = b"".join(b"q\x01h\x01h\x01\x86" for _ in range(60))  # pairs of pairs: 2^60 leaves
    numbers = b"\x8a\x09" + min(huge, 1 << 62).to_bytes(9, "little")
    snippets = [
        b"cposix\nsystem\n(X\x04\x00\x00\x00truetR",
        b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R",
        b"cbuiltins\nbytearray\n" + numbers + b"\x85R",
        b"cnumpy\nndarray\n" + numbers + b"\x85\x85R",
        b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + numbers + b"\x85C\x01b\x87R",
        b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n",
        b"ctorch\nSize\n" + numbers + b"\x85\x85R",
        b"ccollections\nOrderedDict\n]N\x85" + b"\x85" * depth + b"N\x86a\x85R",
        b"}N" + b"\x85" * depth + b"Ns",
        b"}N\x85" + wide + b"Ns",
        b"N" + b"\x85" * depth,
        b"Nr" + min(huge, 0xFFFFFFFF).to_bytes(4, "little"),
        b"X" + min(huge, 0xFFFFFFFF).to_bytes(4, "little"),
        b"\x8d" + huge.to_bytes(8, "little"),
        b"\x8e" + huge.to_bytes(8, "little"),
        b"\x95" + huge.to_bytes(8, "little"),
        b"\x96" + huge.to_bytes(8, "little"),
        b"\x8b" + min(huge, (1 << 31) - 1).to_bytes(4, "little"),
        b"I" + b"9" * 5000 + b"\n",
        b"(" * depth,
        b"]" * depth,
        b"\x82\x01",
        b"Px\n",
        numbers,
    ]
    snippet, place = rng.choice(snippets), rng.choice((2, len(data) - 1, rng.randrange(2, len(data))))
    rest = rng.choice((data[place:], b"0" + data[place:], b"."))
    return data[:place] + snippet + rest


def damage_shard(data: bytes, rng: Random) -> bytes:
    """Write telling numbers into the header of a shard, or damage its tokens and count them anew."""
    header, tokens = bytearray(data[:1024]), data[1024:]
    if rng.random() < 0.5:
        number = rng.choice((*NUMBERS, len(tokens) // 2 - 1, len(tokens) // 2 + 1))
        struct.pack_into("<I", header, 4 * rng.choice((0, 1, 2, 2, 3)), number % (1 << 32))
    else:
        tokens = damage_bytes(tokens, rng)
        struct.pack_into("<i", header, 8, len(tokens) // 2)
    return bytes(header) + tokens


def damage_protobuf(data: bytes, rng: Random) -> bytes:
    """Damage, remove, repeat or move fields of the outermost message, whose lengths stay right."""
    fields, place = [], 0
    while place < len(data):
        tag = data[place]
        length, begin = 0, place + 1
        for shift in range(0, 35, 7):
            length |= (data[begin] & 0x7F) << shift
            begin += 1
            if data[begin - 1] < 0x80:
                break
        fields.append((tag, data[begin : begin + length]))
        place = begin + length
    for _ in range(rng.choice((1, 2, 5))):
        index = rng.randrange(len(fields)) if rng.random() < 0.6 else len(fields) - 1 - rng.randrange(3)
        tag, content = fields[index]
        action = rng.randrange(4)
        if action == 0 and len(fields) > 4:
            del fields[index]
        elif action == 1:
            fields.insert(rng.randrange(len(fields)), (tag, content))
        else:
            fields[index] = (tag, damage_bytes(content, rng))
    return b"".join(bytes([tag]) + _varint(len(content)) + content for tag, content in fields)


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def damage_index_fields(data: bytes, rng: Random) -> bytes:
    """Change the header of a Megatron ``.idx``, or make its counts agree with another size."""
    magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", data[:34])
    sequences, documents = rng.choice(
        [(rng.choice(NUMBERS) % (1 << 64), documents), (sequences, rng.choice(NUMBERS) % (1 << 64)),
         (sequences - 2, documents + 3), (sequences + 2, documents - 3), (0, documents), (sequences, 0)]
    )  # fmt: skip
    code = rng.choice((code, code, rng.randrange(256)))
    return struct.pack("<9sQBQQ", magic, version, code, sequences, documents) + data[34:]


def damage_parquet(data: bytes, rng: Random) -> bytes:
    """A whole Parquet file whose column is something else, or one whose bytes are damaged."""
    if rng.random() < 0.8:
        return damage_bytes(data, rng)
    import pyarrow
    import pyarrow.parquet

    columns = [
        [1, 2],
        [None, None],
        [b"\xff", b"x"],
        [[1], []],
        [{"a": 1}, None],
        ["x", None],
        [True, False],
        [0.5, 1.5],
    ]
    packed = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({rng.choice(("text", "x")): rng.choice(columns)}), packed)
    return packed.getvalue()


def damage_manifest(data: bytes, rng: Random) -> bytes:
    """Damage a checkpoint's manifest and sign it anew."""
    from megatron_exo.checkpoints.integrity import digest_of

    damaged_text = damage_json(data, rng)
    try:
        document = json.loads(damaged_text)
    except (ValueError, RecursionError):
        return damaged_text
    if isinstance(document, dict):
        document.pop("sha256", None)
        document = {"sha256": digest_of(document), **document}
    return json.dumps(document).encode()


def damage_safetensors(data: bytes, rng: Random) -> bytes:
    """Damage the header, whose length stays right, or say another length; now and then give a tensor twice."""
    end = 8 + int.from_bytes(data[:8], "little")
    header, body = data[8:end], data[end:]
    action = rng.randrange(10)
    if action == 0:
        length = rng.choice((*NUMBERS, len(header) - 1, len(header) + 8, len(data), len(data) - 8))
        return (length % (1 << 64)).to_bytes(8, "little") + data[8:]
    if action <= 4:
        header = damage_json(header, rng)
    else:
        entries = json.loads(header)
        name, other = rng.sample([name for name in entries if name != "__metadata__"], 2)
        entry = entries[name]
        if action == 5:
            place, number = rng.randrange(2), rng.choice((*NUMBERS, len(body), len(body) + 4, -4))
            entry["data_offsets"][place] = number
        elif action == 6:
            shape = entry["shape"]
            odd = [[], [0], [-1], [1 << 62, 4], shape[::-1], [*shape, 1], [1] * 100_000, [0, 1 << 62]]
            entry["shape"] = rng.choice(odd)
        elif action == 7:
            entry["dtype"] = rng.choice(("F64", "F16", "I64", "BOOL", "F8_E4M3", "F4", "C64", "x", "", "U8"))
        elif action == 8:
            entries[name], entries[other] = entries[other], entries[name]
        else:
            entries[rng.choice((other, f"{name}.x", "", "x" * 10_000, "a\nb"))] = entry
        header = json.dumps(entries).encode()
        if rng.random() < 0.2:  # the same name twice
            header = json.dumps({name: entry}).encode()[:-1] + b"," + header[1:]
    return len(header).to_bytes(8, "little") + header + body


def damage_chunks(data: bytes, rng: Random) -> bytes:
    """Let a checkpoint's index say something else of a tensor of the model, or of where its bytes are."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_exo.plain_pickle import read_index_pickle

    index = read_index_pickle(data)
    described, stored = index.state_dict_metadata, index.storage_data
    parts = ("decoder.", "embedding.", "output_layer.")
    names = [name for name in described if name.startswith(parts)]
    tensors = [name for name in names if isinstance(described[name], TensorStorageMetadata)]
    name = rng.choice(tensors)
    kind: Any = described[name]
    key, place = next((key, place) for key, place in stored.items() if key.fqn == name)
    chunk = rng.choice(kind.chunks)
    numbers = (*NUMBERS, *kind.size)
    action = rng.randrange(10)
    if action == 0:
        kind.size = torch.Size(rng.choice(numbers) if rng.random() < 0.5 else size for size in kind.size)
    elif action == 1:
        kind.size = chunk.sizes = torch.Size([*kind.size, rng.choice((1, 2, 1 << 40))])
    elif action == 2:
        chunk.sizes = torch.Size(rng.choice(numbers) for _ in chunk.sizes)
    elif action == 3:
        chunk.offsets = torch.Size(rng.choice(numbers) for _ in chunk.offsets)
    elif action == 4:
        kind.chunks = rng.choice(([], kind.chunks * 2, kind.chunks * 300, [None], None))
    elif action == 5:
        kind.properties.dtype = rng.choice((torch.float64, torch.int8, torch.bfloat16, torch.complex64, None, "x"))
    elif action == 6:
        place.offset = rng.choice(NUMBERS)
    elif action == 7:
        place.length = rng.choice((*NUMBERS, place.length - 1, place.length + 1))
    elif action == 8:
        stored[key] = stored[rng.choice(list(stored))]
    else:
        described[rng.choice((*tensors, "decoder.x", "decoder.layers.9.x", "x"))] = described.pop(name)
    return pickle.dumps(index)


def damage_toml(data: bytes, rng: Random) -> bytes:
    """Give a key of a file without tables another name, or a value that TOML knows and the key may not."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    key, _, value = lines[place].partition(b" = ")
    deep = rng.choice((100, 5000))
    values = [
        b"true", b"[]", b"[[1], 2]", b"{}", b"{a = 1}", b"1979-05-27", b"1979-05-27T07:32:00Z", b"nan", b"1e400", b"-1",
        b"9" * 5000, b"0x" + b"f" * 5000, b'""', b'"a\\nb"', b'"\\u0000"', b'"{x}"', b'"{' + b"x" * 9000 + b'}"',
        b'"{seed}{seed_}{}{{"', b"'" + b"x" * 10_000 + b"'", b"[" * deep, b"[" * deep + b"]" * deep, b"'\xff'",
        b"[" + value + b"]", b'["--load", "x"]', b'"""\na\nb"""',
    ]  # fmt: skip
    keys = [b"x", b"--seed", key.replace(b"-", b"_"), b'"a\\nb"', b"x" * 10_000, b"a.b", b".".join([b"a"] * deep),
            b'""', b"run-file", key + key, b"nnodes", b"seed"]  # fmt: skip
    action = rng.randrange(5)
    if action <= 2:
        lines[place] = key + b" = " + rng.choice(values)
    elif action == 3:
        lines[place] = rng.choice(keys) + b" = " + value
    else:
        lines.insert(place, rng.choice((b"[x]", b"[[x]]", b"[" + b"x" * 9000 + b"]", b'["a\\nb"]', lines[-1])))
    return b"\n".join(lines) + b"\n"
