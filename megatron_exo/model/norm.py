"""RMSNorm: the local backend's norm module, and the per-head norm of anchors and post-mix projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension with a learned gain, for layers, QK-norm and the final norm.

    Megatron's torch norm asserts that sequence parallelism is off; this one marks its gain so that the gradient,
    which each rank sees for its share of the sequence only, is summed over the tensor-parallel group.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def head_gain(head_dim: int, config: TransformerConfig) -> torch.nn.Parameter:
    """A gain [head_dim] shared by all heads, for :func:`per_head_rms_norm`; replicated over tensor-parallel ranks."""
    return torch.nn.Parameter(torch.ones(head_dim, dtype=config.params_dtype))


def per_head_rms_norm(x: Tensor, gain: Tensor, eps: float, pg_collection: ProcessGroupCollection) -> Tensor:
    """RMSNorm over the channels of each head.

    Args:
        x: [s, b, heads / tp, head_dim], heads sharded over the tensor-parallel group.
        gain: [head_dim], replicated. Each rank sees the heads it holds, so its gradient is summed over the group.
    """
    gain = copy_to_tensor_model_parallel_region(gain, group=pg_collection.tp)
    return F.rms_norm(x, gain.shape, gain, eps)
