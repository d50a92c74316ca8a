"""One micro-batch: fetch it, run the model, reduce the loss."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from torch import Tensor

from megatron_exo.data.sample_log import SAMPLE_ID, SampleLog
from megatron_exo.model.documents import DocumentMask
from megatron_exo.nonfinite import step_batches

_SPIKE = 10
"""How many times the largest loss of the first hundred micro-batches makes a spike, as in Megatron's own programs."""
_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(data_iterator: Iterator[dict[str, Tensor]], vp_stage: int | None, *, training: bool) -> tuple[Any, ...]:
    """Tokens, labels, loss mask, attention mask and position ids of this rank, and the documents they are of.

    The tensors are [b, s / cp], or ``None`` where this pipeline stage does not need them; the attention mask is
    ``None`` unless the loader makes one. Where ``--exo-documents`` masks documents, every stage gets them: each reads
    the same samples. The first tensor-parallel rank reads, the others receive.
    """
    args = get_args()
    mask = document_mask(args)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not (first or last or mask):
        return (*(None for _ in _BATCH_KEYS), None)
    batch: dict[str, Any] = {}
    device = torch.device(torch.cuda.current_device())
    boundaries: Tensor | None = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        if training and (first or last):
            step_batches.note(args.curr_iteration, read)
            # Ranks of a context-parallel group have read the same samples.
            if first and SAMPLE_ID in read and parallel_state.get_context_parallel_rank() == 0:
                _sample_log().note(args.curr_iteration + 1, read)
        batch = {key: read[key].to(device, non_blocking=True) if key in read else None for key in _BATCH_KEYS}
        if mask is not None:
            boundaries = mask.boundaries(read["tokens"])
            batch |= {"cu_seqlens": boundaries.to(device), "cu_seqlens_padded": None}
            batch["max_seqlen"] = batch["cu_seqlens"].diff().amax(dim=1)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=mask is not None,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size if training else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    cp_group = parallel_state.get_context_parallel_group()
    documents = None
    if mask is not None:  # read on the CPU where they came from there, without waiting for the device
        documents = mask.documents(batch["cu_seqlens"] if boundaries is None else boundaries, cp_group, device)
    batch = {key: batch.get(key) for key in _BATCH_KEYS}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return (*(batch[key] for key in _BATCH_KEYS), documents)


def document_mask(args: Namespace) -> DocumentMask | None:
    """How rows are cut into documents by ``--exo-documents``; ``None`` where documents see each other."""
    if args.exo_documents == "joined":
        return None
    return DocumentMask(get_tokenizer().eod, restarts=args.exo_documents == "restarted")


@cache
def _sample_log() -> SampleLog:
    rank = parallel_state.get_data_parallel_rank()
    return SampleLog(Path(get_args().save) / "logs" / f"samples-dp{rank}.jsonl")


def reduce_loss(loss_mask: Tensor, output: Tensor, z_loss_weight: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of a micro-batch over its unmasked tokens.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output: [b, s, 2] from :class:`~megatron_exo.model.gpt.ExoGPTModel`: cross-entropy and squared log-partition.
        z_loss_weight: weight of the second.

    Returns:
        The loss sum, the number of tokens (Megatron divides by their total over all ranks), and pairs
        (sum, tokens) for the log: ``lm loss`` is the cross-entropy alone, ``z loss`` the weighted rest.
    """
    cross_entropy, squared = (output.float() * loss_mask.float().unsqueeze(-1)).sum(dim=(0, 1))
    z_loss = z_loss_weight * squared
    num_tokens = loss_mask.sum().detach().to(torch.int)
    logged = {
        name: torch.stack([value.detach(), num_tokens.to(value.dtype)])
        for name, value in (("lm loss", cross_entropy), ("z loss", z_loss))
    }
    return cross_entropy + z_loss, num_tokens, logged


def loss_func(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """:func:`reduce_loss` as the command line asks for it, with NaN and Inf reported to Megatron's rerun machinery."""
    assert loss_mask is not None, "only the last pipeline stage reduces losses, and it has the mask"
    args = get_args()
    loss, num_tokens, logged = reduce_loss(loss_mask, output, args.exo_z_loss_weight)
    if args.check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in the local loss",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=loss / num_tokens.clamp(min=1),
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, logged


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    """Megatron's forward step: the model's output and how to reduce it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids, documents = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage"), training=model.training
    )
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=documents)
    return output, partial(loss_func, loss_mask)
