"""The vocabulary of conversion tables: how one parameter of ours corresponds to parameters of another format.

A table is a list of :class:`ParameterMapping` rows and serves both directions. "Ours" are the production model's
unsharded names and layouts; "theirs" are the other format's. Every row is a rearrangement (copy, reshape,
permutation or choice of rows), so a table carries gradients and optimizer moments over as well as weights.
Tensors keep their dtype, and results may share memory with the inputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.sizes import ModelSizes

State = Mapping[str, Tensor]
Shape = tuple[int, ...]


class ConversionError(UserError):
    """Weights that do not fit their table: which names or shapes, and what was expected."""


@dataclass(frozen=True)
class ParameterMapping(abc.ABC):
    """One row of a table. ``*`` in a name stands for the layer, see :func:`per_layer`."""

    ours: str
    theirs: str | tuple[str, ...]
    """One name, or several where they keep apart what we fuse."""

    @property
    def their_names(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @abc.abstractmethod
    def their_shapes(self) -> Sequence[Shape]:
        """The shape under each of their names."""

    @abc.abstractmethod
    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Our tensor from theirs."""

    @abc.abstractmethod
    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        """Their tensors from ours; what we do not keep comes back as zeros."""

    def our_shape(self) -> Shape:
        return tuple(self.to_ours([torch.empty(shape, device="meta") for shape in self.their_shapes()]).shape)

    def dropped(self) -> str | None:
        """What of theirs the model never uses and we do not keep; ``None`` if nothing."""
        return None


@dataclass(frozen=True)
class Direct(ParameterMapping):
    """The same tensor under another name."""

    shape: Shape

    def their_shapes(self) -> Sequence[Shape]:
        return [self.shape]

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Flattened(Direct):
    """Theirs has ``shape``, such as ``[heads, head_dim]`` or ``[]``; ours is 1-D in row-major order."""

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(-1)

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape(self.shape)]


@dataclass(frozen=True)
class SwappedSwiGLU(Direct):
    """Theirs stacks ``[value; gate]``, ours ``[gate; value]``, where the gate branch goes through SiLU."""

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        value, gate = tensors[0].chunk(2)
        return torch.cat([gate, value])

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        gate, value = tensor.chunk(2)
        return [torch.cat([value, gate])]


@dataclass(frozen=True)
class SelectedRows(Direct):
    """Ours keeps the ``rows`` of theirs, in that order."""

    rows: tuple[int, ...]

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0][list(self.rows)]

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        full = tensor.new_zeros(self.shape)
        full[list(self.rows)] = tensor
        return [full]

    def dropped(self) -> str | None:
        rest = sorted(set(range(self.shape[0])) - set(self.rows))
        return f"rows {', '.join(map(str, rest))}" if rest else None


@dataclass(frozen=True)
class PackedProjections(ParameterMapping):
    """Q, K, V, G matrices: theirs one whole block per component, ours interleaved per query group.

    Theirs is ``[heads · head_dim, h]`` per component of ``stored``, stacked under one name or each under its
    own. Ours is, for each query group in turn, that group's rows of every component of ``kept``, so that a
    split of the rows over tensor-parallel ranks gives each rank whole groups of all components.
    """

    sizes: ModelSizes
    stored: str
    kept: str

    def their_shapes(self) -> Sequence[Shape]:
        rows = [self.sizes.width(component) for component in self.stored]
        return [(n, self.sizes.hidden_size) for n in (rows if len(self.their_names) > 1 else [sum(rows)])]

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        blocks = torch.cat(list(tensors)).split([self.sizes.width(component) for component in self.stored])
        by_name = dict(zip(self.stored, blocks, strict=True))
        grouped = [by_name[component].unflatten(0, (self.sizes.num_query_groups, -1)) for component in self.kept]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        groups = self.sizes.num_query_groups
        grouped = tensor.unflatten(0, (groups, -1)).split([self.sizes.width(c) // groups for c in self.kept], dim=1)
        by_name = {c: block.flatten(0, 1) for c, block in zip(self.kept, grouped, strict=True)}
        blocks = [by_name.get(c, tensor.new_zeros(self.sizes.width(c), self.sizes.hidden_size)) for c in self.stored]
        return blocks if len(self.their_names) > 1 else [torch.cat(blocks)]

    def dropped(self) -> str | None:
        rest = [component.upper() for component in self.stored if component not in self.kept]
        return f"rows of {', '.join(rest)}" if rest else None


def per_layer(layers: Iterable[int], rows: Sequence[ParameterMapping]) -> list[ParameterMapping]:
    """The rows once for every layer (counted from 0), with ``*`` in all names replaced by its number."""
    return [
        dataclasses.replace(
            row,
            ours=row.ours.replace("*", str(layer)),
            theirs=tuple(name.replace("*", str(layer)) for name in row.their_names),
        )
        for layer in layers
        for row in rows
    ]


def import_state(table: Sequence[ParameterMapping], theirs: State) -> dict[str, Tensor]:
    """Their state dict under our names.

    Raises:
        ConversionError: naming the keys that are missing or unexpected, or the first of a wrong shape.
    """
    check_state({n: s for row in table for n, s in zip(row.their_names, row.their_shapes(), strict=True)}, theirs)
    return {row.ours: row.to_ours([theirs[name] for name in row.their_names]) for row in table}


def export_state(table: Sequence[ParameterMapping], ours: State) -> dict[str, Tensor]:
    """Our state dict (or gradients by the same names) under their names; raises as :func:`import_state`."""
    check_state({row.ours: row.our_shape() for row in table}, ours)
    return {n: t for row in table for n, t in zip(row.their_names, row.to_theirs(ours[row.ours]), strict=True)}


def check_state(expected: Mapping[str, Shape], state: State) -> None:
    """Compare names and shapes with what is expected; raises ``ConversionError`` at the first kind of difference."""
    for kind, names in (("lacks", expected.keys() - state.keys()), ("has unexpected", state.keys() - expected.keys())):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ConversionError(f"the state dict {kind} {shown}")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ConversionError(f"{name} has shape {list(state[name].shape)}, expected {list(shape)}")
