"""Logits of whole sequences, through Megatron's schedules, on any layout of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.wire import ExoP2PCommunicator


def pipeline_keywords(config: ExoTransformerConfig, pg_collection: ProcessGroupCollection) -> dict[str, Any]:
    """What Megatron's schedules need to carry anchors between stages; nothing for a single stage."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    return {
        "p2p_communicator": ExoP2PCommunicator(pp_group=pg_collection.pp, config=config),
        "pg_collection": pg_collection,
    }


@torch.no_grad()
def compute_logits(
    chunks: Sequence[torch.nn.Module],
    tokens: Tensor,
    vocab_size: int,
    config: ExoTransformerConfig,
    pg_collection: ProcessGroupCollection,
) -> Tensor | None:
    """The next-token logits at every position, one sequence at a time.

    Args:
        chunks: this rank's model chunks, in order of virtual stages.
        tokens: int64 [b, s], the same on every rank.
        vocab_size: columns to return; the padding beyond it is cut.

    Returns:
        float32 [b, s, vocab_size] on every rank of the last pipeline stage, ``None`` elsewhere.
    """
    collected: list[Tensor] = []
    position_ids = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)

    def forward_step(rows: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        def collect(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            collected.append(logits.float())
            return logits.new_zeros(()), {}

        return model(next(rows), position_ids, None), collect

    was_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    iterators = [iter(tokens.split(1)) for _ in chunks]
    get_forward_backward_func(config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size)(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=tokens.shape[0],
        seq_length=tokens.shape[1],
        micro_batch_size=1,
        forward_only=True,
        **pipeline_keywords(config, pg_collection),
    )
    for chunk, mode in zip(chunks, was_training, strict=True):
        chunk.train(mode)
    if not collected:
        return None
    local = torch.cat(collected)
    parts = [torch.empty_like(local) for _ in range(pg_collection.tp.size())]
    dist.all_gather(parts, local, group=pg_collection.tp)
    return torch.cat(parts, dim=-1)[..., :vocab_size]
