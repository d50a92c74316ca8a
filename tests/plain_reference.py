"""ExoFormer written down once more, as plainly as possible: one file of PyTorch, no Megatron, no parallelism.

Other tests hold the production model against this one, so it follows the paper's equations (arXiv 2601.08131)
and trades every optimisation for being readable. Parameters carry the production model's unsharded names and
layouts (:func:`parameter_shapes`), so one state dict loads into both.

Shapes: ``b`` sequences of ``s`` tokens; ``h`` hidden size; per-head tensors are ``[b, s, heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, silu

from megatron_exo.config import ExoConfig


@dataclass(frozen=True)
class PlainSizes:
    """The sizes of a model; the defaults are small enough for a test of milliseconds."""

    num_layers: int = 3
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_query_groups: int = 4
    kv_channels: int = 8
    ffn_hidden_size: int = 64
    vocab_size: int = 64
    rotary_base: float = 500000.0
    eps: float = 1e-6
    tied: bool = False
    """Whether the output layer is the embedding."""

    def heads(self, component: str) -> int:
        """How many heads a component has: K and V one per query group, Q and G one per attention head."""
        return self.num_query_groups if component in "kv" else self.num_attention_heads


def parameter_shapes(exo: ExoConfig, sizes: PlainSizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the forward pass."""
    h, head_dim, ffn = sizes.hidden_size, sizes.kv_channels, sizes.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (sizes.vocab_size, h)}

    def rows(components: Iterable[str]) -> int:
        return sum(sizes.heads(component) for component in components) * head_dim

    def coefficient(component: str) -> tuple[int]:
        heads = sizes.heads(component)
        return ({"scalar": 1, "headwise": heads, "elementwise": heads * head_dim}[exo.granularity],)

    for n in range(sizes.num_layers):
        layer, attention = f"decoder.layers.{n}", f"decoder.layers.{n}.self_attention"
        if exo.control == "embedding-residual":
            shapes[f"{layer}.embedding_residual.weight"] = (1,) if exo.granularity == "scalar" else (h,)
        shapes[f"{layer}.input_layernorm.weight"] = (h,)
        shapes[f"{attention}.linear_qkv.weight"] = (rows(exo.components), h)
        shapes[f"{attention}.q_layernorm.weight"] = (head_dim,)
        shapes[f"{attention}.k_layernorm.weight"] = (head_dim,)
        if exo.control == "qk-bias":
            shapes |= {f"{attention}.mixing.bias_{c}": (rows(c),) for c in "qk"}
        if exo.mixes(n + 1):
            shapes |= {f"{attention}.mixing.lambda_{c}{i}": coefficient(c) for c in exo.pathways for i in (1, 2)}
            shapes |= {f"{attention}.mixing.{c}_post_norm": (head_dim,) for c in exo.post_norm}
            if exo.is_dynamic:
                shapes[f"{attention}.dynamic_mixing.fc1.weight"] = (exo.dynamic_hidden_size, h)
                shapes[f"{attention}.dynamic_mixing.fc2.weight"] = (exo.num_dynamic_outputs, exo.dynamic_hidden_size)
                shapes[f"{attention}.dynamic_mixing.fc2.bias"] = (exo.num_dynamic_outputs,)
        shapes[f"{attention}.linear_proj.weight"] = (h, sizes.num_attention_heads * head_dim)
        shapes[f"{layer}.pre_mlp_layernorm.weight"] = (h,)
        shapes[f"{layer}.mlp.linear_fc1.weight"] = (2 * ffn, h)
        shapes[f"{layer}.mlp.linear_fc2.weight"] = (h, ffn)
        if n + 1 == exo.source_layer and exo.is_exogenous:
            shapes[f"{layer}.anchor.linear_qkv.weight"] = (rows(exo.pathways), h)
            shapes |= {f"{layer}.anchor.{c}_norm": (head_dim,) for c in exo.anchor_norm}
        if n + 1 == exo.source_layer and exo.anchor == "internal":
            shapes |= {f"{layer}.anchor.{c}_norm": (head_dim,) for c in exo.anchor_norm if c in "vg"}
    shapes["decoder.final_layernorm.weight"] = (h,)
    if not sizes.tied:
        shapes["output_layer.weight"] = (sizes.vocab_size, h)
    return shapes


