"""What an ExoFormer costs: parameters and floating-point operations by part, from its axes and sizes alone.

Nothing here imports torch, so plans, presets and reports can count models that no machine at hand could build.
"""

from __future__ import annotations

from megatron_exo.config import ExoConfig
from megatron_exo.sizes import ModelSizes

BACKWARD_AND_FORWARD = 3
"""Training costs this many forward passes: the backward pass computes two products for each one of the forward."""


def parameters(exo: ExoConfig, sizes: ModelSizes) -> dict[str, int]:
    """Parameters of each part; the values add up to the size of the model, frozen anchor matrices included.

    ``projections`` are the layers' Q, K and V matrices. ``anchor`` holds the anchor's own matrices and the gains of
    the anchor norms, ``mixing`` the coefficients λ (or what a control has in their place) and the gains of post-mix
    norms. Parts that a variant does not have are 0.
    """
    hidden, layers = sizes.hidden_size, sizes.num_layers
    return {
        "embedding": sizes.vocab_size * hidden,
        "head": 0 if sizes.tied_embeddings else sizes.vocab_size * hidden,
        "projections": layers * hidden * sizes.width("qkv"),
        "gate": layers * hidden * sizes.width("g") if exo.has_gate else 0,
        "output_projection": layers * sizes.width("q") * hidden,
        "mlp": layers * 3 * hidden * sizes.ffn_hidden_size,
        "anchor": _anchor_parameters(exo, sizes),
        "mixing": _mixing_parameters(exo, sizes),
        "dynamic_mixing": _mixed_layers(exo, sizes) * _dynamic_parameters(exo, sizes) if exo.is_dynamic else 0,
        # Before attention and MLP, on the heads of Q and of K, and once after the last layer.
        "norms": layers * (2 * hidden + 2 * sizes.kv_channels) + hidden,
    }


def flops_per_token(exo: ExoConfig, sizes: ModelSizes) -> dict[str, int]:
    """Floating-point operations of one forward pass per token, by part; a multiply-add counts as two.

    ``attention`` is the product of Q with the keys and of the probabilities with the values, causal: a token sees
    (seq_length + 1) / 2 keys on average. ``mixing`` is elementwise: ``λ1 a + λ2 s`` is three operations per channel,
    and with dynamic mixing ``γ λ`` is one more for each coefficient. Not counted: the embedding lookup, norms, RoPE,
    softmax and activation functions with their products (SwiGLU, the gate's sigmoid). Interventions that drop a term
    are counted as if they did not.
    """
    hidden, layers = sizes.hidden_size, sizes.num_layers
    mixed_layers = _mixed_layers(exo, sizes)
    return {
        "projections": 2 * layers * hidden * sizes.width("qkv"),
        "gate": 2 * layers * hidden * sizes.width("g") if exo.has_gate else 0,
        "output_projection": 2 * layers * sizes.width("q") * hidden,
        "mlp": 2 * layers * 3 * hidden * sizes.ffn_hidden_size,
        # 2 products x 2 operations x (seq_length + 1) / 2 keys.
        "attention": 2 * layers * (sizes.seq_length + 1) * sizes.width("q"),
        "anchor": 2 * hidden * sizes.width(exo.pathways) if exo.is_exogenous else 0,
        "mixing": _mixing_flops(exo, sizes),
        "dynamic_mixing": (
            2 * mixed_layers * exo.dynamic_hidden_size * (hidden + exo.num_dynamic_outputs) if exo.is_dynamic else 0
        ),
        "head": 2 * hidden * sizes.vocab_size,
    }


def training_flops_per_token(exo: ExoConfig, sizes: ModelSizes) -> int:
    """Floating-point operations of forward and backward per token: three times :func:`flops_per_token`.

    These are the operations that the model needs, so activation recompute does not add to them; nor does a frozen
    anchor take the weight gradients off that it does not need.
    """
    return BACKWARD_AND_FORWARD * sum(flops_per_token(exo, sizes).values())


def _mixed_layers(exo: ExoConfig, sizes: ModelSizes) -> int:
    return sum(exo.mixes(layer) for layer in range(1, sizes.num_layers + 1))


def _coefficients(exo: ExoConfig, sizes: ModelSizes) -> int:
    """Entries of all λ of one layer: two per scalar, head or channel of each mixed pathway."""
    if exo.granularity == "scalar":
        return 2 * len(exo.pathways)
    if exo.granularity == "headwise":
        return 2 * sum(sizes.num_heads(pathway) for pathway in exo.pathways)
    return 2 * sizes.width(exo.pathways)


def _anchor_parameters(exo: ExoConfig, sizes: ModelSizes) -> int:
    if exo.is_exogenous:
        return sizes.hidden_size * sizes.width(exo.pathways) + len(exo.anchor_norm) * sizes.kv_channels
    # An internal anchor's Q and K come out of layer 1's own QK-norm; only V and G need a norm.
    return len(set(exo.anchor_norm) & set("vg")) * sizes.kv_channels


def _mixing_parameters(exo: ExoConfig, sizes: ModelSizes) -> int:
    if exo.control == "qk-bias":
        return sizes.num_layers * sizes.width("qk")
    if exo.control == "embedding-residual":
        return sizes.num_layers * (1 if exo.granularity == "scalar" else sizes.hidden_size)
    per_layer = _coefficients(exo, sizes) + len(exo.post_norm) * sizes.kv_channels
    return _mixed_layers(exo, sizes) * per_layer


def _dynamic_parameters(exo: ExoConfig, sizes: ModelSizes) -> int:
    """W1, W2 and b2 of one layer."""
    return exo.dynamic_hidden_size * (sizes.hidden_size + exo.num_dynamic_outputs) + exo.num_dynamic_outputs


def _mixing_flops(exo: ExoConfig, sizes: ModelSizes) -> int:
    if exo.control == "qk-bias":
        return sizes.num_layers * sizes.width("qk")
    if exo.control == "embedding-residual":
        return sizes.num_layers * 2 * sizes.hidden_size
    gamma_times_lambda = _coefficients(exo, sizes) if exo.is_dynamic else 0
    return _mixed_layers(exo, sizes) * (3 * sizes.width(exo.pathways) + gamma_times_lambda)
