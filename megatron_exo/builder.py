"""Builds the model for ``megatron.training``: the bridge between its model configuration and the ExoFormer classes."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.training import resolve_ddp_bucket_size, wrap_model_chunks_with_ddp
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.gpt import ExoGPTModel
from megatron_exo.model.initialization import initialize_weights
from megatron_exo.model.specs import exo_block_spec

# Megatron points to HybridModel at every construction of a GPTModel; our layers are ready for it, its block is not.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@dataclass(kw_only=True)
class ExoModelConfig(GPTModelConfig):
    """``GPTModelConfig`` around an :class:`ExoTransformerConfig`."""

    builder: ClassVar[str] = "megatron_exo.builder.ExoModelBuilder"
    true_vocab_size: int | None = None
    """The tokenizer's vocabulary; embedding and head rows beyond it are padding."""
    init_recipe: str = "paper"
    """How matrices start: one of :data:`megatron_exo.model.initialization.RECIPES`."""
    init_seed: int = 1234
    layer_wise_optimizer: bool = False
    """Whether data-parallel ranks share the optimizer of matrices by whole matrices, each of which one rank updates."""


class ExoModelBuilder(GPTModelBuilder):
    """Builds one pipeline chunk; wrapping and distribution are Megatron's."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> ExoGPTModel:
        """The chunk of this rank at virtual stage ``vp_stage``, on the current device, not wrapped."""
        config: ExoModelConfig = self._model_config
        transformer: ExoTransformerConfig = config.transformer
        vp_size = transformer.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage, vp_size) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage, vp_size) and is_pp_last_stage(pg_collection.pp)
        if config.vocab_size is None or config.true_vocab_size is None:
            raise ValueError("ExoModelConfig needs vocab_size and true_vocab_size before a model is built")
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size, config.make_vocab_size_divisible_by, transformer.tensor_model_parallel_size
            )
        model = ExoGPTModel(
            config=transformer,
            transformer_layer_spec=exo_block_spec(transformer, vp_stage, pg_collection.pp.rank()),
            vocab_size=vocab_size,
            true_vocab_size=config.true_vocab_size,
            max_sequence_length=config.seq_length,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=config.rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            seq_len_interpolation_factor=config.seq_len_interpolation_factor,
            scatter_embedding_sequence_parallel=config.scatter_embedding_sequence_parallel,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        if transformer.perform_initialization:
            initialize_weights(model, config.init_recipe, config.init_seed, config.true_vocab_size)
        return model

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None = None,
        *args: Any,
        wrap_with_ddp: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """The chunks of this rank, wrapped.

        For a layer-wise optimizer the gradient buffers must be cut between matrices, which of Megatron's two ways to
        wrap chunks only the other one, for a model without a configuration, can do: it is called here.
        """
        config: ExoModelConfig = self._model_config
        if not (wrap_with_ddp and config.layer_wise_optimizer):
            return super().build_distributed_models(
                pg_collection, ddp_config, *args, wrap_with_ddp=wrap_with_ddp, **kwargs
            )
        assert ddp_config is not None, "a wrapped model needs a ddp_config"
        chunks = super().build_distributed_models(pg_collection, ddp_config, *args, wrap_with_ddp=False, **kwargs)
        count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        size = resolve_ddp_bucket_size(ddp_config, pg_collection.dp_cp, ddp_config.overlap_grad_reduce, count)
        ddp_config.bucket_size = size
        # Chunks but the first are reduced as one bucket, as are later stages.
        is_first = [number == 0 for number in range(len(chunks))]
        return wrap_model_chunks_with_ddp(
            chunks,
            config.transformer,
            ddp_config,
            use_layer_wise_distributed_optimizer=True,
            pg_collection=pg_collection,
            bucket_sizes=[size if first and pg_collection.pp.rank() == 0 else None for first in is_first],
            disable_bucketing_per_chunk=[not first for first in is_first],
        )


def model_config_from_args(args: Namespace, exo: ExoConfig, vocab_size: int) -> ExoModelConfig:
    """The model of a parsed command line.

    Args:
        args: Megatron's namespace after validation.
        exo: the point on the axes (:func:`megatron_exo.arguments.exo_config_from_args`).
        vocab_size: the tokenizer's vocabulary, before padding.

    Raises:
        ExoConfigError: when Megatron's arguments and the axes do not go together.
    """
    for name, instead in (
        ("heterogeneous_layers_config_path", "one layer spec for all layers"),
        ("spec", "--transformer-impl to choose a backend"),
    ):
        if getattr(args, name, None):
            raise ExoConfigError(f"--{name.replace('_', '-')} would replace ExoFormer's layers; use {instead}")
    # Megatron copies each field of the configuration class that it finds on the namespace. The axes are lent to it
    # for the call only: the namespace is saved in checkpoints, and there it holds plain values.
    args.exo = exo
    try:
        transformer = core_transformer_config_from_args(args, config_class=ExoTransformerConfig)
    finally:
        del args.exo
    config: ExoModelConfig = gpt_config_from_args(args, config=transformer, model_config_cls=ExoModelConfig)
    config.true_vocab_size = vocab_size
    config.init_recipe, config.init_seed = args.exo_init, args.seed
    config.layer_wise_optimizer = args.use_layer_wise_distributed_optimizer
    return config
