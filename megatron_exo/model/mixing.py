"""The paper's equation, and the parameters that stand in it.

    Ŝ_n = λ_{n,1}^S ⊙ S_anc + λ_{n,2}^S ⊙ S_n      for S in {Q, K, V, G}

with S_anc the (normalised) anchor and S_n the layer's own projection (arXiv 2601.08131 §3). With dynamic mixing
each λ is multiplied by γ, one sigmoid scalar per token and term.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.norm import head_gain, per_head_rms_norm
from megatron_exo.model.projections import HeadLayout


def mix(anchor: Tensor | None, current: Tensor | None, lambda_1: Tensor, lambda_2: Tensor) -> Tensor:
    """``λ1 ⊙ anchor + λ2 ⊙ current``; a term given as ``None`` is left out (interventions at inference)."""
    if anchor is None:
        assert current is not None
        return lambda_2 * current
    if current is None:
        return lambda_1 * anchor
    return lambda_1 * anchor + lambda_2 * current


class _HeadSharded(MegatronModule):
    """A module whose 1-D parameters ``sharded_names`` are cut over the tensor-parallel group, whole heads to a rank.

    They are 1-D by design: matrix optimizers take 2-D parameters, and Megatron decays none that are 1-D.
    """

    def __init__(self, config: ExoTransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.pg_collection = pg_collection
        self.sharded_names: list[str] = []

    def _add_sharded(self, name: str, size: int, value: float) -> None:
        parameter = torch.nn.Parameter(torch.full((size,), value, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.register_parameter(name, parameter)
        self.sharded_names.append(name)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            dict.fromkeys(self.sharded_names, 0),
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ProjectionMixing(_HeadSharded):
    """The mixing coefficients of one layer, and the norms after mixing.

    Parameters are called ``lambda_{q,k,v,g}{1,2}``: 1 multiplies the anchor, 2 the current projection. Shapes, of
    which each rank holds the part of its heads: [1] scalar (replicated), [heads] headwise, [heads * head_dim]
    elementwise. ``{v,g}_post_norm`` are gains [head_dim], replicated.
    """

    def __init__(self, config: ExoTransformerConfig, layout: HeadLayout, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        exo = config.exo
        for pathway in exo.pathways:
            for term in "12":
                name = f"lambda_{pathway}{term}"
                if exo.granularity == "scalar":
                    value = torch.full((1,), exo.lambda_init, dtype=config.params_dtype)
                    self.register_parameter(name, torch.nn.Parameter(value))
                else:
                    size = layout.num_heads(pathway) if exo.granularity == "headwise" else layout.width(pathway)
                    self._add_sharded(name, size, exo.lambda_init)
        for pathway in exo.post_norm:
            self.register_parameter(f"{pathway}_post_norm", head_gain(layout.head_dim, config))

    def forward(
        self, current: dict[str, Tensor], anchors: dict[str, Tensor], gammas: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Mix every pathway of the configuration; the others pass through.

        Args:
            current: component → [s, b, heads / tp, head_dim], the layer's own projections.
            anchors: pathway → the same shape, read-only.
            gammas: ``"q1"`` … ``"g2"`` → [s, b, 1, 1]; empty with static mixing.
        """
        exo = self.config.exo
        mixed = dict(current)
        for pathway in exo.pathways:
            lambda_1, lambda_2 = (self._coefficient(pathway, term, current[pathway].shape[-1], gammas) for term in "12")
            mixed[pathway] = mix(
                None if pathway in exo.drop_anchor else anchors[pathway],
                None if pathway in exo.drop_current else current[pathway],
                lambda_1,
                lambda_2,
            )
        for pathway in exo.post_norm:
            gain = getattr(self, f"{pathway}_post_norm")
            mixed[pathway] = per_head_rms_norm(mixed[pathway], gain, self.config.layernorm_epsilon, self.pg_collection)
        return mixed

    def _coefficient(self, pathway: str, term: str, head_dim: int, gammas: dict[str, Tensor]) -> Tensor:
        """γ λ, or λ alone, in a shape that broadcasts against [s, b, heads, head_dim]."""
        value = getattr(self, f"lambda_{pathway}{term}")
        granularity = self.config.exo.granularity
        if granularity == "scalar":
            # One replicated number acts on the heads of each rank: its gradient is the sum over the ranks.
            value = copy_to_tensor_model_parallel_region(value, group=self.pg_collection.tp)
        elif granularity == "headwise":
            value = value.unsqueeze(-1)
        else:
            value = value.view(-1, head_dim)
        return gammas[f"{pathway}{term}"] * value if gammas else value


class QKBias(_HeadSharded):
    """The control that has no anchor: a learned bias per layer, head and channel on Q and K, before QK-norm."""

    def __init__(self, config: ExoTransformerConfig, layout: HeadLayout, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        for pathway in "qk":
            self._add_sharded(f"bias_{pathway}", layout.width(pathway), 0.0)

    def forward(self, current: dict[str, Tensor]) -> dict[str, Tensor]:
        biased = {p: current[p] + getattr(self, f"bias_{p}").view(-1, current[p].shape[-1]) for p in "qk"}
        return {**current, **biased}


class DynamicMixing(MegatronModule):
    """γ = sigmoid(W2 GELU(W1 x) + b2): one scalar per token for each term of each mixed pathway.

    ``fc1.weight`` [16, hidden_size], ``fc2.weight`` [2 × pathways, 16], ``fc2.bias``; all replicated over the
    tensor-parallel group, since γ is broadcast over heads. W2 and b2 start at zero, so γ = 0.5.
    """

    def __init__(self, config: ExoTransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        width = config.exo.dynamic_hidden_size
        self.fc1 = torch.nn.Linear(config.hidden_size, width, bias=False, dtype=config.params_dtype)
        self.fc2 = torch.nn.Linear(width, config.exo.num_dynamic_outputs, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(self.fc1.weight)
        torch.nn.init.zeros_(self.fc2.weight)
        torch.nn.init.zeros_(self.fc2.bias)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute γ from the normed layer input.

        Args:
            x: [s, b, h], or [s / tp, b, h] with sequence parallelism.

        Returns:
            ``"q1"`` … ``"g2"`` → [s, b, 1, 1], the whole sequence, replicated.
        """
        gamma = torch.sigmoid(self.fc2(F.gelu(self.fc1(x))))
        # γ multiplies head shards, so the gradient that reaches it is a part of the sum on every rank.
        if self.config.sequence_parallel:
            gamma = gather_from_sequence_parallel_region(gamma, group=self.tp_group)
        else:
            gamma = copy_to_tensor_model_parallel_region(gamma, group=self.tp_group)
        names = [f"{pathway}{term}" for pathway in self.config.exo.pathways for term in "12"]
        return {name: value[..., None, None] for name, value in zip(names, gamma.unbind(-1), strict=True)}
