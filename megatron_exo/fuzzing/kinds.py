"""Which kinds of files there are, how each is damaged, and which reader gets it."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from megatron_exo.fuzzing.damage import Edit, damage_bytes, damage_inside, damage_json, damage_json_line
from megatron_exo.fuzzing.formats import (
    damage_chunks,
    damage_index_fields,
    damage_manifest,
    damage_parquet,
    damage_pickle,
    damage_protobuf,
    damage_safetensors,
    damage_shard,
    damage_toml,
    damage_zip,
)
from megatron_exo.fuzzing.samples import CONVERSION, STEP, UNFINISHED


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        file: what is damaged, in the folder of samples.
        read: reads what is in the folder, with what a program would call.
        edits: damages of this format, taken about as often as those of bytes.
        put: how a damaged content gets into the folder, if it does not replace ``file``.
        take: how the valid content is had, likewise.
        has_manifest: whether the checkpoint keeps its manifest, whose sizes and checksums would refuse what the readers
            behind it are to be tried with.
    """

    file: str
    read: Callable[[Path], object]
    edits: Sequence[Edit] = ()
    put: Callable[[Path, bytes], None] | None = None
    take: Callable[[Path], bytes] | None = None
    has_manifest: bool = False


def _read_dataset(folder: Path) -> None:
    from megatron_exo.data.validate import check_dataset

    check_dataset(folder / "data", vocab_size=330, eod=2, scan_tokens=True)


