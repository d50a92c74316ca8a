"""The tokenizer of a run as files that ``AutoTokenizer`` loads, and that give the ids the model was trained on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_exo.convert.mapping import ConversionError
from megatron_exo.data.tokenizers import SENTENCEPIECE_TYPES, Tokenizer, TokenizerError, TokenizerSpec
from megatron_exo.errors import reason
from megatron_exo.files import is_plain_name

_PLAIN_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
_TEXTS = (
    "The quick brown fox's 3,141.59 jumps weren't over;  two spaces,\n\n\tdef f(x_1): return {'a': x_1 ** 2}\r\n",
    "naïve café, Straße, 日本語, Ελλάδα, עברית, 🙂 CO₂ 10⁻⁹ \u00a0\u3000\u200bﬁ e\u0301 <s> </s> <pad> <|endoftext|>",
    "  leading and trailing  ",
    " ",
    "",
)


@dataclass(frozen=True)
class WrittenTokenizer:
    """What became of a tokenizer.

    Args:
        eos: the id that ends a document, if there is one.
        notice: what a user has to know or do; empty where ``AutoTokenizer`` simply loads the folder.
    """

    eos: int | None
    notice: str


def write_tokenizer(described: Mapping[str, Any], copies: Path, folder: Path, *, max_length: int) -> WrittenTokenizer:
    """Write the tokenizer that a manifest describes into a model's folder.

    Args:
        described: ``tokenizer`` of the manifest (:func:`megatron_exo.checkpoints.sources.describe_tokenizer`).
        copies: the folder with copies of its files, in the checkpoint.
        max_length: tokens that the model takes.

    Raises:
        TokenizerError: the copies are damaged.
        ConversionError: they are not what the manifest says.
    """
    kind, names = described.get("type"), described.get("files") or {}
    if not isinstance(names, Mapping) or not all(is_plain_name(name) for name in names):
        raise ConversionError("the manifest of the checkpoint names tokenizer files that are no names of files")
    files = [copies / name for name in names]
    if not files:
        return WrittenTokenizer(None, f"no tokenizer: the source keeps no files of {str(kind or 'one')[:40]}")
    if missing := [file.name for file in files if not file.is_file()]:
        return WrittenTokenizer(None, f"no tokenizer: {', '.join(missing)} was too large to be kept in the checkpoint")
    if kind in SENTENCEPIECE_TYPES:
        return _write_sentencepiece(files[0], folder, max_length)
    if kind == "HuggingFaceTokenizer":
        return _write_hugging_face(files, folder)
    if kind == "GPT2BPETokenizer":
        return _write_gpt2(TokenizerSpec(kind, str(copies)), folder, max_length)
    return WrittenTokenizer(None, f"no tokenizer: {str(kind)[:40]} is one that only Megatron reads")


def _write_sentencepiece(file: Path, folder: Path, max_length: int) -> WrittenTokenizer:
    ours = TokenizerSpec("SentencePieceTokenizer", str(file)).load()
    shutil.copyfile(file, folder / "tokenizer.model")
    try:
        tokenizer, tokens = _from_sentencepiece(file)
    except ImportError as error:  # protobuf
        return WrittenTokenizer(ours.eod, f"tokenizer.model is copied, but not made a tokenizer.json: {error}")
    if difference := _difference(ours, tokenizer):
        return WrittenTokenizer(
            ours.eod, f"tokenizer.model is copied, but a tokenizer.json of it would differ: {difference}"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, tokens, max_length)
    return WrittenTokenizer(ours.eod, "")


def _from_sentencepiece(file: Path) -> tuple[Any, dict[str, str]]:
    """The tokenizer in the ``tokenizers`` library, by transformers' own conversion, and its special tokens."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    is_bpe = proto.trainer_spec.model_type == 2
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)} if is_bpe else pieces
    tokenizer = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary, legacy=False)
    controls = [piece.piece for piece in proto.pieces if piece.type == 3]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in controls])
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    return tokenizer, {f"{name}_token": pieces[number][0] for name, number in ids.items() if number >= 0}


def _write_gpt2(spec: TokenizerSpec, folder: Path, max_length: int) -> WrittenTokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    ours = spec.load()
    tokenizer = LibraryTokenizer(models.BPE.from_file(*map(str, spec.files())))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert ours.eod is not None  # it demands one
    end = ours.token_table()[ours.eod]
    tokenizer.add_special_tokens([AddedToken(end, normalized=False, special=True)])
    if difference := _difference(ours, tokenizer):
        raise TokenizerError(f"{spec.model}: a tokenizer.json of it would differ: {difference}")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, dict.fromkeys(("bos_token", "eos_token", "unk_token"), end), max_length)
    return WrittenTokenizer(ours.eod, "")


def _write_hugging_face(files: list[Path], folder: Path) -> WrittenTokenizer:
    ours = TokenizerSpec("HuggingFaceTokenizer", str(files[0].parent)).load()
    for file in files:
        shutil.copyfile(file, folder / file.name)
    config = folder / "tokenizer_config.json"
    content: Any = {**_PLAIN_CONFIG}
    try:
        if config.exists():
            content = json.loads(config.read_text(encoding="utf-8"))
            content.pop("auto_map", None)  # code from elsewhere, for those who trust this folder's
        config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TokenizerError(f"{config.name} of the checkpoint is damaged: {reason(error)}") from error
    return WrittenTokenizer(ours.eod, "")


def _write_config(folder: Path, tokens: Mapping[str, str], max_length: int) -> None:
    # Batches need a padding token; what is padded with does not matter, it is masked.
    padding = {"pad_token": tokens["eos_token"]} if "eos_token" in tokens else {}
    config = {**_PLAIN_CONFIG, **padding, **tokens, "model_max_length": max_length}
    config["clean_up_tokenization_spaces"] = False
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _difference(ours: Tokenizer, theirs: Any) -> str:
    """What a tokenizer of the ``tokenizers`` library does otherwise than the one of the run; empty if nothing."""
    if theirs.get_vocab_size() != ours.vocab_size:
        return f"{theirs.get_vocab_size()} tokens instead of {ours.vocab_size}"
    table = ours.token_table()
    for number, token in enumerate(table):
        if theirs.id_to_token(number) != token:
            return f"token {number} is {theirs.id_to_token(number)!r} instead of {token!r}"
    generator = random.Random(0)
    pieces = [token.replace("▁", " ") for token in table if not token.startswith("<")]
    texts = [*_TEXTS, *("".join(generator.choices(pieces, k=20)) for _ in range(500))]
    theirs.encode_special_tokens = True  # as text, which is how training text was read
    for text, expected in zip(texts, ours.encode_batch(texts), strict=True):
        if theirs.encode(text, add_special_tokens=False).ids != expected:
            return f"it encodes {text[:60]!r} otherwise"
    theirs.encode_special_tokens = False
    return ""
