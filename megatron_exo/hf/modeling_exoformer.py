"""ExoFormer (arXiv 2601.08131) for transformers: one model for every variant, told apart by its configuration.

In every layer, with S one of the projections Q, K, V and the gate logits G,

    Ŝ = λ₁ ⊙ S_anchor + λ₂ ⊙ S

where the anchor is a second representation of the same tokens that all layers share. A token's anchor needs nothing
but that token, and keys and values are cached after mixing, so the cache is that of a model without anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_exoformer import ExoFormerConfig


class ExoFormerRotaryEmbedding(nn.Module):
    """Cosines and sines of rotary embeddings; pair i is channels i and i + head_dim / 2."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        initialise = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        frequencies, self.attention_scaling = initialise(config)
        self.inv_freq = nn.Buffer(frequencies, persistent=False)
        self.original_inv_freq = nn.Buffer(frequencies.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: ExoFormerConfig, **kwargs) -> tuple[torch.Tensor, float]:
        """The frequencies base^(-2i / head_dim), and no scaling."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [b, s] → cosines and sines [b, 1, s, head_dim] in the dtype of ``x``."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings to ``x`` [b, heads, s, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention_forward(
    module: ExoFormerAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that can show its weights: the output [b, s, heads, head_dim] and the weights [b, heads, s, keys]."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ExoFormerAnchor(nn.Module):
    """An anchor with matrices of its own, applied to the embeddings or to an early layer's output."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.pathways, self.head_dim = config.pathways, config.head_dim
        self.is_frozen = config.anchor_weights == "frozen"
        for pathway in config.pathways:
            width = config.num_heads(pathway) * config.head_dim
            self.add_module(f"{pathway}_proj", nn.Linear(config.hidden_size, width, bias=False))
        for pathway in config.anchor_norm:
            self.add_module(f"{pathway}_norm", nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps))

    def train(self, mode: bool = True) -> ExoFormerAnchor:
        """Also freezes what is to be frozen: loading puts new parameters, which all train, in place of the old."""
        if self.is_frozen:
            for pathway in self.pathways:
                getattr(self, f"{pathway}_proj").requires_grad_(False)
        return super().train(mode)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden_size] → the pathways, one after the other, [b, s, heads of all pathways, head_dim]."""
        parts = []
        for pathway in self.pathways:
            part = getattr(self, f"{pathway}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim))
            norm = getattr(self, f"{pathway}_norm", None)
            parts.append(part if norm is None else norm(part))
        return torch.cat(parts, dim=-2)


class ExoFormerInternalAnchor(nn.Module):
    """The first layer's own projections as an anchor: Q and K with its QK-norm, V and G with norms of their own."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.pathways, self.anchor_norm = config.pathways, config.anchor_norm
        for pathway in config.anchor_norm:
            if pathway in "vg":
                self.add_module(f"{pathway}_norm", nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps))

    def forward(self, raw: dict[str, torch.Tensor], qk_normed: dict[str, torch.Tensor]) -> torch.Tensor:
        """Projections by pathway, each [b, s, heads, head_dim] → as :class:`ExoFormerAnchor`."""
        parts = []
        for pathway in self.pathways:
            if pathway not in self.anchor_norm:
                parts.append(raw[pathway])
            elif pathway in "qk":
                parts.append(qk_normed[pathway])
            else:
                parts.append(getattr(self, f"{pathway}_norm")(raw[pathway]))
        return torch.cat(parts, dim=-2)


