"""The configuration of an ExoFormer (arXiv 2601.08131): the sizes of the model, and where it lies on the paper's axes.

This file and ``modeling_exoformer.py`` are copied into model folders, so they import only torch and transformers.
"""

from __future__ import annotations

from typing import ClassVar

from transformers import PreTrainedConfig

PATHWAYS = "qkvg"
CHOICES = {
    "gate": ("none", "elementwise"),
    "anchor": ("none", "internal", "h0", "h1", "h2"),
    "granularity": ("scalar", "headwise", "elementwise"),
    "mixing": ("static", "dynamic"),
    "anchor_weights": ("learned", "frozen"),
    "control": ("none", "qk-bias", "embedding-residual"),
}


class ExoFormerConfig(PreTrainedConfig):
    """One ExoFormer. Subsets of the pathways Q, K, V, G are strings of their letters, such as ``"qkvg"`` or ``""``.

    Args:
        gate: ``elementwise`` multiplies the attention output by sigmoid(G), one logit per channel.
        anchor: ``internal`` (the first layer's own projections), or matrices of its own applied to ``h0`` (the input
            embeddings), ``h1`` or ``h2`` (the output of the first or second layer).
        pathways: the projections that are mixed with the anchor.
        anchor_norm: the pathways whose anchor is normalised per head before mixing.
        post_norm: the pathways of ``vg`` that are normalised per head after mixing, as Q and K always are.
        granularity: one λ per layer, per head, or per head and channel.
        mixing: ``dynamic`` multiplies each λ by a sigmoid scalar per token, from a small MLP.
        anchor_weights: ``frozen`` anchor matrices are not trained.
        control: what stands in place of an anchor: a learned bias on Q and K, or the input embeddings added to the
            residual stream of every layer.
        drop_anchor: pathways whose anchor term is left out, an intervention at inference.
        drop_current: pathways whose own term is left out.
        dynamic_hidden_size: width of the hidden layer of the MLP of dynamic mixing.

    Raises:
        ValueError: an axis with an unknown value, or axes that contradict each other.
    """

    model_type = "exoformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    default_theta = 500000.0

    vocab_size: int = 50257
    hidden_size: int = 1024
    intermediate_size: int = 2048
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = None  # type: ignore[assignment]  # as many as num_attention_heads
    head_dim: int = None  # type: ignore[assignment]  # the heads together are as wide as the hidden states
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_parameters: dict = None  # type: ignore[assignment]  # plain rotary embeddings with default_theta
    attention_dropout: float = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    gate: str = "elementwise"
    anchor: str = "h0"
    pathways: str = "qkvg"
    anchor_norm: str = "qkvg"
    post_norm: str = ""
    granularity: str = "elementwise"
    mixing: str = "static"
    anchor_weights: str = "learned"
    control: str = "none"
    drop_anchor: str = ""
    drop_current: str = ""
    dynamic_hidden_size: int = 16

    def __post_init__(self, **kwargs) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        for axis, choices in CHOICES.items():
            if getattr(self, axis) not in choices:
                raise ValueError(f"{axis} is {getattr(self, axis)!r}; choose one of {', '.join(choices)}")
        for axis in ("anchor_norm", "post_norm", "drop_anchor", "drop_current"):
            if not set(getattr(self, axis)) <= set(self.pathways):
                raise ValueError(f"{axis} {getattr(self, axis)!r} names pathways that are not mixed: {self.pathways!r}")
        if not set(self.pathways) <= set(self.components):
            raise ValueError(f"pathways {self.pathways!r} are not all projections of this model: {self.components!r}")
        if bool(self.pathways) == (self.anchor == "none"):
            raise ValueError(f"anchor {self.anchor!r} with pathways {self.pathways!r}: give both, or neither")
        if self.pathways and not self.mixes(self.num_hidden_layers - 1):
            raise ValueError(f"anchor {self.anchor!r} reaches no layer: there are only {self.num_hidden_layers} layers")
        if self.control != "none" and self.anchor != "none":
            raise ValueError(
                f"control {self.control!r} stands in place of the anchor {self.anchor!r}: give one of them"
            )
        if set(self.post_norm) & set("qk"):
            raise ValueError(f"post_norm {self.post_norm!r}: Q and K are always normalised after mixing; name V or G")
        if set(self.drop_anchor) & set(self.drop_current):
            raise ValueError("drop_anchor and drop_current name the same pathway, of which nothing would be left")

    @property
    def components(self) -> str:
        """The projections that every layer computes."""
        return PATHWAYS if self.gate != "none" else "qkv"

    @property
    def anchor_source(self) -> int | None:
        """How many layers come before the anchor's own matrices; ``None`` for an anchor without any."""
        return {"h0": 0, "h1": 1, "h2": 2}.get(self.anchor)

    def mixes(self, layer_idx: int) -> bool:
        """Whether the layer, counted from 0, mixes the anchor into its projections."""
        first = 1 if self.anchor == "internal" else self.anchor_source
        return first is not None and layer_idx >= first

    def num_heads(self, component: str) -> int:
        """Heads of a projection: K and V may have fewer than Q and G."""
        return self.num_key_value_heads if component in "kv" else self.num_attention_heads

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts this variant, for inference: whole heads to each rank, in all that has heads."""
        attention, mlp, mixing = "layers.*.self_attn", "layers.*.mlp", "layers.*.self_attn.mixing"
        plan = {f"{attention}.{c}_proj": "colwise" for c in self.components}
        plan |= {f"{attention}.{c}_norm": "replicated_with_grad_allreduce" for c in "qk"}
        plan |= {f"{attention}.o_proj": "rowwise"}
        plan |= {f"{mlp}.gate_proj": "colwise", f"{mlp}.up_proj": "colwise", f"{mlp}.down_proj": "rowwise"}
        if self.anchor_source is not None:
            plan |= {f"anchor.{p}_proj": "colwise" for p in self.pathways}
            plan |= {f"anchor.{p}_norm": "replicated_with_grad_allreduce" for p in self.anchor_norm}
        elif self.anchor == "internal":
            norms = (p for p in self.anchor_norm if p in "vg")
            plan |= {f"{attention}.anchor.{p}_norm": "replicated_with_grad_allreduce" for p in norms}
        if self.granularity != "scalar":
            plan |= {f"{mixing}.lambda_{p}{term}": "colwise" for p in self.pathways for term in "12"}
        if self.pathways:
            plan |= {mixing: "replicated_with_grad_allreduce" if self.granularity == "scalar" else "local_params"}
            plan |= {f"{mixing}.{p}_post_norm": "replicated_with_grad_allreduce" for p in self.post_norm}
        return plan


__all__ = ["ExoFormerConfig"]
