"""Logits on any layout of ranks: of whole sequences through Megatron's schedules, or step by step with a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.core_attention import gather_context
from megatron_exo.model.documents import DocumentMask, Documents
from megatron_exo.model.wire import ExoP2PCommunicator, wire_width


def pipeline_keywords(config: ExoTransformerConfig, pg_collection: ProcessGroupCollection) -> dict[str, Any]:
    """What Megatron's schedules need to carry anchors between stages; nothing for a single stage."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    return {
        "p2p_communicator": ExoP2PCommunicator(pp_group=pg_collection.pp, config=config),
        "pg_collection": pg_collection,
    }


def compute_logits(
    chunks: Sequence[torch.nn.Module],
    tokens: Tensor,
    vocab_size: int,
    config: ExoTransformerConfig,
    pg_collection: ProcessGroupCollection,
    micro_batch_size: int = 1,
    document_mask: DocumentMask | None = None,
) -> Tensor | None:
    """The next-token logits at every position.

    Args:
        chunks: this rank's model chunks, in order of virtual stages.
        tokens: int64 [b, s], the same on every rank of a replica.
        vocab_size: columns to return; the padding beyond it is cut.
        micro_batch_size: sequences that go through the model together; it divides b.
        document_mask: how rows are cut into documents that do not see each other; ``None`` for one text a row.

    Returns:
        float32 [b, s, vocab_size] on every rank of the last pipeline stage, ``None`` elsewhere.
    """
    local = _forward(chunks, {"tokens": tokens}, config, pg_collection, micro_batch_size, document_mask)
    if local is None:
        return None
    parts = [torch.empty_like(local) for _ in range(pg_collection.tp.size())]
    dist.all_gather(parts, local, group=pg_collection.tp)
    return torch.cat(parts, dim=-1)[..., :vocab_size]


def compute_token_losses(
    chunks: Sequence[torch.nn.Module],
    tokens: Tensor,
    labels: Tensor,
    config: ExoTransformerConfig,
    pg_collection: ProcessGroupCollection,
    micro_batch_size: int = 1,
) -> Tensor | None:
    """The cross-entropy of every label in nats, without logits ever being gathered; as :func:`compute_logits`.

    Returns:
        float32 [b, s] on every rank of the last pipeline stage, ``None`` elsewhere.
    """
    losses = _forward(chunks, {"tokens": tokens, "labels": labels}, config, pg_collection, micro_batch_size)
    return None if losses is None else losses[..., 0]


