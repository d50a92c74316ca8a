"""A model on a layout of ranks: built, filled with whole tensors, run and read back, as tests need it.

Everything that computes is production code or Megatron's; here it is only put together without a command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_exo.builder import ExoModelBuilder, ExoModelConfig
from megatron_exo.config import ExoConfig
from megatron_exo.convert.shards import join, load_whole_state, named_shards
from megatron_exo.forward_step import reduce_loss
from megatron_exo.inference import compute_logits, pipeline_keywords
from megatron_exo.model.config import ExoTransformerConfig
from tests.plain_reference import PlainSizes

Z_LOSS_WEIGHT = 1e-5


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. ``transformer`` overrides TransformerConfig fields."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    dp: int = 1
    distributed_optimizer: bool = False
    overlap: bool = False
    bf16: bool = False
    transformer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [name for name in ("sp", "distributed_optimizer", "overlap", "bf16") if getattr(self, name)]
        parts += [f"{key}={value}" for key, value in self.transformer.items()]
        return "-".join(parts)


class Trainer:
    """One model on the ranks of ``layout``, filled with ``state``; make it inside ``run_on_ranks``."""

    def __init__(
        self, exo: ExoConfig, sizes: PlainSizes, layout: Layout, state: Mapping[str, Tensor], **optimizer: Any
    ) -> None:
        start_parallel_state(layout)
        self.layout = layout
        self.vocab_size = sizes.vocab_size
        self.config = transformer_config(exo, sizes, layout)
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        model_config = ExoModelConfig(
            transformer=self.config,
            vocab_size=sizes.vocab_size,
            true_vocab_size=sizes.vocab_size,
            should_pad_vocab=True,
            make_vocab_size_divisible_by=16,
            seq_length=128,
            position_embedding_type="rope",
            rotary_base=int(sizes.rotary_base),
            share_embeddings_and_output_weights=sizes.tied,
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.overlap and layout.distributed_optimizer,
            grad_reduce_in_fp32=True,
            bucket_size=20000 if layout.overlap else None,
        )
        self.chunks = ExoModelBuilder(model_config).build_distributed_models(
            self.pg_collection, ddp_config=ddp, data_parallel_random_init=False, model_type=ModelType.encoder_or_decoder
        )
        load_whole_state(self.chunks, state, pipeline_size=layout.pp)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = None
        if optimizer:
            settings = {"clip_grad": 0.0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95} | optimizer
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(bf16=layout.bf16, use_distributed_optimizer=layout.distributed_optimizer, **settings),
                self.chunks,
                use_gloo_process_groups=False,
            )
            self.config.grad_scale_func = self.optimizer.scale_loss
        if layout.overlap:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, *, micro_batch_size: int = 1, forward_only: bool = False
    ) -> dict[str, float] | None:
        """Run one global batch [b, s] in micro-batches and return its mean losses (last stage only)."""
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if not forward_only:
                chunk.zero_grad_buffer()
        if self.optimizer is not None and not forward_only:
            self.optimizer.zero_grad()
        rank = parallel_state.get_data_parallel_rank()
        mine = [part[rank :: self.layout.dp].split(micro_batch_size) for part in (tokens, labels)]

        def samples() -> Iterator[tuple[Tensor, Tensor]]:
            return zip(*mine, strict=True)

        losses = get_forward_backward_func(self.layout.pp, self.layout.vpp if self.layout.vpp > 1 else None)(
            forward_step_func=_forward_step,
            data_iterator=[samples() for _ in self.chunks] if len(self.chunks) > 1 else samples(),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(mine[0]),
            seq_length=tokens.shape[1],
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            **pipeline_keywords(self.config, self.pg_collection),
        )
        if not losses:
            return None
        totals = {name: sum(entry[name] for entry in losses) for name in losses[0]}
        for total in totals.values():
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return {name: (total[0] / total[1]).item() for name, total in totals.items()}

    def logits(self, tokens: Tensor) -> Tensor | None:
        """float [b, s, vocab] on the last stage."""
        return compute_logits(self.chunks, tokens, self.vocab_size, self.config, self.pg_collection)

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """One optimizer step at ``learning_rate``; returns the gradient norm before clipping and whether it was taken."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        taken, norm, _ = self.optimizer.step()
        return float(norm), bool(taken)

    def whole(self, what: str) -> dict[str, Tensor] | None:
        """Whole parameters (``"data"``) or gradients (``"main_grad"``) of this stage; on one rank of each stage only."""
        tensors = {}
        for name, shard in named_shards(self.chunks):
            value = getattr(shard, what, None)
            if value is not None:
                tensors[name] = join(name, value.detach().float(), shard).clone()
        is_reporter = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
        return tensors if is_reporter else None


def _forward_step(data_iterator: Iterator[tuple[Tensor, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Any]:
    tokens, labels = next(data_iterator)
    output = model(tokens, positions(tokens), None, labels=labels)
    mask = torch.ones(labels.shape)
    return output, partial(reduce_loss, mask, z_loss_weight=Z_LOSS_WEIGHT)


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def start_parallel_state(layout: Layout) -> None:
    """Megatron's process groups and random states for ``layout``, once per run of ranks.

    Each gloo group has a thread that polls, and groups cannot be given back one by one: making them anew for every
    model of a run would drown the machine.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, create_gloo_process_groups=False
        )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def transformer_config(exo: ExoConfig, sizes: PlainSizes, layout: Layout) -> ExoTransformerConfig:
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    fields: dict[str, Any] = {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "kv_channels": sizes.kv_channels,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "layernorm_epsilon": sizes.eps,
        "exo": exo,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "sequence_parallel": layout.sp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": layout.bf16,
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
    }
    return ExoTransformerConfig(**(fields | dict(layout.transformer)))


def merge(results: list[dict[str, Tensor] | None]) -> dict[str, Tensor]:
    """The stages' whole tensors in one dictionary; a name reported by two stages is an error."""
    merged: dict[str, Tensor] = {}
    for part in results:
        for name, tensor in (part or {}).items():
            assert name not in merged, f"{name} comes from two stages"
            merged[name] = tensor
    return merged