class ExoFormerMixing(nn.Module):
    """The coefficients λ of one layer, and the norms after mixing; ``lambda_q1`` weighs the anchor's Q, ``lambda_q2``
    the layer's own. Shapes: [1] scalar, [heads, 1] headwise, [heads, head_dim] elementwise."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.config = config
        for pathway in config.pathways:
            heads = config.num_heads(pathway)
            shape = {"scalar": (1,), "headwise": (heads, 1), "elementwise": (heads, config.head_dim)}
            for term in "12":
                self.register_parameter(f"lambda_{pathway}{term}", nn.Parameter(torch.empty(shape[config.granularity])))
        for pathway in config.post_norm:
            self.add_module(f"{pathway}_post_norm", nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps))

    def forward(
        self, current: dict[str, torch.Tensor], anchor: torch.Tensor, gammas: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Mix the pathways of the configuration; other projections pass through.

        Args:
            current: the layer's projections, [b, s, heads, head_dim] each.
            anchor: see :class:`ExoFormerAnchor`.
            gammas: ``"q1"`` … ``"g2"`` → [b, s, 1, 1]; empty with static mixing.
        """
        config, mixed = self.config, dict(current)
        anchors = anchor.split([current[pathway].shape[-2] for pathway in config.pathways], dim=-2)
        for pathway, part in zip(config.pathways, anchors, strict=True):
            lambda_1, lambda_2 = (getattr(self, f"lambda_{pathway}{term}") for term in "12")
            if gammas:
                lambda_1, lambda_2 = gammas[f"{pathway}1"] * lambda_1, gammas[f"{pathway}2"] * lambda_2
            if pathway in config.drop_anchor:
                mixed[pathway] = lambda_2 * current[pathway]
            elif pathway in config.drop_current:
                mixed[pathway] = lambda_1 * part
            else:
                mixed[pathway] = lambda_1 * part + lambda_2 * current[pathway]
            if pathway in config.post_norm:
                mixed[pathway] = getattr(self, f"{pathway}_post_norm")(mixed[pathway])
        return mixed


class ExoFormerDynamicMixing(nn.Module):
    """γ = sigmoid(W₂ GELU(W₁ x) + b₂): one factor per token for each λ, all ½ at the start of training."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.names = [f"{pathway}{term}" for pathway in config.pathways for term in "12"]
        self.fc1 = nn.Linear(config.hidden_size, config.dynamic_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.dynamic_hidden_size, len(self.names))
        self.fc2.starts_at_zero = True  # type: ignore[assignment]

    def forward(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The normed input of the layer [b, s, hidden_size] → ``"q1"`` … ``"g2"``, [b, s, 1, 1] each."""
        gammas = self.fc2(F.gelu(self.fc1(hidden_states))).sigmoid()
        return {name: gamma[..., None, None] for name, gamma in zip(self.names, gammas.unbind(-1), strict=True)}


