"""Whether a Hugging Face folder computes what Megatron computes, on the same tokens.

Both models compute in float32, whatever dtype their weights are stored in: what is measured is the conversion, and
with it the rounding of the weights where ``--dtype`` asks for it.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_exo import platform, standalone
from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import ConversionError, State
from megatron_exo.shards import load_whole_state
from megatron_exo.sizes import ModelSizes

Loader = Callable[[list[torch.nn.Module]], None]
"""Fills the one chunk of a whole model."""

BOUNDS = {
    # dtype that the weights were rounded to, None for none: (largest difference over the largest logit, mean KL)
    None: (2e-5, 1e-8),
    torch.float16: (2e-2, 1e-3),
    torch.bfloat16: (1e-1, 1e-2),
}
_SEQUENCES, _LENGTH = 2, 128


@dataclass(frozen=True)
class Comparison:
    """Of two models' logits at the same positions."""

    largest_difference: float
    largest_logit: float
    kl: float
    """Mean over positions of KL(Megatron ‖ transformers), in nats."""
    positions: int

    def line(self) -> str:
        return (
            f"largest logit difference {self.largest_difference:.2e} (largest logit {self.largest_logit:.3g}), "
            f"mean KL {self.kl:.2e} nats over {self.positions} positions"
        )

    def check(self, rounded_to: torch.dtype | None) -> None:
        """Hold the comparison to the bound for weights ``rounded_to`` a dtype, or to that for the same weights.

        Raises:
            ConversionError: the two models compute something else.
        """
        difference, kl = BOUNDS[rounded_to]
        difference *= max(1.0, self.largest_logit)
        if not (self.largest_difference <= difference and self.kl <= kl):  # also if they are not numbers
            raise ConversionError(
                f"the Hugging Face model computes something else than Megatron: {self.line()}; allowed are "
                f"{difference:.2e} and {kl:.0e}"
            )


def compare(ours: Tensor, theirs: Tensor) -> Comparison:
    """Two float32 logits [b, s, vocab]."""
    divergence, largest = 0.0, 0.0
    for a, b in zip(ours.flatten(0, 1).split(32), theirs.flatten(0, 1).split(32), strict=True):
        largest = max(largest, float((a - b).abs().max().nan_to_num(nan=float("inf"))))
        log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
    positions = ours.shape[0] * ours.shape[1]
    return Comparison(largest, float(ours.abs().max()), max(divergence / positions, 0.0), positions)


def verify(
    folder: Path, exo: ExoConfig, sizes: ModelSizes, load: Loader, *, rounded_to: torch.dtype | None
) -> Comparison:
    """Run both models one after the other, each in memory alone, and compare them.

    Raises:
        ConversionError: they differ by more than the bound for ``rounded_to``, or the folder does not hold the model.
    """
    shape = (_SEQUENCES, min(_LENGTH, sizes.seq_length))
    tokens = torch.randint(sizes.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # Megatron says much of no interest
        warnings.simplefilter("ignore")
        ours = megatron_logits(exo, sizes, load, tokens)
    comparison = compare(ours, hf_logits(folder, tokens))
    comparison.check(rounded_to)
    return comparison


def megatron_logits(exo: ExoConfig, sizes: ModelSizes, load: Loader, tokens: Tensor) -> Tensor:
    """float32 [b, s, vocab] of Megatron's model on one rank; ``tokens`` int64 [b, s]. Needs an active platform."""
    if not dist.is_initialized():
        dist.init_process_group(platform.communication_backend(), store=dist.HashStore(), rank=0, world_size=1)
    standalone.start_parallel_state()
    config = standalone.transformer_config(exo, sizes, torch.float32, perform_initialization=False)
    model = standalone.StandaloneModel(config, sizes, is_trained=False)
    load(model.chunks)
    logits = model.logits(tokens)
    assert logits is not None  # there is one stage
    return logits.cpu()


def load_checkpoint(folder: Path) -> Loader:
    """Megatron's own loading of a ``torch_dist`` checkpoint, whose objects have been checked."""

    def load(chunks: list[torch.nn.Module]) -> None:
        chunk: Any = chunks[0]
        groups: Any = ProcessGroupCollection.use_mpu_process_groups()
        sharded = {"model": chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})}
        chunk.load_state_dict(dist_checkpointing.load(sharded, str(folder))["model"])

    return load


def load_state(state: State) -> Loader:
    """Whole tensors by our names."""
    return lambda chunks: load_whole_state(chunks, state, pipeline_size=1)


def hf_logits(folder: Path, tokens: Tensor) -> Tensor:
    """float32 [b, s, vocab] of the model in a folder, loaded by this package's code and not the folder's."""
    from transformers.utils import logging

    from megatron_exo.hf import ExoFormerForCausalLM

    logging.disable_progress_bar()
    model, found = ExoFormerForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise ConversionError(
                f"{folder}: {kind.replace('_', ' ')}: {', '.join(map(str, sorted(found[kind])))[:200]}"
            )
    model.eval()
    with torch.no_grad():
        return torch.cat([model(row).logits.float() for row in tokens.split(1)])
