"""What a run reads, so that a later one can be held against it: its tokenizer and its datasets, with digests."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_exo.checkpoints.integrity import sha256_of
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec, fingerprint

_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a Hugging Face tokenizer needs or may have beside its ``tokenizer.json``."""


def tokenizer_files(args: Namespace) -> list[Path]:
    """The files of the run's tokenizer; none for one that only Megatron reads."""
    try:
        files = [] if args.tokenizer_model is None else _spec(args).files()
    except TokenizerError:
        return []
    return files + [path for name in _BESIDE_TOKENIZER if files and (path := files[0].with_name(name)).is_file()]


def describe_tokenizer(args: Namespace) -> dict[str, Any]:
    """Type, name, files, and the fingerprint of what it does (:func:`megatron_exo.data.tokenizers.fingerprint`)."""
    model = args.tokenizer_model
    described: dict[str, Any] = {"type": args.tokenizer_type, "model": None if model is None else Path(model).name}
    described["files"] = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file), "copied": False}
        for file in tokenizer_files(args)
    }
    try:
        described["fingerprint"] = None if model is None else _fingerprint(_spec(args), _spec(args).sha256())
    except TokenizerError as error:  # of a type that only Megatron reads, or from a hub
        described["fingerprint"], described["no_files"] = None, str(error)
    return described


def _spec(args: Namespace) -> TokenizerSpec:
    return TokenizerSpec(args.tokenizer_type, str(args.tokenizer_model))


@functools.cache
def _fingerprint(spec: TokenizerSpec, sha256: str) -> str:
    """Made once for each content (``sha256``) of the files."""
    return fingerprint(spec.load())


def describe_data(args: Namespace) -> dict[str, Any]:
    """What the run is trained on: prefixes with their weights, and digests that tell whether they still are that."""
    from megatron.training.utils import get_blend_and_blend_per_split

    described: dict[str, Any] = {"seed": args.seed, "split": args.split, "mock": bool(args.mock_data), "sets": []}
    if args.mock_data:
        return described
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (OSError, ValueError, KeyError) as error:  # lists in files, which may be gone by now
        return described | {"unreadable": str(error)}
    parts = (
        {"all": blend} if blend is not None else dict(zip(("train", "valid", "test"), per_split or (), strict=False))
    )
    for part, named in parts.items():
        prefixes, weights = named or ([], None)
        for number, prefix in enumerate(prefixes):
            weight = None if weights is None else weights[number]
            described["sets"].append({"part": part, "prefix": prefix, "weight": weight, **_dataset(prefix)})
    return described


def _dataset(prefix: str) -> dict[str, Any]:
    """Sizes and digests of a dataset's files, ``None`` for what is not there."""
    sizes = {kind: _size(Path(f"{prefix}.{kind}")) for kind in ("bin", "idx", "json")}
    return {
        "bin_bytes": sizes["bin"],
        "idx_bytes": sizes["idx"],
        "idx_sha256": _digest(Path(f"{prefix}.idx"), sizes["idx"]),
        "sidecar_sha256": _digest(Path(f"{prefix}.json"), sizes["json"]),
    }


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


@functools.cache
def _digest(path: Path, size: int | None) -> str | None:
    """Made once a run: an index of many documents takes seconds."""
    return None if size is None else sha256_of(path)
