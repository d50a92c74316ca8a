"""Megatron's own GPT through ``megatron.training.pretrain``, with nothing of ExoFormer in it.

What trains here shows the platform at work: the local backend's norm and attention, the patches, the data provider.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelConfig
from torch import Tensor

from megatron_exo.data.provider import train_valid_test_datasets_provider
from megatron_exo.forward_step import get_batch
from megatron_exo.model.backend import get_backend

ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights
    --hidden-dropout 0.1 --attention-dropout 0.1
    --transformer-impl local --distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64
    --split 90,5,5 --num-workers 0
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style linear --clip-grad 1.0
    --log-interval 1 --eval-iters 1 --dist-ckpt-optim-fully-reshardable
""")


def block_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's layers with the norm and the attention of :class:`~megatron_exo.model.backend.LocalBackend`."""
    backend = get_backend("local")
    norm = backend.layer_norm(rms_norm=True)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=backend.core_attention(),
                    linear_proj=backend.row_parallel_linear(),
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config.transformer, vp_stage), layer_norm=norm
    )


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Megatron's namespace for :data:`ARGUMENTS` and others after them."""
    sys.argv = ["plain_gpt", *ARGUMENTS, *arguments]
    args: Namespace = parse_and_validate_args()
    args.exo_documents = "joined"  # our datasets and batches ask
    return args


def train(arguments: Sequence[str]) -> list[tuple[float, int]] | None:
    """Train as the command line says; makes and destroys the process group.

    Returns:
        Loss sum and token count of every micro-batch trained on, in order, on the first tensor-parallel rank of the
        last pipeline stage; ``None`` elsewhere.
    """
    args = parse_arguments(arguments)
    model_config = gpt_config_from_args(args, config=core_transformer_config_from_args(args))
    model_config.transformer_layer_spec = block_spec
    losses: list[tuple[float, int]] = []
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        partial(_forward_step, losses),
    )
    is_reporter = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return losses if is_reporter else None


def _forward_step(
    losses: list[tuple[float, int]], data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids, _ = get_batch(
        data_iterator, vp_stage, training=model.training
    )
    output = model(tokens, position_ids, attention_mask, labels=labels)

    def reduce(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert loss_mask is not None
        total, count = (output.float() * loss_mask).sum(), loss_mask.sum().to(torch.int)
        if model.training:
            losses.append((total.item(), count.item()))
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, reduce
