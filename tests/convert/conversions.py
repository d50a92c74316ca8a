"""What the tests of conversion run on ranks; each function is called in a process with the platform active."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_exo import standalone
from megatron_exo.config import ExoConfig
from megatron_exo.convert import checkpoint_tensors, exporting, safetensors_writing, unfinished
from megatron_exo.convert.exporting import Options, export_checkpoint, export_reference
from megatron_exo.convert.hugging_face import Stacked, hf_config, hf_mapping
from megatron_exo.convert.mapping import Flattened, PackedProjections
from megatron_exo.errors import UserError
from megatron_exo.hf import modeling_exoformer
from megatron_exo.shards import load_whole_state
from megatron_exo.sizes import ModelSizes
from megatron_exo.standalone import StandaloneModel
from tests.convert.checkpoints import write_manifest
from tests.hf.models import VARIANTS_AND_MORE, our_state

Request = tuple[Path, Path, Options]
"""Of a conversion: from where, to where, and how."""
Outcomes = list[str | None]
"""Of conversions: the refusal, or ``None``."""


def refusal(function: Callable[..., object], *args: object, **options: Any) -> str | None:
    try:
        function(*args, **options)
    except UserError as error:
        return str(error)
    return None


def export_references(requests: Sequence[Request]) -> Outcomes:
    return [refusal(export_reference, *request) for request in requests]


def export_checkpoints(requests: Sequence[Request]) -> Outcomes:
    return [refusal(export_checkpoint, *request) for request in requests]


def import_reference(file: Path, save: Path, *layout: str) -> None:
    importing = _importing()
    importing.import_model(importing.from_reference(file), list(layout), save=save, tokens=None, logits=None)


def import_folder(folder: Path, save: Path, *layout: str) -> None:
    importing = _importing()
    importing.import_model(importing.from_hugging_face(folder), list(layout), save=save, tokens=None, logits=None)


def logits_of_folder(folder: Path, tokens: torch.Tensor, file: Path) -> None:
    """In Megatron's model, to a file."""
    importing = _importing()
    importing.import_model(importing.from_hugging_face(folder), [], save=None, tokens=tokens, logits=file)


def _importing() -> ModuleType:
    """Only now: imported before the platform is active, it would hold Megatron's functions as they were."""
    from megatron_exo.convert import importing

    return importing


def save_by_megatron(names: Sequence[str], sizes: ModelSizes, root: Path) -> dict[str, set[str]]:
    """Save each variant's own model, tensor parallel over all ranks, as ``root/NAME``.

    Returns:
        Name → what Megatron has called the model's tensors.
    """
    keys = {}
    for name in names:
        exo = VARIANTS_AND_MORE[name]
        model = megatron_model(exo, sizes)
        load_whole_state(model.chunks, our_state(exo, sizes), pipeline_size=1)
        folder = root / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (chunk,) = (chunk.module for chunk in model.chunks)
        sharded = chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        dist_checkpointing.save({"model": sharded}, str(folder))
        if dist.get_rank() == 0:
            write_manifest(folder, exo, sizes)
        dist.barrier()
        keys[name] = set(checkpoint_tensors.CheckpointTensors(folder))
    return keys


def megatron_model(exo: ExoConfig, sizes: ModelSizes) -> StandaloneModel:
    standalone.start_parallel_state(dist.get_world_size())
    config = standalone.transformer_config(
        exo,
        sizes,
        torch.float32,
        tensor_model_parallel_size=dist.get_world_size(),
    )
    return StandaloneModel(config, sizes)


# -- conversions that go wrong ------------------------------------------------------------------------------------


def _interleaved_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def _reversed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tensor: function(self, tensor)[::-1]


def _swapped_lambdas(exo: ExoConfig, sizes: ModelSizes) -> Any:
    rows = hf_mapping(exo, sizes)
    other = {row.ours: row.ours[:-1] + {"1": "2", "2": "1"}[row.ours[-1]] for row in rows if isinstance(row, Flattened)}
    return [_renamed(row, other) for row in rows]


def _renamed(row: Any, names: dict[str, str]) -> Any:
    return dataclasses.replace(row, ours=names.get(row.ours, row.ours))


WRONG: dict[str, tuple[object, str, Any]] = {
    "gate and up swapped": (Stacked, "to_theirs", _reversed(Stacked.to_theirs)),
    "interleaved rotation": (modeling_exoformer, "rotate", _interleaved_rotation),
    "Q, K, V, G in another order": (PackedProjections, "to_theirs", _reversed(PackedProjections.to_theirs)),
    "λ1 and λ2 swapped": (exporting, "hf_mapping", _swapped_lambdas),
    "padded rows left in": (exporting, "VOCABULARY", ()),
    "another epsilon": (exporting, "hf_config", lambda exo, sizes: _config_with(exo, sizes, rms_norm_eps=1e-2)),
    "another rotary base": (
        exporting,
        "hf_config",
        lambda exo, sizes: _config_with(exo, sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
}


def _config_with(exo: ExoConfig, sizes: ModelSizes, **changes: object) -> dict[str, Any]:
    return hf_config(exo, sizes) | changes


def export_wrongly(path: Path, root: Path) -> dict[str, str | None]:
    """To a folder of ``root`` for each mistake; what is said of it."""
    found = {}
    for what, (owner, attribute, wrong) in WRONG.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            found[what] = refusal(export_checkpoint, path, root / what, Options())
    return found


# -- conversions that are killed ----------------------------------------------------------------------------------

PLACES: dict[str, tuple[object, str, int]] = {
    # what is called, and at which of its calls the process is killed
    "before anything is written": (exporting, "write_shard", 1),
    "in the first file": (checkpoint_tensors.CheckpointTensors, "read", 2),
    "between writing a file and recording it": (unfinished.UnfinishedFolder, "finish", 2),
    "in a later file": (safetensors_writing, "_bytes", 60),
    "after the weights": (exporting, "write_index", 1),
    "before the configuration": (exporting, "_write_configuration", 1),
    "before the verification": (exporting, "_verify", 1),
    "before the card": (exporting, "model_card", 1),
    "before the folder is renamed": (unfinished, "to_disk", 3),
}


def export_and_die(where: str, path: Path, out: Path, options: Options) -> None:
    """``kill -9`` at a place that the conversion comes to."""
    with _deadly(*PLACES[where]):
        export_checkpoint(path, out, options)


@contextlib.contextmanager
def _deadly(owner: object, attribute: str, at: int) -> Iterator[None]:
    original, calls = getattr(owner, attribute), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, counted)
        yield
