"""The plan: what is about to be trained, how and on what, in a few lines before the first step."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from megatron_exo.accounting import flops_per_token, parameters, training_flops_per_token
from megatron_exo.config import ExoConfig
from megatron_exo.presets.matching import Matching, total_parameters
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS, name_of

_EXO_PARTS = ("anchor", "gate", "mixing", "dynamic_mixing")
"""What a variant computes beyond a plain transformer."""


@dataclass(frozen=True)
class Layout:
    """How the model and the batch are spread over processes, under Megatron's names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    wire: str = "anchors"
    """What pipeline stages send beside the hidden states (:data:`megatron_exo.model.config.WIRES`)."""

    @property
    def world_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )


@dataclass(frozen=True)
class Plan:
    """What :func:`format_plan` tells."""

    exo: ExoConfig
    sizes: ModelSizes
    """With the tokenizer's vocabulary, so that the sizes do not depend on the layout."""
    padded_vocab_size: int
    """Rows of the embedding with padding."""
    layout: Layout
    global_batch_size: int
    """Sequences per step."""
    micro_batch_size: int
    train_iters: int
    """0 where a model is only evaluated."""
    optimizer: str
    """For example ``adam, lr 0.003, WSD``."""
    device: str
    """For example ``cpu (gloo)`` or ``NVIDIA H200 (nccl)``."""
    precision: str
    transformer_impl: str
    """Whose layers are built: ``local`` or ``transformer_engine``."""
    matching: Matching | None = None
    """What the sizes were matched to."""
    documents: str = "joined"
    """What the documents of one sequence are to each other (:data:`megatron_exo.model.documents.DOCUMENTS`)."""
    train_tokens: int | None = None
    """The length that was asked for, where it was given in tokens."""


def format_plan(plan: Plan, columns: int = 110) -> str:
    """The plan as at most 15 aligned lines of ``columns`` characters, without a trailing newline."""
    rows = [
        ("variant", _variant(plan.exo)),
        ("paper", _reported(plan.exo)),
        ("model", _model(plan)),
        ("match", _match(plan)),
        ("parameters", _parameters(plan)),
        ("training", _training(plan)),
        ("compute", _compute(plan)),
        ("layout", _layout(plan)),
        ("device", f"{plan.device}, {plan.precision}, {plan.transformer_impl} layers"),
    ]
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(
        textwrap.fill(text, columns, initial_indent=label.ljust(width), subsequent_indent=" " * width)
        for label, text in rows
        if text
    )


