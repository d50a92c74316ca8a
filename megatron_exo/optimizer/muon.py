"""Muon as the paper's author trains with it, on megatron-core's ``TensorParallelMuon``.

Momentum, Nesterov's step, orthogonalisation over tensor-parallel ranks, scale and the loop over parameters are
Megatron's. Added: a momentum that follows a schedule, matrices taken apart by the layout of their rows, the row or
column second moment (NorMuon, arXiv 2510.05491), and cautious weight decay (arXiv 2510.12402).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    EmergingOptimizerEntry,
    TensorParallelMuon,
    _is_nonlinear_or_embedding,
    _muon_config_to_kwargs,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.optimizer.recipe import COEFFICIENTS, POLAR_EXPRESS, MuonRecipe

_SMALLEST = 1e-10
"""A second moment below this counts as this."""


class ExoMuon(TensorParallelMuon):
    """One update of a matrix W with gradient G, learning rate η and weight decay ω::

        M ← μ M + (1 - μ) G              μ of this update (MuonRecipe.momentum)
        U ← s · orth((1 - μ) G + μ M)    s = √max(1, rows/columns), or another --muon-scale-mode
        v ← β v + (1 - β) mean(U²)       over each row, or each column of a matrix wider than high
        U ← U / √v · |U| / |U / √v|      Frobenius norms: the size of the update stays
        W ← W - η (U + ω W ⊙ [U ⊙ W > 0])

    Args:
        params: matrices, float32, on whose attributes ``partition_dim`` and, for a packed projection, ``is_qkv`` and
            ``qkv_split_shapes`` (rows of each component in one query group) the update depends.
        recipe: what Megatron's options do not say.
        head_dim: rows of a head in a packed projection.
        megatron: the arguments of ``TensorParallelMuon``.

    Between updates v is [rows, 1] or [1, columns] for every matrix; :meth:`state_dict` writes it out for every element,
    so that it is cut, joined and resharded as its parameter is, however that is split.
    """

    def __init__(self, params: Iterable[Any], *, recipe: MuonRecipe, head_dim: int, **megatron: Any) -> None:
        self.recipe, self.head_dim, self.peak_momentum = recipe, head_dim, megatron["momentum"]
        super().__init__(params, **megatron)
        for group in self.param_groups:
            group |= {"step": 0, "split": recipe.split}

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            group["momentum"] = self.recipe.momentum(group["step"], self.peak_momentum)
            group["step"] += 1
        return super().step(closure)

    @override
    def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
        """What is subtracted from ``p``, but for the learning rate, from the momentum ``grad`` of its shape."""
        updates = []
        for matrix, second_moment in zip(self._take_apart(p, grad), self.state[p]["second_moment"], strict=True):
            cut = self._cut_dim(p, matrix)
            update = self.scaled_orthogonalize_fn(matrix, self.pg_collection.tp, cut)
            updates.append(self._even_out(update, second_moment, cut))
        update = self._put_together(p, updates)
        return update + group["weight_decay"] * p * (update * p > 0)

    @override
    def _apply_weight_decay_inplace(self, p: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
        """Nothing before the update: whether a weight decays depends on it."""

    def _even_out(self, update: Tensor, second_moment: Tensor, cut: int | None) -> Tensor:
        """Divide by the root of the second moment, which takes the update in, and keep the norm of the whole matrix.

        Norms follow from means over rows or columns, so that one small all-reduce serves a matrix that is cut.
        """
        averaged = self._averaged_dim(update, cut)
        square = update.square().mean(averaged, keepdim=True)
        if cut is not None and cut - 2 == averaged:
            dist.all_reduce(square, group=self.pg_collection.tp)
            square /= self.pg_collection.tp.size()
        second_moment.lerp_(square, 1 - self.recipe.beta2)
        factor = second_moment.clamp_min(_SMALLEST).rsqrt()
        norms = torch.stack([(each * square).sum((-2, -1)) for each in (torch.ones_like(factor), factor.square())])
        if cut is not None and cut - 2 != averaged:
            dist.all_reduce(norms, group=self.pg_collection.tp)
        ratio = norms[0] / norms[1].clamp_min(_SMALLEST)
        return update * (factor * ratio.sqrt()[..., None, None])

    def _cut_dim(self, p: Tensor, matrix: Tensor) -> int | None:
        """Along which dimension this rank has but a part of ``matrix``; ``None`` for a whole one."""
        dim = getattr(p, "partition_dim", -1)
        is_whole = dim == -1 or self.pg_collection.tp.size() == 1 or matrix.dim() == 3  # heads are never cut
        return None if is_whole or self.tp_mode == "blockwise" else dim

    def _averaged_dim(self, matrix: Tensor, cut: int | None) -> int:
        """-1, along rows, unless the whole matrix is wider than high: then -2."""
        rows, columns = (
            size * (self.pg_collection.tp.size() if dim == cut else 1) for dim, size in enumerate(matrix.shape[-2:])
        )
        return -1 if rows >= columns else -2

    def _rows(self, p: Tensor) -> Sequence[int]:
        """Rows of each matrix in a stretch of rows that repeats until the end of ``p``."""
        if self.recipe.split == "fused" or not getattr(p, "is_qkv", False):
            return [p.shape[0]]
        return [self.head_dim] if self.recipe.split == "per-head" else p.qkv_split_shapes  # type: ignore[attr-defined]

    def _take_apart(self, p: Tensor, tensor: Tensor) -> list[Tensor]:
        """The matrices [rows, columns] in ``tensor``, of the shape of ``p``; heads as one batch [heads, rows, columns].

        The second moment has their order.
        """
        rows = self._rows(p)
        parts = tensor.view(-1, sum(rows), tensor.shape[1]).split(list(rows), dim=1)
        is_heads = self.recipe.split == "per-head" and getattr(p, "is_qkv", False)
        return list(parts) if is_heads else [part.flatten(0, 1) for part in parts]

    def _put_together(self, p: Tensor, matrices: list[Tensor]) -> Tensor:
        """The inverse of :meth:`_take_apart`."""
        stretches = p.shape[0] // sum(self._rows(p))
        return torch.cat([each.reshape(stretches, -1, p.shape[1]) for each in matrices], dim=1).view(p.shape)

    @override
    @torch.no_grad()
    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for p in group["params"]:
            if p in self.state and "second_moment" not in self.state[p]:
                self.state[p]["second_moment"] = self._reduced(p, torch.zeros_like(p))

    def _reduced(self, p: Tensor, second_moment: Tensor) -> list[Tensor]:
        """[rows, 1] or [1, columns] of every matrix, from what is written out for every element of ``p``."""
        matrices = self._take_apart(p, second_moment)
        return [each.narrow(self._averaged_dim(each, self._cut_dim(p, each)), 0, 1).clone() for each in matrices]

    def _written_out(self, p: Tensor, second_moment: list[Tensor]) -> Tensor:
        shapes = [each.shape for each in self._take_apart(p, torch.empty_like(p, device="meta"))]
        return self._put_together(p, [each.expand(shape) for each, shape in zip(second_moment, shapes, strict=True)])

    @override
    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        packed["state"] = {
            index: state | {"second_moment": self._written_out(parameters[index], state["second_moment"])}
            for index, state in packed["state"].items()
        }
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            UserError: its matrices were split in another way.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["split"] != self.recipe.split:
                raise UserError(
                    f"the checkpoint's Muon takes matrices {group['split']}, not {self.recipe.split}: its second "
                    f"moments do not fit; pass --exo-muon-split {group['split']}, or --no-load-optim"
                )
        for p, state in self.state.items():
            state["second_moment"] = self._reduced(p, state["second_moment"])


def register(recipe: MuonRecipe) -> None:
    """Make ``--optimizer muon`` the paper's: in Megatron's registry, for optimizers that are built from here on.

    The choice of parameters stays Megatron's: matrices go to Muon, but for the embedding and the head, and the rest to
    AdamW, without weight decay and at its own learning rate.

    Raises:
        ImportError: the package emerging-optimizers is missing.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    muon_utils._COEFFICIENT_SETS[COEFFICIENTS] = list(POLAR_EXPRESS)

    def arguments(config: Any, model_chunks: list[Any], pg_collection: Any) -> dict[str, Any]:
        head_dim = model_chunks[0].config.kv_channels
        _state_layouts(model_chunks, recipe.split, head_dim)
        return _muon_config_to_kwargs(config, model_chunks, pg_collection) | {"recipe": recipe, "head_dim": head_dim}

    rest = ParamKey(predicate=ParamPredicate(name="nonlinear_or_embedding", fn=_is_nonlinear_or_embedding))
    override = {"optimizer": "adam", "wd_mult": 0.0, "max_lr": recipe.adam_lr, "min_lr": recipe.adam_min_lr}
    _EMERGING_OPTIMIZERS["muon"] = EmergingOptimizerEntry(
        ExoMuon, config_to_kwargs=arguments, default_param_overrides={rest: override}
    )


def _state_layouts(model_chunks: list[Any], split: str, head_dim: int) -> None:
    """Replace what Megatron says of packed rows, from a layer's name and the model's sizes, by what the layer knows.

    An anchor may have fewer pathways than a layer has components. Megatron copies these attributes to main weights.

    Raises:
        UserError: a packed projection that cannot be split so.
    """
    for chunk in model_chunks:
        for name, p in chunk.named_parameters():
            if "linear_qkv.weight" not in name:
                continue
            p.is_qkv, p.qkv_split_shapes = True, getattr(p, "packed_rows", None)
            fits = p.qkv_split_shapes and p.shape[0] % sum(p.qkv_split_shapes) == 0
            if split != "fused" and not (fits and all(rows % head_dim == 0 for rows in p.qkv_split_shapes)):
                raise UserError(
                    f"--exo-muon-split {split} does not fit {name}: {p.shape[0]} rows in groups of "
                    f"{p.qkv_split_shapes or 'unknown size'} and heads of {head_dim}; use --exo-muon-split fused"
                )
