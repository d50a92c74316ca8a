"""Cross-entropy over vocabulary-parallel logits, with the log-partition for the z-loss from the same pass.

Megatron-core's cross-entropy lets the rows that pad the vocabulary take part in the softmax, so its loss depends
on the tensor-parallel size; here they are left out. The z-loss (weight 1e-5 on the mean of logsumexp²) needs no
second pass over the logits. Logits in bf16 are never copied to float32 as a whole, only some positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TOGETHER = 1 << 25
"""Logits that are float32 at a time: 128 MiB, and few kernels for all of them."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        first = group.rank() * columns
        valid = min(max(vocab_size - first, 0), columns)  # columns of this rank that stand for tokens
        scores, flat_labels = logits.reshape(-1, columns)[:, :valid], labels.reshape(-1)

        peak = logits.new_full(flat_labels.shape, -torch.inf, dtype=torch.float32)
        if valid:
            peak = scores.amax(-1).float()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        local = flat_labels - first
        here = (local >= 0) & (local < valid)
        index = local.clamp(0, max(valid - 1, 0)).unsqueeze(-1)
        exponentials = torch.empty_like(scores)
        sums = peak.new_zeros(2, len(peak))  # of the exponentials, and the label's score: they travel together
        for part in _parts(scores):
            centred = scores[part].float() - peak[part].unsqueeze(-1)
            sums[1, part] = torch.where(here[part], centred.gather(-1, index[part]).squeeze(-1), 0.0)
            exponential = centred.exp_()
            sums[0, part] = exponential.sum(-1)
            exponentials[part] = exponential
        dist.all_reduce(sums, group=group)
        partition, label_score = sums
        log_partition = partition.log()

        ctx.save_for_backward(exponentials, partition, index, here)
        ctx.shape = logits.shape
        return (log_partition - label_score).view(labels.shape), (log_partition + peak).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_log_partition: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, partition, index, here = ctx.saved_tensors
        grad_loss, grad_log_partition = grad_loss.reshape(-1), grad_log_partition.reshape(-1)
        of_softmax = (grad_loss + grad_log_partition) / partition
        of_label = torch.where(here, -grad_loss, 0.0).unsqueeze(-1)
        grad = exponentials.new_zeros(len(exponentials), ctx.shape[-1])
        for part in _parts(exponentials):
            grad_scores = exponentials[part].float() * of_softmax[part].unsqueeze(-1)
            grad_scores.scatter_add_(-1, index[part], of_label[part])
            grad[part, : exponentials.shape[-1]] = grad_scores
        return grad.view(ctx.shape), None, None, None


def _parts(scores: Tensor) -> Iterator[slice]:
    """Rows of [positions, columns] to be taken together; none where there are no columns."""
    rows, columns = scores.shape
    if columns:
        step = max(1, _TOGETHER // columns)
        yield from (slice(start, start + step) for start in range(0, rows, step))


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and log-partition of each position.

    Args:
        logits: [..., padded_vocab / tp], any floating dtype, sharded over ``group`` in rank order.
        labels: int64 [...], in ``[0, vocab_size)``.
        vocab_size: rows that stand for tokens; the ones beyond are padding and take no part.

    Returns:
        Two float32 tensors [...], replicated over ``group``: ``-log p(label)`` and ``log Σ exp(logits)``.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)