@torch.no_grad()
def _forward(
    chunks: Sequence[torch.nn.Module],
    batch: dict[str, Tensor],
    config: ExoTransformerConfig,
    pg_collection: ProcessGroupCollection,
    micro_batch_size: int,
    document_mask: DocumentMask | None = None,
) -> Tensor | None:
    """What the last stage computes, float32 [b, s, ·], of whole sequences. They are padded while the ranks share them,
    which no earlier token sees."""
    cp_group = pg_collection.cp
    (rows, length), device = batch["tokens"].shape, batch["tokens"].device
    unit = (2 * cp_group.size() if cp_group.size() > 1 else 1) * (
        config.tensor_model_parallel_size if config.sequence_parallel else 1
    )
    padded = -(-length // unit) * unit
    batch = {name: torch.nn.functional.pad(part, (0, padded - length)) for name, part in batch.items()}
    batch["positions"] = torch.arange(padded, device=device).expand(rows, padded)
    documents: list[Documents | None] = [
        None if document_mask is None else document_mask.of(part, cp_group)
        for part in batch["tokens"].split(micro_batch_size)
    ]
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    collected: list[Tensor] = []

    def forward_step(micro_batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        def collect(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            collected.append(output.float())
            return output.new_zeros(()), {}

        *tensors, packed = next(micro_batches)
        inputs = dict(zip(batch, tensors, strict=True))
        labels = inputs.get("labels")
        return model(inputs["tokens"], inputs["positions"], None, labels=labels, packed_seq_params=packed), collect

    was_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    parts = [part.split(micro_batch_size) for part in batch.values()]
    iterators = [zip(*parts, documents, strict=True) for _ in chunks]
    get_forward_backward_func(config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size)(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=rows // micro_batch_size,
        seq_length=padded,
        micro_batch_size=micro_batch_size,
        forward_only=True,
        **pipeline_keywords(config, pg_collection),
    )
    for chunk, mode in zip(chunks, was_training, strict=True):
        chunk.train(mode)
    if not collected:
        return None
    output = torch.cat(collected)
    if cp_group.size() > 1:
        output = gather_context(output.transpose(0, 1), cp_group).transpose(0, 1).contiguous()
    return output[:, :length]


class ExoInferenceWrapper(GPTInferenceWrapper):
    """Megatron's inference wrapper for models whose stages send the anchor beside the hidden states.

    Megatron's engines and text generation controllers take it for a ``GPTInferenceWrapper``. Used by itself::

        context = StaticInferenceContext(max_batch_size, max_sequence_length)
        wrapper = ExoInferenceWrapper(model, context)
        wrapper.prep_model_for_inference()  # eval mode and an empty cache
        with InferenceMode.active():
            batch = wrapper.prep_inference_input(tokens)  # int64 [b, s], the same on every rank
            logits = wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(batch, start, end))

    with windows that follow each other: the prompt, whole or in chunks, then one token at a time. Each step returns
    logits [b, end - start, padded vocabulary], or [b, 1, ·] unless the context's
    ``config.materialize_only_last_token_logits`` is false, on every rank of the last stage, and ``None`` elsewhere.

    The cache of a layer holds its mixed K and V, [max_sequence_length, max_batch_size, query groups / tp, head_dim]
    each. Of the anchor nothing is cached: a token's is made from that token's own states and read by no other token.

    Args:
        model: the one chunk of this rank, wrapped or not.
        inference_context: Megatron's cache and its offsets.

    Raises:
        UserError: the model's layout cannot generate (virtual pipeline stages, context parallelism; sequence
            parallelism with a static context).
    """

    def __init__(self, model: torch.nn.Module, inference_context: BaseInferenceContext) -> None:
        config = get_model_config(model[0] if isinstance(model, Sequence) else model)
        for problem in _layout_problems(config, inference_context):
            raise UserError(f"generation does not support {problem}")
        super().__init__(model, inference_context)

    def _allocate_recv_buffer(self, batch_size: int, seq_len: int) -> Tensor:
        """Room for what the stage before sends: [seq_len, batch_size, hidden_size + wire width]."""
        hidden_states = super()._allocate_recv_buffer(batch_size, seq_len)
        return hidden_states.new_empty(*hidden_states.shape[:-1], hidden_states.shape[-1] + wire_width(self.config))

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        """As Megatron's, which masks nothing once the cache has tokens: right for one new token, not for several."""
        context, length = self.inference_context, inference_input["tokens"].shape[1]
        if context.is_static_batching() and context.sequence_len_offset > 0 and length > 1:
            if self.config.transformer_impl != "local":
                raise UserError(
                    "a prompt cannot be prefilled in chunks with --transformer-impl transformer_engine: its attention "
                    "would let a chunk see its own future; prefill it in one step, or use --transformer-impl local"
                )
            if inference_input["attention_mask"] is None:
                start, device = context.sequence_len_offset, inference_input["tokens"].device
                forbidden = torch.ones(1, 1, length, start + length, dtype=torch.bool, device=device).triu(start + 1)
                inference_input = inference_input | {"attention_mask": forbidden}
        return super()._forward(inference_input)


def _layout_problems(config: ExoTransformerConfig, context: BaseInferenceContext) -> Iterator[str]:
    if (config.virtual_pipeline_model_parallel_size or 1) > 1:
        yield (
            "virtual pipeline stages: Megatron's inference runs one model chunk per rank; "
            "load the same checkpoint without virtual stages"
        )
    if config.context_parallel_size > 1:
        yield (
            "context parallelism: each rank's cache holds whole sequences; "
            "load the same checkpoint with --context-parallel-size 1"
        )
    if config.sequence_parallel and config.tensor_model_parallel_size > 1 and context.is_static_batching():
        yield (
            "sequence parallelism: the one token of a decode step cannot be cut over ranks; "
            "load the same checkpoint without --sequence-parallel"
        )
