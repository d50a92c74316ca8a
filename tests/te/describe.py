"""Build ExoFormer models with one backend and describe them: ``python -m tests.te.describe BACKEND OUTPUT_JSON``.

A program of its own, because Transformer Engine must not be importable where the other tests train. The ranks of a
layout are played one after the other on torch's fake process group: nothing here communicates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_exo import builder, platform
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.shards import named_shards
from megatron_exo.variants import get_variant
from tests.layouts import Layout, start_parallel_state, transformer_config
from tests.te.cases import PACKED, PLACES, SIZES, VARIANTS, WRONGLY_FUSED


def main(backend: str, output: Path) -> None:
    """Write a dictionary "variant place" → description."""
    platform.activate()
    if backend == "transformer_engine":  # its constructors ask, and make weights where Megatron says: on the CPU
        torch.cuda.is_available = lambda: True
    descriptions = {}
    for place in PLACES:
        tp, rank = (int(word[-1]) for word in place.split("-"))
        layout = Layout(tp=tp, sp=tp > 1, transformer={"transformer_impl": backend, "perform_initialization": False})
        configs = {variant: transformer_config(get_variant(variant).exo, SIZES, layout) for variant in VARIANTS}
        with playing(rank, layout):
            for variant, config in configs.items():
                descriptions[f"{variant} {place}"] = describe(build(config, spec_config=config))
            if place == PLACES[0]:
                wrong = build(configs["dynamic-e-exoformer"], spec_config=configs["e-exoformer"])
                descriptions[WRONGLY_FUSED] = describe(wrong)
    if backend == "transformer_engine":
        from tests.te import packed

        with playing(0, Layout()):
            descriptions[PACKED] = packed.differences()
    output.write_text(json.dumps(descriptions))


@contextmanager
def playing(rank: int, layout: Layout) -> Iterator[None]:
    """Be one rank of ``layout`` in a world without others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    start_parallel_state(layout)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(config: ExoTransformerConfig, spec_config: ExoTransformerConfig) -> torch.nn.Module:
    """The model of ``config``, with the layer spec made for ``spec_config``."""
    model_config = builder.ExoModelConfig(
        transformer=config,
        vocab_size=SIZES.vocab_size,
        true_vocab_size=SIZES.vocab_size,
        seq_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=SIZES.tied,
    )
    exo_block_spec = builder.exo_block_spec
    with mock.patch.object(builder, "exo_block_spec", lambda _, *place: exo_block_spec(spec_config, *place)):
        return builder.ExoModelBuilder(model_config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def describe(model: Any) -> dict[str, Any]:
    """What the tests compare, as JSON values.

    Returns:
        ``classes``: name → "package.Class" of every module; ``tensors``: checkpoint key → the parts this rank saves;
        ``objects``: the keys of what is saved besides tensors; ``parameters``: whole-model name → shape and marks.
    """
    state = model.sharded_state_dict()
    apply_factories(state)  # SwiGLU's matrix is saved as gate and value
    saved = list(nested_values(state))
    tensors: dict[str, list[Any]] = {}
    for part in saved:
        if isinstance(part, ShardedTensor):
            whole = [part.global_shape, part.axis_fragmentations, str(part.dtype)]
            tensors.setdefault(part.key, []).append([*whole, part.global_offset, part.local_shape, part.replica_id])
    return {
        "classes": {
            name: f"{type(m).__module__.split('.')[0]}.{type(m).__name__}" for name, m in model.named_modules()
        },
        "tensors": tensors,
        "objects": [part.key for part in saved if not isinstance(part, ShardedTensor)],
        "parameters": {name: [list(parameter.shape), marks(parameter)] for name, parameter in named_shards([model])},
    }


def marks(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """By what Megatron cuts, joins and synchronises a parameter."""
    defaults = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1, "sequence_parallel": False}
    return {name: getattr(parameter, name, default) for name, default in defaults.items()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