def human(count: float) -> str:
    """A count with a unit: ``950``, ``14.5k``, ``438.5M``, ``10.00B``."""
    for unit, factor, digits in (("T", 1e12, 2), ("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if count >= factor:
            return f"{count / factor:.{digits}f}{unit}"
    return f"{count:.0f}"


def _variant(exo: ExoConfig) -> str:
    name = name_of(exo)
    return f"{name}: {exo.describe()}" if name else f"no name in the paper: {exo.describe()}"


def _reported(exo: ExoConfig) -> str:
    """The paper's figures for the variant, empty where it has none."""
    name = name_of(exo)
    variant = VARIANTS[name] if name else None
    figures = []
    if variant is not None and variant.reported_perplexity is not None:
        figures.append(f"validation perplexity {variant.reported_perplexity:.2f}")
    if variant is not None and variant.reported_accuracy is not None:
        figures.append(f"mean accuracy {variant.reported_accuracy:.2f}%")
    return f"reported (450M, 10B tokens, one run): {', '.join(figures)}" if figures else ""


def _model(plan: Plan) -> str:
    sizes = plan.sizes
    heads = f"{sizes.num_attention_heads} heads of {sizes.kv_channels}"
    if sizes.num_query_groups != sizes.num_attention_heads:
        heads += f" in {sizes.num_query_groups} query groups"
    vocabulary = f"vocabulary {sizes.vocab_size:,}"
    if plan.padded_vocab_size != sizes.vocab_size:
        vocabulary += f" (padded to {plan.padded_vocab_size:,})"
    return (
        f"{sizes.num_layers} layers, hidden size {sizes.hidden_size}, {heads}, FFN {sizes.ffn_hidden_size}, "
        f"{vocabulary}{', tied embeddings' if sizes.tied_embeddings else ''}"
    )


def _match(plan: Plan) -> str:
    """What was made equal, by what, to which model, and what difference is left; empty where nothing was."""
    matching = plan.matching
    if matching is None:
        return ""
    how = {"params": "parameters, by depth", "flops": "FLOPs, by depth", "depth": "depth and parameters, by FFN width"}
    reference = f"{matching.variant} of {matching.sizes.num_layers} layers and FFN {matching.sizes.ffn_hidden_size}"
    if (matching.exo, matching.sizes) == (plan.exo, plan.sizes):
        return f"{how[matching.rule]}: this is the reference, {reference}"
    more = total_parameters(plan.exo, plan.sizes) - total_parameters(matching.exo, matching.sizes)
    parameters_more, flops_more = matching.differences(plan.exo, plan.sizes)
    return (
        f"{how[matching.rule]}, to {reference}: {parameters_more:+.2%} of its parameters ({more:+,}), "
        f"{flops_more:+.2%} of its FLOPs per token"
    )


def _parameters(plan: Plan) -> str:
    parts = parameters(plan.exo, plan.sizes)
    shown = ", ".join(f"{name.replace('_', ' ')} {human(count)}" for name, count in parts.items() if count)
    padding = ", padding left out" if plan.padded_vocab_size != plan.sizes.vocab_size else ""
    return f"{human(sum(parts.values()))}{padding}: {shown}"


def _training(plan: Plan) -> str:
    if not plan.train_iters:
        return "none, evaluation only"
    tokens = plan.global_batch_size * plan.sizes.seq_length
    more = plan.train_iters * tokens - (plan.train_tokens or plan.train_iters * tokens)
    documents = "" if plan.documents == "joined" else f", documents {plan.documents}"
    rounded = f" ({more:,} more than asked for, to end with a whole step)" if more else ""
    return (
        f"{plan.train_iters:,} steps of {tokens:,} tokens ({plan.global_batch_size} sequences of "
        f"{plan.sizes.seq_length:,}{documents}), {human(plan.train_iters * tokens)} tokens in all{rounded}; "
        f"{plan.optimizer}"
    )


def _compute(plan: Plan) -> str:
    forward = flops_per_token(plan.exo, plan.sizes)
    shares = ", ".join(
        f"{part.replace('_', ' ')} {forward[part] / sum(forward.values()):.2%}" for part in _EXO_PARTS if forward[part]
    )
    per_token = training_flops_per_token(plan.exo, plan.sizes)
    if not plan.train_iters:
        return f"{sum(forward.values()) / 1e9:.3g} GFLOP per token, forward{f' ({shares})' if shares else ''}"
    total = per_token * plan.train_iters * plan.global_batch_size * plan.sizes.seq_length
    of_which = f" ({shares})" if shares else ""
    return f"{per_token / 1e9:.3g} GFLOP per token, forward and backward{of_which}; {total:.2e} FLOP in all"


def _layout(plan: Plan) -> str:
    layout = plan.layout
    tensor = f"tp {layout.tensor_model_parallel_size}" + (" (sequence parallel)" if layout.sequence_parallel else "")
    pipeline = f"pp {layout.pipeline_model_parallel_size}"
    if layout.virtual_pipeline_model_parallel_size is not None:
        pipeline += f" (vpp {layout.virtual_pipeline_model_parallel_size})"
    if layout.pipeline_model_parallel_size > 1 and layout.wire == "source":
        pipeline += ", the anchor's source between stages"
    micro_batches = math.ceil(plan.global_batch_size / (plan.micro_batch_size * layout.data_parallel_size))
    return (
        f"{tensor}, {pipeline}, cp {layout.context_parallel_size}, dp {layout.data_parallel_size}: "
        f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}, "
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} of {plan.micro_batch_size} a step"
    )
