"""How the projections of one layer, or of an anchor, are packed into one tensor.

Megatron's column-parallel linear cuts its rows into equal parts, one for each tensor-parallel rank. Rows are
therefore packed per query group, ``[q heads | g heads | k | v]`` of group 1, then of group 2, and so on
(``SelfAttention`` in megatron-core does the same), so that every rank gets whole heads of every component.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PACKED_ORDER = "qgkv"


@dataclass(frozen=True)
class HeadLayout:
    """Heads of one rank (or of the whole model): ``num_groups`` query groups of ``heads_per_group`` query heads."""

    num_groups: int
    heads_per_group: int
    head_dim: int

    def num_heads(self, component: str) -> int:
        """Heads of a component: Q and G have one per query head, K and V one per query group."""
        return self.num_groups * self._heads_in_group(component)

    def width(self, component: str) -> int:
        """Channels of a component, heads times head_dim."""
        return self.num_heads(component) * self.head_dim

    def total_width(self, components: str) -> int:
        return sum(self.width(component) for component in components)

    def rows_of_group(self, components: str) -> list[int]:
        """Rows of each component in one query group."""
        return [self._heads_in_group(component) * self.head_dim for component in components]

    def state_on(self, weight: Tensor, components: str) -> None:
        """Let a packed matrix say what its rows are (``packed_rows``): matrix optimizers may take it apart."""
        weight.packed_rows = self.rows_of_group(components)  # type: ignore[attr-defined]

    def unpack_groups(self, packed: Tensor, components: str) -> dict[str, Tensor]:
        """Split the group-packed output of a linear layer.

        Args:
            packed: [s, b, width of ``components``], rows packed per query group.
            components: a subset of ``qgkv``, in that order.

        Returns:
            Component → [s, b, heads, head_dim].
        """
        by_group = packed.view(*packed.shape[:2], self.num_groups, -1)
        parts = torch.split(by_group, self.rows_of_group(components), dim=-1)
        return {
            c: part.reshape(*packed.shape[:2], -1, self.head_dim) for c, part in zip(components, parts, strict=True)
        }

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """Concatenate components [s, b, heads, head_dim] into one tensor [s, b, width], in the order of ``parts``."""
        return torch.cat([part.flatten(2) for part in parts.values()], dim=-1)

    def split(self, joined: Tensor, components: str) -> dict[str, Tensor]:
        """The inverse of :meth:`join`; the results are views."""
        parts = torch.split(joined, [self.width(component) for component in components], dim=-1)
        return {c: part.unflatten(-1, (-1, self.head_dim)) for c, part in zip(components, parts, strict=True)}

    def _heads_in_group(self, component: str) -> int:
        return self.heads_per_group if component in "qg" else 1


def in_packed_order(pathways: str) -> str:
    """The pathways in the order in which a packed row block holds them."""
    return "".join(component for component in PACKED_ORDER if component in pathways)
