"""The JSON file beside a dataset: which tokenizer made it, from what, and how much of it there is."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

_WORDS: dict[type, str] = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    type(None): "null",
}


@dataclass(frozen=True)
class Sidecar:
    """The content of ``PREFIX.json``. Paths are reduced to names, so that the file can travel with the data."""

    tokenizer_type: str
    tokenizer_model: str | None
    """Name of the tokenizer's file or folder; ``None``, as the two below, where the data came in tokens without it."""
    tokenizer_sha256: str | None
    """Digest of the tokenizer's files (:meth:`megatron_exo.data.tokenizers.TokenizerSpec.sha256`)."""
    tokenizer_fingerprint: str | None
    """Digest of what the tokenizer does (:func:`megatron_exo.data.tokenizers.fingerprint`)."""
    vocab_size: int
    eod: int | None
    append_eod: bool
    dtype: str
    documents: int
    tokens: int
    """Tokens in the dataset, separators included."""
    empty_documents: int
    """Documents of the input that held no text and were left out."""
    inputs: list[str]

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> Sidecar:
        """Raises ``ValueError`` for a file that is not a sidecar, saying what is missing or unknown."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            sidecar = cls(**content)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: not a dataset description of this project ({str(error)[:200]})") from None
        for name, kinds in _KINDS.items():
            value = getattr(sidecar, name)
            if type(value) not in kinds or (type(value) is int and not 0 <= value < 1 << 63):
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise ValueError(f"{path}: {name} must be {wanted}, not {repr(value)[:40]}")
        if sidecar.dtype not in ("uint16", "int32"):
            raise ValueError(f"{path}: dtype must be uint16 or int32, not {sidecar.dtype[:40]!r}")
        return sidecar


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("tokenizer_type", "dtype"), (str,)),
    **dict.fromkeys(("tokenizer_model", "tokenizer_sha256", "tokenizer_fingerprint"), (str, type(None))),
    **dict.fromkeys(("vocab_size", "documents", "tokens", "empty_documents"), (int,)),
    "eod": (int, type(None)),
    "append_eod": (bool,),
    "inputs": (list,),
}
