"""Sizes at which variants are comparable: the depth or the FFN width that equals a reference in parameters or FLOPs.

A gate and an anchor add matrices, so two variants of equal depth and width are not of equal capacity. The paper keeps
widths and lets the depth differ. That leaves differences of up to a layer, and compares models of unequal depth; the
FFN width closes the gap at equal depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megatron_exo.accounting import flops_per_token, parameters
from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.sizes import ModelSizes

RULES = ("params", "flops", "depth", "none")
"""``params`` and ``flops`` solve the depth, with the reference's widths; ``depth`` solves the FFN width for the
reference's parameters, with its depth; ``none`` solves nothing."""

_TOLERANCE = 1e-3
"""Part by which a solved depth may exceed the reference: coefficients and gains, never a layer (1.9% of a preset's
parameters, or more), must not cost a layer."""

_FFN_STEP = 16
"""Solved FFN widths differ from the reference's by multiples of this: FP8 needs them, and half a step is at most 0.2%
of the parameters at 450M."""


@dataclass(frozen=True)
class Matching:
    """What a model is compared with."""

    rule: str
    """One of :data:`RULES`."""
    variant: str
    """The name of the reference."""
    exo: ExoConfig
    sizes: ModelSizes
    """Of the reference."""

    def solve(self, exo: ExoConfig) -> ModelSizes:
        """The sizes of the variant ``exo`` that match the reference.

        A solved depth is that of the deepest model that has no more than the reference (and 0.1%). A solved FFN
        width is the nearest.

        Raises:
            ExoConfigError: no depth, or no FFN width, is small enough.
        """
        if self.rule == "params":
            return self._deepest(exo, total_parameters)
        if self.rule == "flops":
            return self._deepest(exo, total_flops)
        if self.rule == "depth":
            return self._nearest_ffn(exo)
        return self.sizes

    def differences(self, exo: ExoConfig, sizes: ModelSizes) -> tuple[float, float]:
        """By which part of the reference's a model's parameters, and its FLOPs per token, are more (below 0: less)."""
        ours, theirs = (
            (total_parameters(*model), total_flops(*model)) for model in ((exo, sizes), (self.exo, self.sizes))
        )
        return ours[0] / theirs[0] - 1, ours[1] / theirs[1] - 1

    def _deepest(self, exo: ExoConfig, count: Callable[[ExoConfig, ModelSizes], int]) -> ModelSizes:
        def of(depth: int) -> int:
            return count(exo, dataclasses.replace(self.sizes, num_layers=depth))

        depth = self.sizes.num_layers
        budget = count(self.exo, self.sizes) * (1 + _TOLERANCE)
        while of(depth + 1) <= budget:
            depth += 1
        while of(depth) > budget:
            depth -= 1
            if depth == 0:
                raise self._impossible("layer")
        return dataclasses.replace(self.sizes, num_layers=depth)

    def _nearest_ffn(self, exo: ExoConfig) -> ModelSizes:
        missing = total_parameters(self.exo, self.sizes) - total_parameters(exo, self.sizes)
        step = _FFN_STEP * 3 * self.sizes.hidden_size * self.sizes.num_layers
        width = self.sizes.ffn_hidden_size + _FFN_STEP * round(missing / step)
        if width <= 0:
            raise self._impossible("FFN")
        return dataclasses.replace(self.sizes, ffn_hidden_size=width)

    def _impossible(self, part: str) -> ExoConfigError:
        return ExoConfigError(
            f"--match {self.rule}: without a single {part}, the variant is larger than {self.variant}; "
            "use --match none, or a larger model"
        )


def total_parameters(exo: ExoConfig, sizes: ModelSizes) -> int:
    return sum(parameters(exo, sizes).values())


def total_flops(exo: ExoConfig, sizes: ModelSizes) -> int:
    """Per token, forward."""
    return sum(flops_per_token(exo, sizes).values())
