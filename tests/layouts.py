"""A model on a layout of ranks: built, filled with whole tensors, run and read back, as tests need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from megatron_exo import standalone
from megatron_exo.config import ExoConfig
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.documents import DocumentMask
from megatron_exo.shards import load_whole_state
from megatron_exo.sizes import ModelSizes
from megatron_exo.standalone import Z_LOSS_WEIGHT, StandaloneModel
from tests.plain_reference import PlainSizes

__all__ = ["Z_LOSS_WEIGHT", "Layout", "Trainer", "merge", "start_parallel_state", "transformer_config"]


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. ``transformer`` overrides TransformerConfig fields."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    dp: int = 1
    cp: int = 1
    distributed_optimizer: bool = False
    overlap: bool = False
    bf16: bool = False
    wire: str = "anchors"
    transformer: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [name for name in ("sp", "distributed_optimizer", "overlap", "bf16") if getattr(self, name)]
        parts += [f"wire-{self.wire}"] if self.wire != "anchors" else []
        parts += [f"{key}={value}" for key, value in self.transformer.items()]
        return "-".join(parts)


class Trainer(StandaloneModel):
    """One model on the ranks of ``layout``, with ``state`` or as initialised; make it inside ``run_on_ranks``.

    Args:
        optimizer: ``OptimizerConfig`` fields; without any there is no optimizer.
    """

    def __init__(
        self,
        exo: ExoConfig,
        sizes: PlainSizes,
        layout: Layout,
        state: Mapping[str, Tensor] | None = None,
        init_recipe: str = "paper",
        document_mask: DocumentMask | None = None,
        **optimizer: Any,
    ) -> None:
        start_parallel_state(layout)
        self.layout = layout
        super().__init__(
            transformer_config(exo, sizes, layout),
            model_sizes(sizes),
            make_vocab_size_divisible_by=16,
            init_recipe=init_recipe,
            document_mask=document_mask,
            ddp=DistributedDataParallelConfig(
                use_distributed_optimizer=layout.distributed_optimizer,
                overlap_grad_reduce=layout.overlap,
                overlap_param_gather=layout.overlap and layout.distributed_optimizer,
                grad_reduce_in_fp32=True,
                bucket_size=20000 if layout.overlap else None,
            ),
        )
        if state is not None:
            load_whole_state(self.chunks, state, pipeline_size=layout.pp)
        if optimizer:
            self.add_optimizer(**optimizer)


def start_parallel_state(layout: Layout) -> None:
    standalone.start_parallel_state(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, layout.cp)


def model_sizes(sizes: PlainSizes) -> ModelSizes:
    """What the plain model calls by other names."""
    fields = dataclasses.asdict(sizes)
    eps, tied = fields.pop("eps"), fields.pop("tied")
    return ModelSizes(**fields, layernorm_epsilon=eps, tied_embeddings=tied, seq_length=128)


def transformer_config(exo: ExoConfig, sizes: PlainSizes, layout: Layout) -> ExoTransformerConfig:
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp,
        "exo_wire": layout.wire,
        "batch_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
    }
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    return standalone.transformer_config(exo, model_sizes(sizes), dtype, **(fields | dict(layout.transformer)))


def merge(results: list[dict[str, Tensor] | None]) -> dict[str, Tensor]:
    """The stages' whole tensors in one dictionary; a name reported by two stages is an error."""
    merged: dict[str, Tensor] = {}
    for part in results:
        for name, tensor in (part or {}).items():
            assert name not in merged, f"{name} comes from two stages"
            merged[name] = tensor
    return merged