def _read_data_arguments(option: str, name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from megatron_exo.data.provider import check_data_arguments

        args, _ = sample_arguments(folder)
        options = {"mock_data": False, "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "tokenizer.model"}
        tokenizer = Namespace(vocab_size=330, eod=2)
        with chdir(folder):
            check_data_arguments(Namespace(**vars(args) | options | {"split": "8,1,1", option: name}), tokenizer)

    return read


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
    from megatron_exo.checkpoints.inspection import checkpoint_at
    from megatron_exo.resume import folder_to_load

    folder_to_load(sample_arguments(folder)[0])
    checkpoint_at(folder / "run")


def _part_of(folder: Path, name: str) -> tuple[Any, Any]:
    """A checkpoint's index, and where in its files the first part is whose name begins so."""
    from megatron_exo.checkpoints.reading import read_index

    index = read_index(folder / STEP)
    return index, next(part for key, part in index.storage_data.items() if key.fqn.startswith(name))


def _take_part(name: str) -> Callable[[Path], bytes]:
    def take(folder: Path) -> bytes:
        _, part = _part_of(folder, name)
        return (folder / STEP / part.relative_path).read_bytes()[part.offset : part.offset + part.length]

    return take


def _put_part(name: str) -> Callable[[Path, bytes], None]:
    def put(folder: Path, content: bytes) -> None:
        """Behind everything else in its file, with an index that says so."""
        original = folder / "index.original"
        if not original.exists():
            shutil.copyfile(folder / STEP / ".metadata", original)
            original.with_suffix(".length").write_text(
                str(os.path.getsize(folder / STEP / _part_of(folder, name)[1].relative_path))
            )
        shutil.copyfile(original, folder / STEP / ".metadata")
        end = int(original.with_suffix(".length").read_text())
        index, part = _part_of(folder, name)
        with (folder / STEP / part.relative_path).open("r+b") as file:
            file.truncate(end)
            file.seek(end)
            file.write(content)
        part.offset, part.length = end, len(content)
        (folder / STEP / ".metadata").write_bytes(pickle.dumps(index))

    return put


def _read_files_of_ranks(folder: Path) -> None:
    from megatron_exo.checkpoints.reading import check_files_of_ranks

    check_files_of_ranks(folder / "ranks")


def _read_tensor(folder: Path) -> None:
    from megatron_exo.convert.checkpoint_tensors import CheckpointTensors

    CheckpointTensors(folder / STEP).read(_TENSOR)


def _read_tensors(folder: Path) -> None:
    """As a conversion does."""
    from megatron_exo.convert.exporting import groups_of, source_of

    source = source_of(folder / STEP, checksums=False)
    for group in groups_of(source, None):
        source.tensors.read(group.row.ours)


def _read_description(folder: Path) -> None:
    """As programs do that show, generate from or convert a checkpoint."""
    from megatron_exo.checkpoints.inspection import checkpoint_at, format_description, read_description
    from megatron_exo.convert.exporting import source_of
    from megatron_exo.convert.model_card import model_card
    from megatron_exo.trained_model import model_arguments

    described = read_description(checkpoint_at(folder / STEP))
    format_description(folder / STEP, described)
    model_arguments(folder / STEP, described)
    source = source_of(folder / STEP, checksums=False)
    model_card(source.exo, source.sizes, "float32", 1, source.come_from, [])


def _read_hugging_face(folder: Path) -> None:
    """As ``tools/convert_from_hf.py``."""
    from megatron_exo.convert.importing import architecture_arguments, from_hugging_face

    model = from_hugging_face(folder / "model")
    architecture_arguments(model.exo, model.sizes)
    for name in model.state:
        model.state[name]


def _load_model(folder: Path) -> None:
    """As ``tools/generate.py``."""
    from transformers.utils.logging import disable_progress_bar

    from megatron_exo.hf.generating import load

    disable_progress_bar()
    load(folder / "model", needs_tokenizer=False)


def _load_tokenizer(folder: Path) -> None:
    from megatron_exo.hf.loading import load_tokenizer

    load_tokenizer(folder / "model")


def _convert_tokenizer(kind: str, copies: str, *names: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from megatron_exo.convert.hf_tokenizer import write_tokenizer

        described = {"type": kind, "files": {name: {} for name in names}}
        with TemporaryDirectory() as out:
            write_tokenizer(described, folder / copies, Path(out), max_length=8)

    return read


def _put_conversion(folder: Path, content: bytes) -> None:
    """Reading it goes on with the conversion, to its end."""
    for name in ("conversion", "conversion.partial"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "conversion.partial").mkdir()
    (folder / "conversion.partial" / "weights").write_bytes(b"weights")
    (folder / _STATE).write_bytes(content)


def _read_conversion(folder: Path) -> None:
    from megatron_exo.convert.unfinished import unfinished

    with unfinished(folder / "conversion", CONVERSION) as conversion:
        conversion.has("weights")
        conversion.record()


def _read_batch(folder: Path) -> None:
    from megatron_exo.replay import read_batch

    read_batch(folder / "batch.pt")


def _read_tokens(folder: Path) -> None:
    from megatron_exo.convert.reference import read_tokens

    read_tokens(folder / "tokens.pt")


def _read_sample_log(folder: Path) -> None:
    from megatron_exo.data.sample_log import read_sample_log

    read_sample_log(folder)


def _read_prompts(folder: Path) -> None:
    from megatron_exo.generation import read_prompts

    read_prompts(folder / "prompts.txt")


@cache
def _options() -> list[Action]:
    """Every option of training's command line."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_exo.arguments import add_exo_arguments

    sys.argv[1:] = []
    return add_exo_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))._actions


def _read_run_file(folder: Path) -> None:
    from megatron_exo.run_file import launcher_words, training_words

    launcher_words(folder / "run.toml")
    training_words(folder / "run.toml", _options(), [])


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # else it would depend on the time


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def _unzstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.decompress(data)


_ZEROS = 64 << 20
_STATE = "conversion.partial/.conversion.json"
_TENSOR = "decoder.final_layernorm.weight"
_WEIGHTS = "model/model-00001-of-00002.safetensors"
_JSON = damage_json
KINDS: dict[str, Callable[[], Kind]] = {
    "idx": lambda: Kind("data.idx", _read_dataset, [damage_index_fields]),
    "bin": lambda: Kind("data.bin", _read_dataset),
    "data-args": lambda: Kind("data.args", _read_data_arguments("data_args_path", "data.args")),
    "split-args": lambda: Kind(
        "data.json.args", _read_data_arguments("per_split_data_args_path", "data.json.args"), [_JSON] * 4
    ),
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
        f"{STEP}/.metadata", _read_checkpoint, [damage_zip] * 3, _put_part("common_state"), _take_part("common_state")
    ),
    "rank-file": lambda: Kind("ranks/mp_rank_00/model_optim_rng.pt", _read_files_of_ranks, [damage_zip] * 3),
    "tensor": lambda: Kind(
        f"{STEP}/.metadata", _read_tensor, [damage_zip] * 3, _put_part(_TENSOR), _take_part(_TENSOR)
    ),
    "chunks": lambda: Kind(f"{STEP}/.metadata", _read_tensors, [damage_chunks] * 3),
    "manifest": lambda: Kind(f"{STEP}/exo_manifest.json", _read_checkpoint, [damage_manifest] * 3, has_manifest=True),
    "description": lambda: Kind(
        f"{STEP}/exo_manifest.json", _read_description, [damage_manifest] * 6, has_manifest=True
    ),
    "tracker": lambda: Kind("run/latest_checkpointed_iteration.txt", _read_tracker),
    "metrics": lambda: Kind("run/logs/metrics.jsonl", _read_metrics, [damage_json_line] * 2),
    "sample-log": lambda: Kind("samples-dp0.jsonl", _read_sample_log, [damage_json_line] * 2),
    "safetensors": lambda: Kind(_WEIGHTS, _read_hugging_face, [damage_safetensors] * 4),
    "hf-config": lambda: Kind("model/config.json", _read_hugging_face, [_JSON] * 4),
    "hf-index": lambda: Kind("model/model.safetensors.index.json", _read_hugging_face, [_JSON] * 4),
    "config-loaded": lambda: Kind("model/config.json", _load_model, [_JSON] * 6),
    "weights-loaded": lambda: Kind(_WEIGHTS, _load_model, [damage_safetensors] * 4),
    "generation": lambda: Kind("model/generation_config.json", _load_model, [_JSON] * 2),
    "tokenizer-loaded": lambda: Kind("model/tokenizer.json", _load_tokenizer, [_JSON] * 3),
    "settings-loaded": lambda: Kind("model/tokenizer_config.json", _load_tokenizer, [_JSON] * 3),
    "sentencepiece-converted": lambda: Kind(
        "tokenizer.model", _convert_tokenizer("SentencePieceTokenizer", ".", "tokenizer.model"), [damage_protobuf] * 2
    ),
    "settings-converted": lambda: Kind(
        "huggingface/tokenizer_config.json",
        _convert_tokenizer("HuggingFaceTokenizer", "huggingface", "tokenizer.json", "tokenizer_config.json"),
        [_JSON] * 2,
    ),
    "gpt2-converted": lambda: Kind(
        "huggingface/merges.txt", _convert_tokenizer("GPT2BPETokenizer", "huggingface", "vocab.json", "merges.txt")
    ),
    "conversion": lambda: Kind(_STATE, _read_conversion, [_JSON] * 2, _put_conversion),
    "replay": lambda: Kind("batch.pt", _read_batch, [damage_zip] * 3),
    "tokens": lambda: Kind("tokens.pt", _read_tokens, [damage_zip] * 3),
    "prompts": lambda: Kind("prompts.txt", _read_prompts),
    "run-file": lambda: Kind("run.toml", _read_run_file, [damage_toml] * 3),
}
"""Name → what makes the kind."""


def damaged(kind: Kind, valid: bytes, name: str, seed: int, number: int) -> bytes:
    """Input ``number`` of a kind."""
    rng = Random(f"{seed}/{name}/{number}")
    edit = rng.choice([damage_bytes] * max(1, len(kind.edits)) + list(kind.edits))
    return edit(valid, rng)
