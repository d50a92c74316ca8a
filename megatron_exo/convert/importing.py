"""From a checkpoint of the author's code to a model on a layout of ranks, and on to a Megatron checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.checkpointing import save_checkpoint
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import ModelSizes
from megatron_exo.convert.reference import ReferenceCheckpoint, read_reference_checkpoint
from megatron_exo.errors import UserError
from megatron_exo.inference import compute_logits
from megatron_exo.shards import load_whole_state
from megatron_exo.startup import connect, understand


def import_checkpoint(
    file: Path, megatron_arguments: list[str], *, save: Path | None, tokens: Tensor | None, logits: Path | None
) -> None:
    """Build the model of ``file`` on this rank, and write what is asked for.

    Args:
        file: a ``.pt`` in the author's format.
        megatron_arguments: the layout, precision and so on, as Megatron's options.
        save: folder for a ``torch_dist`` checkpoint of the weights.
        tokens: int64 [b, s].
        logits: file for their float32 logits [b, s, vocab], written by the last rank.

    Raises:
        UserError: a file that is refused, tokens outside the vocabulary, or arguments that do not fit the model.
    """
    if not file.is_file():
        raise UserError(f"no file at {file}; give the path of a .pt in the author's format")
    source = read_reference_checkpoint(file)
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < source.sizes.vocab_size:
        raise UserError(
            f"tokens run from {tokens.min()} to {tokens.max()}, the vocabulary has {source.sizes.vocab_size}"
        )
    sys.argv[1:] = [*architecture_arguments(source.exo, source.sizes), *_run_arguments(save), *megatron_arguments]
    start = understand()
    pg_collection = connect(start.args.exo_start_timeout)
    model_parallel_cuda_manual_seed(start.args.seed)  # the random weights are overwritten, but drawn
    config = start.model_config.transformer
    chunks = start.model_config.get_builder_cls()(start.model_config).build_distributed_models(
        pg_collection, wrap_with_ddp=False, model_type=ModelType.encoder_or_decoder
    )
    load_whole_state(chunks, source.state, pipeline_size=config.pipeline_model_parallel_size)
    if dist.get_rank() == 0:
        print(_summary(file, source), flush=True)
    if tokens is not None and logits is not None:
        device = next(chunks[0].parameters()).device
        computed = compute_logits(chunks, tokens.to(device), start.vocab_size, config, pg_collection)
        if computed is not None and dist.get_rank() == dist.get_world_size() - 1:
            torch.save(computed.cpu(), logits)
            print(f"wrote logits {list(computed.shape)} to {logits}", flush=True)
    if save is not None:
        save_checkpoint(max(source.step, 1), chunks, None, None, 0)
    dist.barrier()
    dist.destroy_process_group()


def architecture_arguments(exo: ExoConfig, sizes: ModelSizes) -> list[str]:
    """The options that describe a model to the entry point: every axis and every size."""
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
        ("max-position-embeddings", sizes.max_position_embeddings),
        ("seq-length", sizes.max_position_embeddings),
        ("rotary-base", int(sizes.rotary_base)),
        ("norm-epsilon", sizes.layernorm_epsilon),
        ("vocab-size", sizes.vocab_size),
    ]
    arguments = ["--exo-variant", "base", *(word for name, value in options for word in (f"--{name}", str(value)))]
    return arguments + (["--group-query-attention"] if sizes.num_query_groups < sizes.num_attention_heads else [])


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
