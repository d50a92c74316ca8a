"""From the author's files and Hugging Face folders to a model on a layout of ranks, and on to a Megatron checkpoint."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.checkpointing import save_checkpoint
from torch import Tensor

from megatron_exo.checkpoints.reading import folder_of, steps_of
from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import ConversionError
from megatron_exo.convert.reference import ReferenceCheckpoint, read_reference_checkpoint
from megatron_exo.errors import UserError
from megatron_exo.inference import compute_logits
from megatron_exo.shards import load_whole_state
from megatron_exo.sizes import ModelSizes
from megatron_exo.startup import connect, understand


@dataclass(frozen=True)
class WholeModel:
    """A model as another format holds it.

    Args:
        state: whole tensors by our names; may read each when it is asked for.
        step: how many it has been trained.
        summary: what it is, for the terminal.
        arguments: of Megatron, that hold unless others are given.
    """

    exo: ExoConfig
    sizes: ModelSizes
    state: Mapping[str, Tensor]
    step: int
    summary: str
    arguments: tuple[str, ...] = ()


def from_reference(file: Path) -> WholeModel:
    """A ``.pt`` in the author's format.

    Raises:
        UserError: there is no such file, or it is refused.
    """
    if not file.is_file():
        raise UserError(f"no file at {file}; give the path of a .pt in the author's format")
    source = read_reference_checkpoint(file)
    return WholeModel(source.exo, source.sizes, source.state, source.step, _summary(file, source))


def from_hugging_face(folder: Path) -> WholeModel:
    """A folder with ``config.json`` and safetensors; its Megatron checkpoint gets its dtype.

    Raises:
        ConversionError: a file or tensor is not what it should be: which.
    """
    from megatron_exo.convert.hf_reading import read_folder

    source = read_folder(folder)
    precision = {frozenset({torch.bfloat16}): ("--bf16",), frozenset({torch.float16}): ("--fp16",)}
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in source.dtypes))
    summary = f"{folder}: {source.exo.describe()}; {len(source.state)} tensors of {dtypes}"
    return WholeModel(source.exo, source.sizes, source.state, 1, summary, precision.get(source.dtypes, ()))


def import_model(
    source: WholeModel, megatron_arguments: list[str], *, save: Path | None, tokens: Tensor | None, logits: Path | None
) -> None:
    """Build the model of ``source`` on this rank, and write what is asked for.

    Args:
        megatron_arguments: the layout, precision and so on, as Megatron's options.
        save: folder for a ``torch_dist`` checkpoint of the weights.
        tokens: int64 [b, s].
        logits: file for their float32 logits [b, s, vocab], written by the last rank.

    Raises:
        UserError: tokens outside the vocabulary, arguments that do not fit, or checkpoints of a run in ``save``.
    """
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < source.sizes.vocab_size:
        raise UserError(
            f"tokens run from {tokens.min()} to {tokens.max()}, the vocabulary has {source.sizes.vocab_size}"
        )
    if save is not None and (there := steps_of(save)):
        raise UserError(f"{save} holds checkpoints of a run already (iteration {there[-1]}); give a folder of its own")
    given = [*architecture_arguments(source.exo, source.sizes), *_run_arguments(save)]
    if not {"--bf16", "--fp16"} & set(megatron_arguments):
        given += source.arguments
    sys.argv[1:] = [*given, *megatron_arguments]
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints every argument that it has
        start = understand()
        pg_collection = connect(start.args.exo_start_timeout, start.args.exo_lost_host_timeout)
        model_parallel_cuda_manual_seed(start.args.seed)  # the random weights are overwritten, but drawn
        config = start.model_config.transformer
        chunks = start.model_config.get_builder_cls()(start.model_config).build_distributed_models(
            pg_collection, wrap_with_ddp=False, model_type=ModelType.encoder_or_decoder
        )
    load_whole_state(chunks, source.state, pipeline_size=config.pipeline_model_parallel_size)
    if dist.get_rank() == 0:
        print(source.summary, flush=True)
    if tokens is not None and logits is not None:
        device = next(chunks[0].parameters()).device
        computed = compute_logits(chunks, tokens.to(device), start.vocab_size, config, pg_collection)
        if computed is not None and dist.get_rank() == dist.get_world_size() - 1:
            torch.save(computed.cpu(), logits)
            print(f"wrote logits {list(computed.shape)} to {logits}", flush=True)
    if save is not None:
        step = max(source.step, 1)
        with contextlib.redirect_stdout(io.StringIO()):
            save_checkpoint(step, chunks, None, None, 0)
        if dist.get_rank() == 0:
            print(f"wrote {folder_of(save, step)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def architecture_arguments(exo: ExoConfig, sizes: ModelSizes) -> list[str]:
    """The options that describe a model to the entry point: every axis and every size.

    Raises:
        ConversionError: Megatron has no option for one.
    """
    if sizes.rotary_base != int(sizes.rotary_base):
        raise ConversionError(f"Megatron's rotary base is a whole number; the model has {sizes.rotary_base}")
    axes = [
        "gate",
        "anchor",
        "pathways",
        "anchor_norm",
        "post_norm",
        "granularity",
        "mixing",
        "anchor_weights",
        "control",
        "drop_anchor",
        "drop_current",
    ]
    options = [("exo-" + axis.replace("_", "-"), getattr(exo, axis) or "none") for axis in axes]
    options += [
        ("exo-dynamic-hidden-size", exo.dynamic_hidden_size),
        ("num-layers", sizes.num_layers),
        ("hidden-size", sizes.hidden_size),
        ("num-attention-heads", sizes.num_attention_heads),
        ("num-query-groups", sizes.num_query_groups),
        ("kv-channels", sizes.kv_channels),
        ("ffn-hidden-size", sizes.ffn_hidden_size),
        ("max-position-embeddings", sizes.seq_length),
        ("seq-length", sizes.seq_length),
        ("rotary-base", int(sizes.rotary_base)),
        ("norm-epsilon", sizes.layernorm_epsilon),
        ("vocab-size", sizes.vocab_size),
    ]
    arguments = ["--exo-variant", "base", *(word for name, value in options for word in (f"--{name}", str(value)))]
    flags = {
        "--group-query-attention": sizes.num_query_groups < sizes.num_attention_heads,
        "--tie-embeddings-and-output-weights": sizes.tied_embeddings,
        "--skip-train": exo.drop_anchor or exo.drop_current,  # interventions are for inference only
    }
    return arguments + [flag for flag, is_set in flags.items() if is_set]


def _run_arguments(save: Path | None) -> list[str]:
    """What Megatron wants to know although nothing is trained."""
    arguments = ["--tokenizer-type", "NullTokenizer", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"]
    arguments += ["--mock-data", "--eval-interval", "1", "--no-save-optim", "--no-save-rng"]
    return arguments + (["--save", str(save), "--save-interval", "1"] if save is not None else [])


def _summary(file: Path, source: ReferenceCheckpoint) -> str:
    parameters = sum(tensor.numel() for tensor in source.state.values())
    lines = [
        f"{file}: {source.exo.describe()}; {parameters:,} parameters, step {source.step}, {source.tokens:,} tokens"
    ]
    lines += [f"left out, unused by the author's model: {', '.join(source.dropped)}"] if source.dropped else []
    return "\n".join(lines)