def random_state(exo: ExoConfig, sizes: PlainSizes, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights in which nothing sits at 0, 0.5 or 1, so that every term and every gradient counts."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(exo, sizes).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight") or name.endswith("_norm"):
            state[name] = 1 + 0.2 * noise
        elif len(shape) == 1:
            state[name] = 0.6 * noise
        elif name.startswith("embedding"):
            state[name] = 0.5 * noise
        else:
            state[name] = noise * shape[1] ** -0.5
    return state


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) ⊙ gain over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rope(x: Tensor, base: float) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of ``x`` [b, s, heads, head_dim] by position · base^(-2i/head_dim)."""
    positions, half = torch.arange(x.shape[1]), x.shape[-1] // 2
    angles = positions[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None, :].to(x), angles.sin()[:, None, :].to(x)
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QKᵀ/√head_dim) V, every query group's K and V serving its heads; ``[b, s, heads, head_dim]``."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def loss(logits: Tensor, labels: Tensor, z_loss_weight: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """``(loss, cross_entropy, z_square_mean)``: loss = cross-entropy + weight · mean(logsumexp²), all scalars."""
    entropy = cross_entropy(logits.flatten(0, 1), labels.flatten())
    z_square_mean = logits.logsumexp(-1).square().mean()
    return entropy + z_loss_weight * z_square_mean, entropy, z_square_mean


class PlainExoFormer(nn.Module):
    """An ExoFormer at one point on the axes; ``forward(tokens [b, s] int64)`` gives logits ``[b, s, vocab]``.

    Weights start at :func:`random_state` with seed 0; load others with ``load_state_dict``.
    """

    def __init__(self, exo: ExoConfig, sizes: PlainSizes) -> None:
        super().__init__()
        self.exo, self.sizes = exo, sizes
        for name, value in random_state(exo, sizes).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            frozen = exo.anchor_weights == "frozen" and name.endswith("anchor.linear_qkv.weight")
            module.register_parameter(leaf, nn.Parameter(value, requires_grad=not frozen))

    def forward(self, tokens: Tensor) -> Tensor:
        exo, p = self.exo, dict(self.named_parameters())
        embeddings = hidden = p["embedding.word_embeddings.weight"][tokens]  # H_0
        anchor: Mapping[str, Tensor] = self.exogenous_anchor(embeddings) if exo.anchor == "h0" else {}
        for n in range(self.sizes.num_layers):
            layer = f"decoder.layers.{n}"
            if exo.control == "embedding-residual":
                hidden = hidden + p[f"{layer}.embedding_residual.weight"] * embeddings
            normed = self.norm(hidden, f"{layer}.input_layernorm.weight")
            attended, own_anchor = self.attention(n, normed, anchor)
            hidden = hidden + attended
            normed = self.norm(hidden, f"{layer}.pre_mlp_layernorm.weight")
            gate, value = (normed @ p[f"{layer}.mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * value) @ p[f"{layer}.mlp.linear_fc2.weight"].T
            if exo.anchor == "internal" and n == 0:
                anchor = own_anchor
            if exo.anchor in ("h1", "h2") and n + 1 == exo.source_layer:
                anchor = self.exogenous_anchor(hidden)  # H_1 or H_2
        output = "embedding.word_embeddings.weight" if self.sizes.tied else "output_layer.weight"
        return self.norm(hidden, "decoder.final_layernorm.weight") @ p[output].T

    def attention(self, n: int, x: Tensor, anchor: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Layer ``n`` (from 0) on the normed input [b, s, h]: its output, and its own projections as an anchor."""
        exo, p, name = self.exo, dict(self.named_parameters()), f"decoder.layers.{n}.self_attention"
        projections = self.project(x, p[f"{name}.linear_qkv.weight"], exo.components)
        own_anchor = {c: projections[c] for c in exo.pathways}
        if exo.mixes(n + 1):
            projections |= self.mix(name, x, anchor, projections)
        if exo.control == "qk-bias":
            for c in "qk":
                projections[c] = projections[c] + p[f"{name}.mixing.bias_{c}"].view(self.sizes.heads(c), -1)
        for c in "qk":
            projections[c] = self.norm(projections[c], f"{name}.{c}_layernorm.weight")
        if exo.anchor == "internal" and n == 0:
            for c in exo.anchor_norm:
                gain = f"decoder.layers.{n}.anchor.{c}_norm"
                own_anchor[c] = projections[c] if c in "qk" else self.norm(own_anchor[c], gain)
        q, k = (rope(projections[c], self.sizes.rotary_base) for c in "qk")
        context = causal_attention(q, k, projections["v"])
        if exo.has_gate:
            context = context * projections["g"].sigmoid()
        return context.flatten(-2) @ p[f"{name}.linear_proj.weight"].T, own_anchor

    def mix(
        self, name: str, x: Tensor, anchor: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Ŝ = γ₁ λ₁ ⊙ S_anc + γ₂ λ₂ ⊙ S for every mixed pathway S, then the post-norm if it has one."""
        exo, p = self.exo, dict(self.named_parameters())
        gamma = torch.ones(*x.shape[:2], exo.num_dynamic_outputs)
        if exo.is_dynamic:
            inner = gelu(x @ p[f"{name}.dynamic_mixing.fc1.weight"].T)
            outer = inner @ p[f"{name}.dynamic_mixing.fc2.weight"].T + p[f"{name}.dynamic_mixing.fc2.bias"]
            gamma = outer.sigmoid()
        mixed = {}
        for index, c in enumerate(exo.pathways):
            gamma_1, gamma_2 = (gamma[..., 2 * index + i, None, None] for i in (0, 1))
            lambda_1, lambda_2 = (self.coefficient(p[f"{name}.mixing.lambda_{c}{i}"], c) for i in (1, 2))
            terms = []
            if c not in exo.drop_anchor:
                terms.append(gamma_1 * lambda_1 * anchor[c])
            if c not in exo.drop_current:
                terms.append(gamma_2 * lambda_2 * current[c])
            mixed[c] = torch.stack(terms).sum(0)
            if c in exo.post_norm:
                mixed[c] = self.norm(mixed[c], f"{name}.mixing.{c}_post_norm")
        return mixed

    def exogenous_anchor(self, source: Tensor) -> dict[str, Tensor]:
        """The source H_0, H_1 or H_2 [b, s, h] through the anchor's own matrices, normalised per head."""
        assert self.exo.source_layer is not None
        name = f"decoder.layers.{self.exo.source_layer - 1}.anchor"
        order = [c for c in "qgkv" if c in self.exo.pathways]
        anchor = self.project(source, self.get_parameter(f"{name}.linear_qkv.weight"), order)
        return anchor | {c: self.norm(anchor[c], f"{name}.{c}_norm") for c in self.exo.anchor_norm}

    def project(self, x: Tensor, weight: Tensor, components: Iterable[str]) -> dict[str, Tensor]:
        """``x`` [b, s, h] by rows packed per query group, to ``[b, s, heads, head_dim]`` per component."""
        groups, head_dim = self.sizes.num_query_groups, self.sizes.kv_channels
        widths = {c: self.sizes.heads(c) // groups * head_dim for c in components}
        blocks = (x @ weight.T).unflatten(-1, (groups, -1)).split(list(widths.values()), dim=-1)
        return {c: block.unflatten(-1, (-1, head_dim)).flatten(2, 3) for c, block in zip(widths, blocks, strict=True)}

    def coefficient(self, value: Tensor, component: str) -> Tensor:
        """A λ as stored, 1-D, shaped to broadcast over ``[b, s, heads, head_dim]``."""
        return value if value.numel() == 1 else value.view(self.sizes.heads(component), -1)

    def norm(self, x: Tensor, gain: str) -> Tensor:
        return rms_norm(x, self.get_parameter(gain), self.sizes.eps)
