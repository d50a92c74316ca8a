"""Initial weights that depend on the seed and the variant, and on nothing else.

Megatron draws each shard on its rank from a seed per pipeline stage, so another layout, another padding of the
vocabulary or another device starts from other weights. Here every tensor is drawn whole, on the CPU in float32, from a
generator seeded by the run's seed and the tensor's name, and each rank keeps its part.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.shards import cut, named_shards, whole_shape

RECIPES = ("paper", "reference", "megatron")
_ZERO_AT_START = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight", "output_layer.weight")


@torch.no_grad()
def initialize_weights(model: torch.nn.Module, recipe: str, seed: int, vocab_size: int) -> None:
    """Fill the matrices of one model chunk. λ, gains and biases keep the values that their modules gave them.

    Args:
        model: an ``ExoGPTModel``, not wrapped.
        recipe: ``paper``: normal with ``init_method_std``, cut at three deviations; the attention's output projection,
            the second FFN matrix and the head are zero, so that the first loss is the logarithm of the vocabulary;
            the second matrix of dynamic mixing is zero, so that γ = 0.5. ``reference``: as the author's code, which
            re-draws that matrix like the others (γ starts between 0.486 and 0.511). ``megatron``: normal, not cut,
            and residual projections scaled by 1/√(2·layers) instead of zero.
        seed: the run's seed.
        vocab_size: rows of the embedding and the head that stand for tokens; the padding beyond is zero.
    """
    config: ExoTransformerConfig = model.config  # type: ignore[assignment]
    for name, shard in named_shards([model]):
        if shard.dim() != 2:
            continue
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"  # the copy that the last pipeline stage holds
        whole = draw(name, whole_shape(name, shard, vocab_size), config, recipe, seed)
        shard.copy_(cut(name, whole, shard))


def draw(name: str, shape: tuple[int, ...], config: ExoTransformerConfig, recipe: str, seed: int) -> Tensor:
    """The initial value of the whole tensor ``name``, float32 on the CPU."""
    std = config.init_method_std
    if name.endswith("dynamic_mixing.fc2.weight") and recipe != "reference":
        return torch.zeros(shape)
    if name.endswith(_ZERO_AT_START):
        if recipe != "megatron":
            return torch.zeros(shape)
        if not name.startswith("output_layer"):
            std /= math.sqrt(2 * config.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if recipe == "megatron":
        return torch.empty(shape).normal_(0.0, std, generator=generator)
    return torch.nn.init.trunc_normal_(torch.empty(shape), 0.0, std, -3 * std, 3 * std, generator=generator)
