#!/usr/bin/env python
"""Damage files of every kind that this project reads, and see what the programs' own readers make of them.

  python tools/fuzz_readers.py                                      # 3000 inputs of every kind
  python tools/fuzz_readers.py --kind idx --inputs 20000 --seed 7 --keep failures

Each kind begins with a valid small file, made by the project's own writers, which is then cut, spliced, overwritten
with random bytes and telling numbers, or edited in its structure. Every input is read in a worker process with bounded
memory and time. A reader may read it, or refuse it in one line; anything else is a failure, and the exit status is 1.

Input N of a kind depends on the seed alone, so a failure can be had again.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ("read", "refused", "other exception", "crash", "time-out", "over memory")
FAILURES = OUTCOMES[2:]
_PRELOAD = [
    "pyarrow.parquet",
    "tokenizers",
    "sentencepiece",
    "zstandard",
    "megatron_exo.resume",
    "megatron_exo.data.validate",
]
_PRELOAD += ["megatron_exo.convert.reference", "megatron_exo.curves", "megatron_exo.data.readers"]
_NO_MEMORY = ("bad_alloc", "allocate memory", "not enough memory", "out of memory", "malloc of size")

Edit = Callable[[bytes, Random], bytes]
"""A valid file's content → a damaged one's."""


# -- valid files --------------------------------------------------------------------------------------------------

_TEXTS = [
    f"Document {n}: the quick brown fox jumps over {n} lazy dogs, naïvely, at {n}.{n} km/h.\n\nA second "
    f"paragraph, with words such as anchor, projection, mixture and attention; {'and so on, ' * (n % 7)}to the end."
    for n in range(60)
]


def make_samples(folder: Path) -> None:
    """Write one valid file of every kind into ``folder``; takes half a minute, most of it for a checkpoint."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    from megatron_exo.data.preprocess import preprocess
    from megatron_exo.data.tokenizer_training import train_tokenizer
    from megatron_exo.data.tokenizers import TokenizerSpec

    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(_TEXTS)).encode()
    (folder / "texts.jsonl").write_bytes(lines)
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "texts.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "texts.txt").write_text("\n\n".join(_TEXTS), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": _TEXTS, "id": range(60)}), folder / "texts.parquet")
    model = train_tokenizer([str(folder / "texts.jsonl")], str(folder / "tokenizer"), vocab_size=330)
    spec = TokenizerSpec("SentencePieceTokenizer", str(model))
    preprocess([str(folder / "texts.jsonl")], str(folder / "data"), spec)
    _make_hugging_face(folder / "huggingface")
    _make_reference(folder / "reference.pt")
    _make_run(folder)


def _make_hugging_face(folder: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))


def _make_reference(path: Path) -> None:
    import torch

    from megatron_exo.convert.mapping import ModelSizes
    from megatron_exo.convert.reference import reference_table, state_to_reference
    from megatron_exo.variants import VARIANTS

    exo = VARIANTS["e-exoformer"].exo
    sizes = ModelSizes(
        num_layers=2, hidden_size=8, num_attention_heads=2, num_query_groups=2, kv_channels=4, ffn_hidden_size=16,
        vocab_size=16, max_position_embeddings=8,
    )  # fmt: skip
    state = {row.ours: torch.ones(row.our_shape()) for row in reference_table(exo, sizes)}
    args = {"block_size": 8, "vocab_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8, "mlp_hidden_dim": 32,
            "norm_pos": "before", "act_type": "swiglu", "gated_attention_enabled": True, "decouple_anchor": True,
            "residual_mode": "elementwise", "dynamic_mixing_enabled": False,
            **{f"{word}_res_enabled": True for word in ("query", "key", "value", "gate")},
            **{f"{c}_residual_norm_enabled": True for c in "qkvg"}}  # fmt: skip
    model = state_to_reference(exo, sizes, state)
    torch.save({"model": model, "model_args": args, "step": 3, "tokens_processed": 9, "config": {}}, path)