class ExoFormerAttention(nn.Module):
    """Project, mix with the anchor, normalise Q and K, rotate, attend, gate, project."""

    def __init__(self, config: ExoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        for component in config.components:
            bias = config.control == "qk-bias" and component in "qk"
            width = config.num_heads(component) * config.head_dim
            self.add_module(f"{component}_proj", nn.Linear(config.hidden_size, width, bias=bias))
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        self.o_proj.starts_at_zero = True  # type: ignore[assignment]
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        mixes = config.mixes(layer_idx)
        self.mixing = ExoFormerMixing(config) if mixes else None
        self.dynamic_mixing = ExoFormerDynamicMixing(config) if mixes and config.mixing == "dynamic" else None
        is_source = config.anchor == "internal" and layer_idx == 0
        self.anchor = ExoFormerInternalAnchor(config) if is_source else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        anchor: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Unpack[FlashAttentionKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The output [b, s, hidden_size], the attention weights where they are known, and the anchor from here on."""
        raw = {
            component: getattr(self, f"{component}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim))
            for component in self.config.components
        }
        mixed = raw
        if self.mixing is not None:
            gammas = self.dynamic_mixing(hidden_states) if self.dynamic_mixing is not None else {}
            mixed = self.mixing(raw, anchor, gammas)
        query, key, value = self.q_norm(mixed["q"]), self.k_norm(mixed["k"]), mixed["v"]
        if self.anchor is not None:
            anchor = self.anchor(raw, {"q": query, "k": key})

        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        if "g" in mixed:
            output = (output * mixed["g"].float().sigmoid()).to(output.dtype)
        return self.o_proj(output.flatten(-2)), weights, anchor


class ExoFormerMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.down_proj.starts_at_zero = True  # type: ignore[assignment]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class ExoFormerDecoderLayer(GradientCheckpointingLayer):
    """A pre-norm layer. The anchor goes through it as hidden states do, and is changed only by the layer that makes it;
    with the control ``embedding-residual`` the input embeddings go in its place."""

    def __init__(self, config: ExoFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ExoFormerAttention(config, layer_idx)
        self.mlp = ExoFormerMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        size = 1 if config.granularity == "scalar" else config.hidden_size
        is_control = config.control == "embedding-residual"
        self.embedding_residual = nn.Parameter(torch.empty(size)) if is_control else None

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        anchor: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [b, s, hidden_size], and the anchor for the next layer."""
        if self.embedding_residual is not None:
            hidden_states = hidden_states + self.embedding_residual * anchor  # type: ignore[operator]
        attended, _, anchor = self.self_attn(
            self.input_layernorm(hidden_states), anchor, position_embeddings, attention_mask, cache=cache, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), anchor


class ExoFormerPreTrainedModel(PreTrainedModel):
    config_class = ExoFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ExoFormerDecoderLayer", "ExoFormerAnchor"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, type[nn.Module]]] = {
        "hidden_states": ExoFormerDecoderLayer,
        "attentions": ExoFormerAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The paper's start: matrices normal and cut at three deviations, but those that write to the residual stream
        and the head zero, so that the first loss is the logarithm of the vocabulary."""
        std = self.config.initializer_range
        super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init.trunc_normal_(module.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, ExoFormerMixing):
            for parameter in module.parameters(recurse=False):
                init.constant_(parameter, 1.0 if self.config.mixing == "dynamic" else 0.5)
        elif isinstance(module, ExoFormerDecoderLayer) and module.embedding_residual is not None:
            init.zeros_(module.embedding_residual)


class ExoFormerModel(ExoFormerPreTrainedModel):
    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.anchor = ExoFormerAnchor(config) if config.anchor_source is not None else None
        self.layers = nn.ModuleList(ExoFormerDecoderLayer(config, idx) for idx in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExoFormerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Run all layers.

        Args:
            input_ids: [b, s], or ``inputs_embeds`` [b, s, hidden_size] in place of them.
            attention_mask: [b, keys], 0 for padding.
            position_ids: [b, s]. Without a mask and a cache, each restart begins a document that sees no other.
            cache: what earlier calls returned.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen).unsqueeze(0)
        if not isinstance(attention_mask, dict):
            attention_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
        else:  # made by ``generate``, one entry per kind of layer
            attention_mask = attention_mask["full_attention"]
        if use_cache and cache is None:
            # After the mask: beside a cache, even an empty one, positions would not be searched for documents.
            cache = DynamicCache(config=self.config)

        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        anchor = hidden_states if self.config.control == "embedding-residual" else None
        for idx, layer in enumerate(self.layers):
            if self.anchor is not None and idx == self.config.anchor_source:
                anchor = self.anchor(hidden_states)
            hidden_states, anchor = layer(
                hidden_states,
                anchor,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache if use_cache else None)


class ExoFormerForCausalLM(ExoFormerPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ExoFormerConfig) -> None:
        super().__init__(config)
        self.model = ExoFormerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.starts_at_zero = not config.tie_word_embeddings  # type: ignore[assignment]
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """See :meth:`ExoFormerModel.forward`; ``labels`` [b, s] are the inputs themselves, -100 where none counts, and
        ``logits_to_keep`` the number of last positions (0: all), or which positions, to compute logits for."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["ExoFormerForCausalLM", "ExoFormerModel", "ExoFormerPreTrainedModel"]
