"""Which kinds of files there are, how each is damaged, and which reader gets it."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_exo.fuzzing.damage import Edit, damage_bytes, damage_inside, damage_json, damage_json_line
from megatron_exo.fuzzing.formats import (
    damage_index_fields,
    damage_manifest,
    damage_parquet,
    damage_pickle,
    damage_protobuf,
    damage_shard,
    damage_zip,
)
from megatron_exo.fuzzing.samples import STEP, UNFINISHED


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


def _read_shard(folder: Path) -> None:
    from megatron_exo.data.shard_conversion import convert_shards

    convert_shards([str(folder / "shard.bin")], str(folder / "converted"), overwrite=True)


def _read_unfinished(folder: Path) -> None:
    from megatron_exo.data.unfinished import unfinished_dataset

    with unfinished_dataset(str(folder / "unfinished"), *UNFINISHED):
        pass


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


_saved_arguments: dict[str, Any] = {}
"""Those of the sample run, once a worker has read them."""


def sample_arguments(folder: Path) -> tuple[Namespace, Any]:
    """The command line with which the sample run would go on, and its variant."""
    from megatron_exo.checkpoints.reading import read_index, read_saved_arguments
    from megatron_exo.config import ExoConfig

    if not _saved_arguments:
        _saved_arguments.update(vars(read_saved_arguments(folder / STEP, read_index(folder / STEP))))
    args = Namespace(**_saved_arguments | {"load": str(folder / "run")})
    return args, ExoConfig(**{name: getattr(args, f"exo_{name}") for name in vars(ExoConfig())})


def _read_checkpoint(folder: Path) -> None:
    from megatron_exo.resume import check_load

    check_load(*sample_arguments(folder))


def _read_tracker(folder: Path) -> None:
    from megatron_exo.resume import folder_to_load

    folder_to_load(sample_arguments(folder)[0])


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
    "shard": lambda: Kind("shard.bin", _read_shard, [damage_shard] * 3),
    "unfinished": lambda: Kind("unfinished.partial/state.json", _read_unfinished, [_JSON]),
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


def damaged(kind: Kind, valid: bytes, name: str, seed: int, number: int) -> bytes:
    """Input ``number`` of a kind."""
    rng = Random(f"{seed}/{name}/{number}")
    edit = rng.choice([damage_bytes] * max(1, len(kind.edits)) + list(kind.edits))
    return edit(valid, rng)
