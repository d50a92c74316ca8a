"""The paper's optimizer written down once more, as plainly as possible: one matrix after another, no parallelism.

Works in the precision of the weights it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_exo.optimizer.recipe import POLAR_EXPRESS
from tests.plain_reference import PlainExoFormer


def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp_min(1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@dataclass
class PlainMuon:
    """Muon for the matrices of layers, AdamW without weight decay for the rest.

    Args:
        model: whose parameters are updated.
        split: what of a packed projection is one matrix (``fused``, ``per-component``, ``per-head``).
        momentum: of an update, from its number.
    """

    model: PlainExoFormer
    split: str
    momentum: Callable[[int], float]
    lr: float = 0.01
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    beta2: float = 0.95
    updates: int = 0
    momenta: dict[str, Tensor] = field(default_factory=dict)
    second_moments: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.matrices = {name: p for name, p in trained.items() if name.startswith("decoder") and p.dim() == 2}
        rest = [p for name, p in trained.items() if name not in self.matrices]
        self.adam = torch.optim.AdamW(rest, lr=self.adam_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """One update with the gradients that the parameters have, at learning rates times ``scale``."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        mu = self.momentum(self.updates)
        for name, p in self.matrices.items():
            assert p.grad is not None
            self.momenta[name] = mu * self.momenta.get(name, torch.zeros_like(p)) + (1 - mu) * p.grad
            smoothed = mu * self.momenta[name] + (1 - mu) * p.grad
            update = torch.empty_like(p)
            for number, rows in enumerate(self.rows_of_matrices(name, p.shape[0])):
                update[rows] = self.update(f"{name}/{number}", smoothed[rows])
            decay = torch.where(update * p > 0, self.weight_decay * p, 0.0)
            p -= self.lr * scale * (update + decay)
        self.updates += 1

    def update(self, key: str, smoothed: Tensor) -> Tensor:
        """Orthogonalised, scaled, and evened out over rows or columns."""
        rows, columns = smoothed.shape
        direction = orthogonalised(smoothed) * max(1, rows / columns) ** 0.5
        energy = direction.square().mean(1 if rows >= columns else 0, keepdim=True)
        before = self.second_moments.get(key, torch.zeros_like(energy))
        self.second_moments[key] = self.beta2 * before + (1 - self.beta2) * energy
        even = direction / self.second_moments[key].clamp_min(1e-10).sqrt()
        return even * (direction.norm() / even.norm().clamp_min(1e-10))

    def rows_of_matrices(self, name: str, num_rows: int) -> list[list[int]]:
        """The row numbers of every matrix in a parameter."""
        if self.split == "fused" or not name.endswith("linear_qkv.weight"):
            return [list(range(num_rows))]
        return list(self.rows_of_heads(name).values()) if self.split == "per-head" else self.rows_of_components(name)

    def rows_of_components(self, name: str) -> list[list[int]]:
        rows: dict[str, list[int]] = {}
        for (component, _), head in self.rows_of_heads(name).items():
            rows.setdefault(component, []).extend(head)
        return list(rows.values())

    def rows_of_heads(self, name: str) -> dict[tuple[str, int], list[int]]:
        """(component, head) → rows, which are packed per query group: its heads of Q, of G, then K and V."""
        exo, sizes = self.model.exo, self.model.sizes
        wanted: Sequence[str] = exo.pathways if ".anchor." in name else exo.components
        result: dict[tuple[str, int], list[int]] = {}
        at = 0
        for group in range(sizes.num_query_groups):
            for component in (c for c in "qgkv" if c in wanted):
                heads = sizes.heads(component) // sizes.num_query_groups
                for head in range(heads):
                    result[component, group * heads + head] = list(range(at, at + sizes.kv_channels))
                    at += sizes.kv_channels
        return result


def clip(gradients: Mapping[str, Tensor], limit: float) -> float:
    """Scale gradients in place to a common norm of at most ``limit``; returns the norm before."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for gradient in gradients.values():
        gradient *= min(1.0, limit / (norm + 1e-6))
    return norm
