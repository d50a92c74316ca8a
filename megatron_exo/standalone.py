"""A model on the current process group without a command line: built, run, stepped, saved and read back.

For programs that measure or check models (smoke tests, benchmarks, tests) and have no training run around them.
Everything that computes is production code or Megatron's; here it is only put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model
from torch import Tensor

from megatron_exo import platform
from megatron_exo.builder import ExoModelBuilder, ExoModelConfig
from megatron_exo.config import ExoConfig
from megatron_exo.forward_step import reduce_loss
from megatron_exo.inference import compute_logits, pipeline_keywords
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.documents import DocumentMask
from megatron_exo.shards import join_all, named_shards
from megatron_exo.sizes import ModelSizes

Z_LOSS_WEIGHT = 1e-5


def start_parallel_state(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
) -> None:
    """Megatron's process groups, once per process, and its random states, anew at each call.

    Each gloo group has a thread that polls, and groups cannot be given back one by one: making them anew for every
    model of a process would drown the machine.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size,
            context_parallel_size=context_parallel_size,
            create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def transformer_config(exo: ExoConfig, sizes: ModelSizes, dtype: torch.dtype, **fields: Any) -> ExoTransformerConfig:
    """The paper's architecture (RMSNorm, SwiGLU, no biases) without dropout; ``fields`` give the layout and more.

    Args:
        dtype: ``torch.float32`` or ``torch.bfloat16``, of parameters, activations and what stages send each other.
    """
    architecture: dict[str, Any] = {
        "exo": exo,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": True,
    }
    return ExoTransformerConfig(**(architecture | sizes.transformer_fields() | fields))


