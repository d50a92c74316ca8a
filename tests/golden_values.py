"""Access to ``tests/golden``: numbers computed with the paper author's implementation (see its README)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_exo.convert.reference import ReferenceCheckpoint, read_reference_checkpoint
from megatron_exo.sizes import ModelSizes
from tests.plain_reference import PlainExoFormer, PlainSizes

GOLDEN = Path(__file__).parent / "golden"
NUM_TRAINING_STEPS = 40


def _names(folder: str) -> list[str]:
    return sorted(path.name.removesuffix(".expected.pt") for path in (GOLDEN / folder).glob("*.expected.pt"))


VARIANT_NAMES = _names("variants")
RELEASED_NAMES = _names("released_formats")
CHECKPOINTS = sorted(GOLDEN.glob("*/*.ckpt.pt"))
ADAMW_KEYS, MUON_KEYS = (
    sorted(path.name.removesuffix(".init.ckpt.pt") for path in (GOLDEN / "training").glob(f"*.{kind}.init.ckpt.pt"))
    for kind in ("adamw", "muon")
)


def expected(folder: str, name: str) -> dict[str, Any]:
    """The tensors and numbers of ``variants`` or ``released_formats``."""
    return torch.load(GOLDEN / folder / f"{name}.expected.pt", weights_only=True)


def checkpoint(folder: str, name: str) -> ReferenceCheckpoint:
    return read_reference_checkpoint(GOLDEN / folder / f"{name}.ckpt.pt")


def training_batches() -> torch.Tensor:
    """int64 [40, 8, 34]."""
    return torch.load(GOLDEN / "training" / "batches.pt", weights_only=True)


def training_curves(key: str) -> dict[str, list[float]]:
    return json.loads((GOLDEN / "training" / "curves.json").read_text())[key]


def learning_rate_scale(step: int) -> float:
    """The schedule of the golden runs, for ``step`` counted from 0."""
    return min(1.0, (step + 1) / 5, 0.1 + 0.9 * (NUM_TRAINING_STEPS - step) / 10)


def plain_sizes(sizes: ModelSizes) -> PlainSizes:
    return PlainSizes(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups,
        kv_channels=sizes.kv_channels,
        ffn_hidden_size=sizes.ffn_hidden_size,
        vocab_size=sizes.vocab_size,
        rotary_base=sizes.rotary_base,
        eps=sizes.layernorm_epsilon,
        tied=sizes.tied_embeddings,
    )


def plain_model(source: ReferenceCheckpoint) -> PlainExoFormer:
    """The plain model with the checkpoint's weights."""
    model = PlainExoFormer(source.exo, plain_sizes(source.sizes))
    model.load_state_dict(source.state)
    return model
