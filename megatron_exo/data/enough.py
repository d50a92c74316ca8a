"""A run ends with the iteration that it was asked for, not with its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_exo.data.validate import DatasetError

DatasetsProvider = Callable[..., tuple[Any, Any, Any]]


def with_enough_samples(provider: DatasetsProvider) -> DatasetsProvider:
    """Wrap a datasets provider: what is too short for the run is refused before the first iteration.

    Megatron (0.19.2) repeats a dataset as often as needed, and each dataset of a blend with weights. Several datasets
    without weights it takes once each, and a run that needs more ends with a ``StopIteration`` where they do.
    """

    def checked(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        parts = provider(num_samples, vp_stage)
        for name, part, needed in zip(("training", "validation", "test"), parts, num_samples, strict=True):
            if part is not None and len(part) < needed:
                raise DatasetError(
                    f"the {name} datasets hold {len(part)} samples, the run takes {needed}: several datasets without "
                    "weights are read once; give each a weight (0.7 PREFIX 0.3 PREFIX), or take fewer iterations"
                )
        return parts

    checked.is_distributed = True  # type: ignore[attr-defined]  # each rank opens the files
    return checked
