"""Layer specs: which classes each backend brings to the same ExoFormer layer."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_exo.model.attention import ExoSelfAttention
from megatron_exo.model.backend import get_backend
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.layer import ExoTransformerLayer

_CHECKPOINT_KEYS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Separate norms are saved under the names that fused norm-and-linear modules give theirs, so that checkpoints of
every backend and variant have the same keys."""


def exo_layer_spec(config: ExoTransformerConfig) -> ModuleSpec:
    """The spec of one ExoFormer layer.

    Norm and linear are one module where the backend has such a one; dynamic mixing reads the normed input itself, so
    there the norm before the projections stays a module of its own.
    """
    backend = get_backend(config.transformer_impl)
    norm = backend.layer_norm(rms_norm=True)
    qk_norm = backend.layer_norm(rms_norm=True, for_qk=True)
    fuses = backend.fuse_layernorm_and_linear()
    fuses_attention = fuses and not config.exo.is_dynamic
    return ModuleSpec(
        module=ExoTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fuses_attention else norm,
            self_attention=ModuleSpec(
                module=ExoSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=(
                        backend.column_parallel_layer_norm_linear()
                        if fuses_attention
                        else backend.column_parallel_linear()
                    ),
                    core_attention=backend.core_attention(),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fuses else norm,
            mlp=get_mlp_module_spec_for_backend(backend),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_CHECKPOINT_KEYS,  # names no fused module has are simply not met
        ),
    )


def exo_block_spec(
    config: ExoTransformerConfig, vp_stage: int | None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk and the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[exo_layer_spec(config)] * get_num_layers_to_build(config, vp_stage, pp_rank),
        layer_norm=get_backend(config.transformer_impl).layer_norm(rms_norm=True),
    )
