"""Tokenizers as the preprocessing needs them, and how to tell two of them apart.

Text is always encoded as plain text: nothing adds a begin-of-text token, and a document that spells out
``</s>`` or ``<|endoftext|>`` does not become a separator. So separators are exactly what preprocessing appends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_exo.errors import UserError

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Megatron's names for one and the same reading of a SentencePiece model."""

TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer")

_GPT2_END_OF_TEXT = "<|endoftext|>"
_GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

_PROBE = (
    "The quick brown fox's 3,141.59 jumps weren't over; they'd been (mostly) re-tokenised!  Two spaces,\n\n"
    "\tdef f(x_1): return {'a': x_1 ** 2}  # naïve café, Straße, 日本語, Ελλάδα, עברית, 🙂\r\n"
    "https://example.org/a?b=c&d=%20 HTTP/1.1 antidisestablishmentarianism JavaScript CO₂ 10⁻⁹ </s> <|endoftext|>"
)


class TokenizerError(UserError):
    """A tokenizer that cannot be loaded or used: which file, why, what instead."""


class Tokenizer(Protocol):
    vocab_size: int
    """Number of ids, without the padding that a model adds; every id is below it."""
    eod: int | None
    """Megatron's end-of-document id (the tokenizer's EOS), or ``None`` if it names none."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def token_table(self) -> list[str]:
        """The token of every id."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """How to load a tokenizer; small enough to send to worker processes.

    Args:
        type: one of ``TOKENIZER_TYPES``, with Megatron's meaning of ``--tokenizer-type``.
        model: the SentencePiece ``.model``; a Hugging Face folder or its ``tokenizer.json``; for GPT-2 BPE a
            folder with ``vocab.json`` and ``merges.txt`` (or OpenAI's ``encoder.json`` and ``vocab.bpe``), or
            the vocabulary file itself with the merges beside it.
    """

    type: str
    model: str

    def load(self) -> Tokenizer:
        """Raises ``TokenizerError`` for an unknown type, a missing file or one that is something else."""
        files = self.files()
        if self.type in SENTENCEPIECE_TYPES:
            return _SentencePiece(files[0])
        return _HuggingFace(files[0]) if self.type == "HuggingFaceTokenizer" else _Gpt2Bpe(*files)

    def files(self) -> list[Path]:
        """The files that define the tokenizer. Raises ``TokenizerError`` if one is missing."""
        path = Path(self.model)
        if self.type in SENTENCEPIECE_TYPES:
            files = [path]
        elif self.type == "HuggingFaceTokenizer":
            files = [path / "tokenizer.json" if path.is_dir() else path]
        elif self.type == "GPT2BPETokenizer":
            folder = path if path.is_dir() else path.parent
            pairs = [pair for pair in _GPT2_FILES if (path.name == pair[0] or path.is_dir())]
            found = [pair for pair in pairs if all((folder / name).is_file() for name in pair)]
            if not found:
                raise TokenizerError(
                    f"{self.model}: no GPT-2 BPE files there; give a folder with vocab.json and merges.txt "
                    "(or encoder.json and vocab.bpe), or the vocabulary file beside its merges"
                )
            files = [folder / name for name in found[0]]
        else:
            raise TokenizerError(f"tokenizer type {self.type!r} is not supported; use {', '.join(TOKENIZER_TYPES)}")
        for file in files:
            if not file.is_file():
                raise TokenizerError(
                    f"{file}: no such file; --tokenizer-type {self.type} takes a local path, nothing is downloaded"
                )
        return files

    def sha256(self) -> str:
        """Hex digest of the defining files, in order."""
        digest = hashlib.sha256()
        for file in self.files():
            digest.update(file.read_bytes())
        return digest.hexdigest()


def fingerprint(tokenizer: Tokenizer) -> str:
    """Hex digest of what a tokenizer does: the token of every id, and the ids of a probe text.

    The same tokenizer in two file formats (GPT-2 as ``vocab.json`` + ``merges.txt`` or as ``tokenizer.json``)
    has one fingerprint; two vocabularies of one size have two.
    """
    behaviour = [tokenizer.token_table(), tokenizer.encode_batch([_PROBE])[0]]
    return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


def describe(spec: TokenizerSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a :class:`~megatron_exo.data.sidecar.Sidecar` records of the tokenizer that made a dataset."""
    return {
        "tokenizer_type": spec.type,
        "tokenizer_model": Path(spec.model).name,
        "tokenizer_sha256": spec.sha256(),
        "tokenizer_fingerprint": fingerprint(tokenizer),
    }


class _SentencePiece:
    def __init__(self, file: Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise TokenizerError(f"{file}: needs the package sentencepiece (pip install sentencepiece)") from None
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError, UnicodeDecodeError):  # the last, where the library's own message is no text
            raise TokenizerError(f"{file}: not a SentencePiece model; tools/train_tokenizer.py makes one") from None
        self.vocab_size: int = self._processor.get_piece_size()
        eos = self._processor.eos_id()
        self.eod: int | None = eos if eos >= 0 else None
        try:
            self.token_table()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{file}: damaged: a piece is not UTF-8 ({error.reason}); copy it again") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def token_table(self) -> list[str]:
        return [self._processor.id_to_piece(index) for index in range(self.vocab_size)]


class _TokenizersLibrary:
    """What a Hugging Face tokenizer and GPT-2 BPE share: the package ``tokenizers``."""

    def __init__(self, tokenizer: Any, eod_token: str | None, source: Path) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # that is: as text, see the module docstring
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        if sorted(vocabulary.values()) != list(range(self.vocab_size)):
            raise TokenizerError(
                f"{source}: its {self.vocab_size} tokens do not have the ids 0 to {self.vocab_size - 1}; Megatron "
                "sizes the embedding by the number of tokens, so fill the gaps with unused tokens"
            )
        self._vocabulary: dict[str, int] = vocabulary
        if eod_token is not None and eod_token not in vocabulary:
            raise TokenizerError(f"{source}: the end-of-document token {eod_token[:40]!r} is not in the vocabulary")
        self.eod = None if eod_token is None else vocabulary[eod_token]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [item.ids for item in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_table(self) -> list[str]:
        return sorted(self._vocabulary, key=self._vocabulary.__getitem__)


class _HuggingFace(_TokenizersLibrary):
    def __init__(self, file: Path) -> None:
        library = _tokenizers_library(file)
        try:
            tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{file}: not a tokenizer.json of the tokenizers library ({str(error)[:200]})"
            ) from None
        super().__init__(tokenizer, _eos_token(file.parent), file)


class _Gpt2Bpe(_TokenizersLibrary):
    def __init__(self, vocabulary: Path, merges: Path) -> None:
        library = _tokenizers_library(vocabulary)
        try:
            tokenizer = library.Tokenizer(library.models.BPE.from_file(str(vocabulary), str(merges)))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{vocabulary}, {merges.name}: not GPT-2 BPE files ({str(error)[:200]})") from None
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        super().__init__(tokenizer, _GPT2_END_OF_TEXT, vocabulary)


def _tokenizers_library(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError(f"{file}: needs the package tokenizers (pip install tokenizers)") from None
    return tokenizers


def _eos_token(folder: Path) -> str | None:
    """The ``eos_token`` that a Hugging Face folder declares; Megatron takes it as its end of document."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise TokenizerError(f"{file}: not a JSON object") from None
        if isinstance(token, dict):
            token = token.get("content", token)
        if isinstance(token, str):
            return token
        if token is not None:
            raise TokenizerError(f"{file}: eos_token must be a token, or an object with its content")
    return None
