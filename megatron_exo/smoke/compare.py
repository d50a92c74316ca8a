"""Deviations of what a device computed from what it should have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_exo.smoke.cases import Deviation


def largest_difference(quantity: str, values: Sequence[float], expected: Sequence[float], bound: float) -> Deviation:
    """The largest absolute difference of two equally long series; NaN where either has one."""
    differences = [abs(value - other) for value, other in zip(values, expected, strict=True)]
    has_nan = any(math.isnan(difference) for difference in differences)
    return Deviation(quantity, math.nan if has_nan else max(differences), bound)


def relative_error(quantity: str, value: Tensor, expected: Tensor, bound: float) -> Deviation:
    """‖value − expected‖ / ‖expected‖ over all elements, on the device of ``value``.

    Raises:
        ValueError: shapes differ.
    """
    if value.shape != expected.shape:
        raise ValueError(f"{quantity} has shape {tuple(value.shape)} where {tuple(expected.shape)} is expected")
    expected = expected.to(value.device)
    norm = torch.linalg.vector_norm(expected).item()
    difference = torch.linalg.vector_norm(value - expected).item()
    return Deviation(quantity, difference / norm if norm else difference, bound)


def largest_relative_error(
    quantity: str, values: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float
) -> Deviation:
    """:func:`relative_error` of the tensor where it is largest.

    Raises:
        ValueError: names or shapes differ.
    """
    _check_names(quantity, values, expected)
    errors = [relative_error(f"{quantity} of {name}", values[name], expected[name], bound) for name in values]
    return max(errors, key=lambda error: math.inf if math.isnan(error.value) else error.value)


def number_of_changed(quantity: str, values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Deviation:
    """How many tensors are not equal bit by bit; none may.

    Raises:
        ValueError: names differ.
    """
    _check_names(quantity, values, expected)
    return Deviation(quantity, float(sum(not torch.equal(values[name], expected[name]) for name in values)), 0.0)


def _check_names(quantity: str, values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if values.keys() != expected.keys():
        raise ValueError(f"{quantity}: only one side has {', '.join(sorted(values.keys() ^ expected.keys()))}")