class StandaloneModel:
    """The chunks of one model on this rank, in Megatron's DDP if it is trained, and what is done with them.

    Needs an initialised ``torch.distributed``, an active platform and :func:`start_parallel_state`.

    Args:
        config: see :func:`transformer_config`.
        sizes: those that ``config`` was made with; the embedding is padded to a multiple of
            ``make_vocab_size_divisible_by`` times tp.
        document_mask: how rows are cut into documents that do not see each other; ``None`` for one text a row.
        init_recipe: how matrices start, one of :data:`megatron_exo.model.initialization.RECIPES`.
        is_trained: whether there are to be gradients; without, chunks are not wrapped, and take half the memory.
    """

    def __init__(
        self,
        config: ExoTransformerConfig,
        sizes: ModelSizes,
        *,
        make_vocab_size_divisible_by: int = 128,
        init_recipe: str = "paper",
        document_mask: DocumentMask | None = None,
        ddp: DistributedDataParallelConfig | None = None,
        is_trained: bool = True,
    ) -> None:
        self.config = config
        self.vocab_size = sizes.vocab_size
        self.document_mask = document_mask
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.ddp = ddp or DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.optimizer: MegatronOptimizer | None = None
        model_config = ExoModelConfig(
            transformer=config,
            vocab_size=sizes.vocab_size,
            true_vocab_size=sizes.vocab_size,
            should_pad_vocab=True,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
            seq_length=sizes.seq_length,
            position_embedding_type="rope",
            rotary_base=int(sizes.rotary_base),
            share_embeddings_and_output_weights=sizes.tied_embeddings,
            init_recipe=init_recipe,
        )
        self.chunks = ExoModelBuilder(model_config).build_distributed_models(
            self.pg_collection,
            ddp_config=self.ddp,
            wrap_with_ddp=is_trained,
            data_parallel_random_init=False,
            model_type=ModelType.encoder_or_decoder,
        )
        config.finalize_model_grads_func = finalize_model_grads
        if self.ddp.overlap_grad_reduce:
            config.no_sync_func = self._one_or_list([chunk.no_sync for chunk in self.chunks])

    def add_optimizer(self, **settings: Any) -> None:
        """Megatron's optimizer with ``OptimizerConfig`` fields; its masters are the weights of this moment."""
        defaults = {"clip_grad": 0.0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95}
        layout = {"bf16": self.config.bf16, "use_distributed_optimizer": self.ddp.use_distributed_optimizer}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(**(layout | defaults | settings)), self.chunks, use_gloo_process_groups=False
        )
        self.config.grad_scale_func = self.optimizer.scale_loss

    def forward_backward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        loss_mask: Tensor | None = None,
        micro_batch_size: int = 1,
        forward_only: bool = False,
    ) -> dict[str, float] | None:
        """Run one global batch in micro-batches.

        Args:
            tokens: int64 [b, s], the same on every rank; data-parallel ranks take turns at its rows, and
                context-parallel ranks share each sequence.
            labels: int64 [b, s].
            loss_mask: float32 [b, s], 1 where a token counts; all do if ``None``.

        Returns:
            The mean ``lm loss`` and ``z loss`` over all tokens, on the last pipeline stage only.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if not forward_only:
                chunk.zero_grad_buffer()
        if self.optimizer is not None and not forward_only:
            self.optimizer.zero_grad()
        group = self.pg_collection.dp
        loss_mask = torch.ones(labels.shape) if loss_mask is None else loss_mask
        mine = [part[group.rank() :: group.size()].to(platform.device()) for part in (tokens, labels, loss_mask)]
        mine = [part.split(micro_batch_size) for part in mine]

        def samples() -> Iterator[dict[str, Any]]:
            for micro_tokens, micro_labels, mask in zip(*mine, strict=True):
                positions = torch.arange(tokens.shape[1], device=micro_tokens.device).expand_as(micro_tokens)
                batch = {"tokens": micro_tokens, "labels": micro_labels, "positions": positions, "loss_mask": mask}
                cp_group = self.pg_collection.cp
                documents = self.document_mask and self.document_mask.of(micro_tokens, cp_group)
                batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
                yield batch | {"documents": documents}

        losses = get_forward_backward_func(
            self.config.pipeline_model_parallel_size, self.config.virtual_pipeline_model_parallel_size
        )(
            forward_step_func=_forward_step,
            data_iterator=self._one_or_list([samples() for _ in self.chunks]),
            model=self._one_or_list(self.chunks),
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
            dist.all_reduce(total, group=self.pg_collection.dp_cp)
        return {name: (total[0] / total[1]).item() for name, total in totals.items()}

    def logits(self, tokens: Tensor) -> Tensor | None:
        """float32 [b, s, vocab_size] on the last stage, ``None`` elsewhere."""
        return compute_logits(
            self.chunks,
            tokens.to(platform.device()),
            self.vocab_size,
            self.config,
            self.pg_collection,
            document_mask=self.document_mask,
        )

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """One optimizer step; returns the gradient norm before clipping and whether the step was taken."""
        assert self.optimizer is not None, "call add_optimizer first"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        taken, norm, _ = self.optimizer.step()
        return float(norm), bool(taken)

    def whole(self, what: str) -> dict[str, Tensor] | None:
        """Copies of the whole parameters (``"data"``) or gradients (``"main_grad"``) of this pipeline stage.

        Returns:
            Whole-model name → float32, on one rank of each stage; ``None`` on the others. Copies of what another
            stage has are left out.
        """
        if what == "main_grad" and self.ddp.use_distributed_optimizer:
            self._gather_gradients()
        if what == "data":
            self.gather_parameters()
        shards = {name: shard for name, shard in named_shards(self.chunks) if not getattr(shard, "shared", False)}
        values = {name: value for name, shard in shards.items() if (value := getattr(shard, what, None)) is not None}
        tensors = join_all(shards, values)
        is_reporter = self.pg_collection.tp.rank() == 0 and self.pg_collection.dp_cp.rank() == 0
        return tensors if is_reporter else None

    def gather_parameters(self) -> None:
        """After a step, make this rank's parameters whole where the next forward pass would do so."""
        if self.ddp.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _gather_gradients(self) -> None:
        """Make the gradient buffers whole again, of which the distributed optimizer reduces one share for each rank."""
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    group = buffer.data_parallel_group
                    share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, share, group=group)

    def save(self, folder: Path) -> None:
        """Write model and optimizer as a checkpoint of ``megatron.core.dist_checkpointing``; ``folder`` must exist."""
        dist_checkpointing.save(self._sharded_state_dict(is_loading=False), str(folder))

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote, by any layout of ranks.

        Raises:
            CheckpointingException: the checkpoint lacks a tensor of this model, or has one that this model lacks.
        """
        sharded = self._sharded_state_dict(is_loading=True)
        state = dist_checkpointing.load(sharded, str(folder), strict=StrictHandling.RAISE_ALL)
        for key, chunk in self._named_chunks():
            chunk.load_state_dict(state[key])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def _sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"dp_cp_group": self.pg_collection.dp_cp, "chained_optim_avoid_prefix": True}
        if self.ddp.use_distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        state = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in self._named_chunks()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state

    def _named_chunks(self) -> list[tuple[str, Any]]:
        """The chunks without their wrappers, whose names checkpoints do not have, under their keys in a checkpoint."""
        chunks = unwrap_model(self.chunks)
        if len(chunks) == 1:
            return [("model", chunks[0])]
        return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]

    @staticmethod
    def _one_or_list(values: list[Any]) -> Any:
        """Megatron takes the value itself where there is one chunk, and a list where there are several."""
        return values if len(values) > 1 else values[0]


def _forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    documents = batch["documents"]
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=documents)
    return output, partial(reduce_loss, batch["loss_mask"], z_loss_weight=Z_LOSS_WEIGHT)