def _make_run(folder: Path) -> None:
    words = (
        "--exo-variant e-exoformer --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
        "--eval-iters 1 --eval-interval 2 --log-interval 1 --num-workers 0 --save-interval 4 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 32 --save {folder / 'run'}"
    )
    environment = os.environ | {"MEGATRON_EXO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "megatron_exo.pretrain", *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"fuzz_readers: the sample run failed:\n{done.stderr[-2000:]}")


# -- damage -------------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFFFFFF, -0x80000000, 0xFFFFFFFF, 1 << 40,
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
    number = rng.choice((*_NUMBERS, len(content), len(content) + 1, len(content) - 1))
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
    odd = [None, True, [], {}, "", "x" * 10_000, "../../../etc/passwd", "/etc/passwd", "a\nb", "\x00", "\ud800",
           "\ud8ff", 0.5, -1, 1e308, float("nan"), float("inf"), 10**30, -(10**30), int("9" * 4000), *_NUMBERS,
           [value], [value, value], {"x": value}, str(value)[:1000], [[]] * 1000,
           {str(n): n for n in range(1000)}]  # fmt: skip
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
        [(rng.choice(_NUMBERS) % (1 << 64), documents), (sequences, rng.choice(_NUMBERS) % (1 << 64)),
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


# -- kinds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        file: what is damaged, in the folder of samples.
        read: reads what is in the folder, with what a program would call.
        edits: damages of this format, taken about as often as those of bytes.
        put: how a damaged content gets into the folder, if it does not replace ``file``.
        take: how the valid content is had, likewise.
    """

    file: str
    read: Callable[[Path], object]
    edits: Sequence[Edit] = ()
    put: Callable[[Path, bytes], None] | None = None
    take: Callable[[Path], bytes] | None = None


def _read_dataset(folder: Path) -> None:
    from megatron_exo.data.validate import check_dataset

    check_dataset(folder / "data", vocab_size=330, eod=2, scan_tokens=True)


def _read_sidecar(folder: Path) -> None:
    from megatron_exo.data.validate import check_sidecar

    check_sidecar(folder / "data", "SentencePieceTokenizer", folder / "tokenizer.model", 330)


def _read_documents(name: str, text_split: str = "file") -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from megatron_exo.data.readers import DocumentReader

        for _ in DocumentReader([str(folder / name)], text_split=text_split):
            pass

    return read


def _read_tokenizer(kind: str, name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from megatron_exo.data.tokenizers import TokenizerSpec, fingerprint

        fingerprint(TokenizerSpec(kind, str(folder / name)).load())

    return read


def _read_reference(folder: Path) -> None:
    from megatron_exo.convert.reference import read_reference_checkpoint

    read_reference_checkpoint(folder / "reference.pt")


def _read_metrics(folder: Path) -> None:
    from megatron_exo.curves import AXES, CurveError, read_run, summary

    run = read_run(folder / "run" / "logs")
    summary(run)
    for x in AXES:
        try:
            for record in run.train + run.evaluations:
                run.position(record, x)
        except CurveError:
            pass


STEP = "run/iter_0000004"


_saved_arguments: dict[str, Any] = {}
"""Those of the sample run, once a worker has read them."""


def _arguments(folder: Path) -> tuple[Namespace, Any]:
    """The command line with which the sample run would go on, and its variant."""
    from megatron_exo.checkpoints.reading import read_index, read_saved_arguments
    from megatron_exo.config import ExoConfig

    if not _saved_arguments:
        _saved_arguments.update(vars(read_saved_arguments(folder / STEP, read_index(folder / STEP))))
    args = Namespace(**_saved_arguments | {"load": str(folder / "run")})
    return args, ExoConfig(**{name: getattr(args, f"exo_{name}") for name in vars(ExoConfig())})


def _read_checkpoint(folder: Path) -> None:
    from megatron_exo.resume import check_load

    check_load(*_arguments(folder))


def _read_tracker(folder: Path) -> None:
    from megatron_exo.resume import folder_to_load

    folder_to_load(_arguments(folder)[0])


def _shared_part(folder: Path) -> tuple[Any, Any]:
    from megatron_exo.checkpoints.reading import read_index

    index = read_index(folder / STEP)
    return index, next(part for key, part in index.storage_data.items() if key.fqn.startswith("common_state"))


def _take_shared_state(folder: Path) -> bytes:
    _, part = _shared_part(folder)
    return (folder / STEP / part.relative_path).read_bytes()[part.offset : part.offset + part.length]


def _put_shared_state(folder: Path, content: bytes) -> None:
    """Behind everything else in its file, with an index that says so."""
    original = folder / "index.original"
    if not original.exists():
        shutil.copyfile(folder / STEP / ".metadata", original)
        original.with_suffix(".length").write_text(
            str(os.path.getsize(folder / STEP / _shared_part(folder)[1].relative_path))
        )
    shutil.copyfile(original, folder / STEP / ".metadata")
    end = int(original.with_suffix(".length").read_text())
    index, part = _shared_part(folder)
    with (folder / STEP / part.relative_path).open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(content)
    part.offset, part.length = end, len(content)
    (folder / STEP / ".metadata").write_bytes(pickle.dumps(index))


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # else it would depend on the time


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def _unzstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.decompress(data)


_ZEROS = 64 << 20
_JSON = damage_json
KINDS: dict[str, Callable[[], Kind]] = {
    "idx": lambda: Kind("data.idx", _read_dataset, [damage_index_fields]),
    "bin": lambda: Kind("data.bin", _read_dataset),
    "sidecar": lambda: Kind("data.json", _read_sidecar, [_JSON, _JSON]),
    "jsonl": lambda: Kind("texts.jsonl", _read_documents("texts.jsonl"), [damage_json_line]),
    "txt": lambda: Kind("texts.txt", _read_documents("texts.txt", "blank-lines")),
    "gz": lambda: Kind(
        "texts.jsonl.gz",
        _read_documents("texts.jsonl.gz"),
        [damage_inside(gzip.decompress, _gzip, _gzip(bytes(_ZEROS)))],
    ),
    "zst": lambda: Kind(
        "texts.jsonl.zst", _read_documents("texts.jsonl.zst"), [damage_inside(_unzstd, _zstd, _zstd(bytes(_ZEROS)))]
    ),
    "parquet": lambda: Kind("texts.parquet", _read_documents("texts.parquet"), [damage_parquet]),
    "sentencepiece": lambda: Kind(
        "tokenizer.model", _read_tokenizer("SentencePieceTokenizer", "tokenizer.model"), [damage_protobuf] * 2
    ),
    "tokenizer-json": lambda: Kind(
        "huggingface/tokenizer.json", _read_tokenizer("HuggingFaceTokenizer", "huggingface"), [_JSON] * 3
    ),
    "tokenizer-config": lambda: Kind(
        "huggingface/tokenizer_config.json", _read_tokenizer("HuggingFaceTokenizer", "huggingface"), [_JSON]
    ),
    "gpt2-vocab": lambda: Kind("huggingface/vocab.json", _read_tokenizer("GPT2BPETokenizer", "huggingface"), [_JSON]),
    "gpt2-merges": lambda: Kind("huggingface/merges.txt", _read_tokenizer("GPT2BPETokenizer", "huggingface")),
    "reference": lambda: Kind("reference.pt", _read_reference, [damage_zip] * 3),
    "index": lambda: Kind(f"{STEP}/.metadata", _read_checkpoint, [damage_pickle]),
    "shared-state": lambda: Kind(
        f"{STEP}/.metadata", _read_checkpoint, [damage_zip] * 3, _put_shared_state, _take_shared_state
    ),
    "manifest": lambda: Kind(f"{STEP}/exo_manifest.json", _read_checkpoint, [damage_manifest] * 3),
    "tracker": lambda: Kind("run/latest_checkpointed_iteration.txt", _read_tracker),
    "metrics": lambda: Kind("run/logs/metrics.jsonl", _read_metrics, [damage_json_line] * 2),
}
"""Name → what makes the kind."""


# -- workers ------------------------------------------------------------------------------------------------------


def damaged(kind: Kind, valid: bytes, name: str, seed: int, number: int) -> bytes:
    """Input ``number`` of a kind."""
    rng = Random(f"{seed}/{name}/{number}")
    edit = rng.choice([damage_bytes] * max(1, len(kind.edits)) + list(kind.edits))
    return edit(valid, rng)


def attempt(read: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    """The outcome of one reading, and what it said."""
    from megatron_exo.errors import UserError

    try:
        read(folder)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        if _lacked_memory(error):
            return "over memory", said
        if not isinstance(error, UserError):
            return "other exception", said
        is_line = 0 < len(str(error)) < 2000 and "\n" not in str(error)
        return ("refused", said) if is_line else ("other exception", f"not one line: {said}")
    return "read", ""


def _lacked_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _work(
    name: str, samples: Path, folder: Path, seed: int, first: int, end: int, memory: int, pipe: Connection
) -> None:
    """Read inputs ``first`` to ``end`` and send the outcome of each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    for number in (1, 2):  # libraries in C++ and Rust print
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(samples, folder)
    kind = KINDS[name]()
    _arguments(folder)
    if name != "manifest":  # its checksums would refuse what the readers behind it are to be tried with
        (folder / STEP / "exo_manifest.json").unlink(missing_ok=True)
    valid = kind.take(folder) if kind.take else (folder / kind.file).read_bytes()
    outcome, said = attempt(kind.read, folder)
    pipe.send(("valid", outcome, said, 0))
    baseline = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (baseline + memory, resource.RLIM_INFINITY))
    for number in range(first, end):
        content = damaged(kind, valid, name, seed, number)
        if kind.put is not None:
            kind.put(folder, content)
        else:
            (folder / kind.file).write_bytes(content)
        outcome, said = attempt(kind.read, folder)
        pipe.send((number, outcome, said[:300], _status("VmPeak") - baseline))


@dataclass
class Result:
    """What became of the inputs of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Number of the input, outcome, what was said."""
    most_memory: int = 0
    """Bytes of address space beyond what the worker had at its start."""
    seconds: float = 0.0


def fuzz(name: str, samples: Path, *, inputs: int, seed: int, memory: int, time_out: float) -> Result:
    """Read ``inputs`` damaged files of a kind.

    Args:
        samples: what :func:`make_samples` wrote.
        memory: bytes of address space that a worker may take beyond what it begins with.
        time_out: seconds for one input.

    Raises:
        RuntimeError: the valid file is not read.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    result, began, next_one = Result(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        while next_one < inputs:
            receiver, sender = context.Pipe(duplex=False)
            arguments = (name, samples, Path(scratch) / "samples", seed, next_one, inputs, memory, sender)
            worker = context.Process(target=_work, args=arguments)
            worker.start()
            sender.close()
            ready = False
            while next_one < inputs:
                try:
                    if not receiver.poll(time_out if ready else 120.0):
                        ended = ("time-out", f"longer than {time_out:g} s")
                        break
                    number, outcome, said, extra = receiver.recv()
                except EOFError:
                    worker.join()
                    if (worker.exitcode or 0) > 0:
                        raise RuntimeError(f"{name}: the worker itself failed before input {next_one}") from None
                    ended = ("crash", f"signal {-(worker.exitcode or 0)}")
                    break
                if number == "valid":
                    if outcome != "read":
                        raise RuntimeError(f"{name}: the valid file is not read: {outcome}, {said}")
                    ready = True
                    continue
                result.counts[outcome] += 1
                result.most_memory = max(result.most_memory, extra)
                if outcome in FAILURES:
                    result.failures.append((number, outcome, said))
                next_one += 1
                _show_progress(name, next_one, inputs, time.monotonic() - began)
            else:
                ended = None
            if ended is not None:
                worker.kill()
                if not ready:
                    raise RuntimeError(f"{name}: no worker gets ready: {ended[1]}")
                result.counts[ended[0]] += 1
                result.failures.append((next_one, *ended))
                next_one += 1
            worker.join()
            receiver.close()
    result.seconds = time.monotonic() - began
    return result


def _show_progress(name: str, done: int, inputs: int, seconds: float) -> None:
    if sys.stderr.isatty() or done % 1000 == 0:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{name}: {done}/{inputs}, {done / seconds:.0f}/s  ", end=end, file=sys.stderr, flush=True)


# -- the program --------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of files (default: all)")
    parser.add_argument("--inputs", type=int, default=3000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=1024, metavar="MiB", help="of a worker (default: %(default)s)")
    parser.add_argument("--time-out", type=float, default=10.0, metavar="S", help="of an input (default: %(default)s)")
    parser.add_argument(
        "--samples", type=Path, metavar="DIR", help="valid files of an earlier call, or where to put them"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the inputs that failed there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and failures there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as scratch:
        samples = args.samples or Path(scratch) / "samples"
        if not (samples / STEP).is_dir():
            make_samples(samples)
        limits = {"memory": args.memory << 20, "time_out": args.time_out}
        results = {}
        print(_aligned(["kind", *OUTCOMES, "most memory", "inputs/s"]))
        for name in args.kind:
            results[name] = fuzz(name, samples, inputs=args.inputs, seed=args.seed, **limits)
            print(_row(name, results[name]), flush=True)
            if args.keep is not None:
                _keep(results[name], name, samples, args.seed, args.keep)
    if args.json is not None:
        args.json.write_text(json.dumps({name: vars(result) for name, result in results.items()}, indent=1) + "\n")
    return 1 if any(result.failures for result in results.values()) else 0


def _keep(result: Result, name: str, samples: Path, seed: int, folder: Path) -> None:
    kind = KINDS[name]()
    valid = kind.take(samples) if kind.take else (samples / kind.file).read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    for number, _, _ in result.failures:
        suffix = Path(kind.file).suffix or Path(kind.file).name
        (folder / f"{name}-{seed}-{number}{suffix}").write_bytes(damaged(kind, valid, name, seed, number))


def _row(name: str, result: Result) -> str:
    """The counts of a kind, and below them what went wrong."""
    counts = [f"{result.counts[outcome]:,}" for outcome in OUTCOMES]
    rate = sum(result.counts.values()) / result.seconds
    lines = [_aligned([name, *counts, f"{result.most_memory >> 20} MiB", f"{rate:.0f}"])]
    kinds = Counter((outcome, said) for _, outcome, said in result.failures)
    for (outcome, said), count in kinds.most_common(20):
        number = next(number for number, *what in result.failures if what == [outcome, said])
        lines.append(f"    input {number}, {count} time(s): {outcome}: {' '.join(said.split())[:200]}")
    return "\n".join(lines)


def _aligned(cells: Sequence[str]) -> str:
    return f"{cells[0]:<16}" + "".join(f"{cell:>17}" for cell in cells[1:])


if __name__ == "__main__":
    sys.exit(main())
