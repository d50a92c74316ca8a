"""Cross-entropy over vocabulary-parallel logits, with the log-partition for the z-loss from the same pass.

Megatron-core's cross-entropy lets the rows that pad the vocabulary take part in the softmax, so its loss depends
on the tensor-parallel size; here they are left out. The z-loss (SPEC of the recipe: weight 1e-5 on the mean of
logsumexp²) needs no second pass over the logits and no copy of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[-1]
        first = group.rank() * rows
        valid = min(max(vocab_size - first, 0), rows)  # rows of this rank that stand for tokens
        scores = logits[..., :valid].float()

        peak = scores.amax(-1) if valid else scores.new_full(labels.shape, -torch.inf)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        exponentials = (scores - peak.unsqueeze(-1)).exp_()
        local = labels - first
        here = (local >= 0) & (local < valid)
        index = local.clamp(0, max(valid - 1, 0)).unsqueeze(-1)
        label_score = scores.gather(-1, index).squeeze(-1) if valid else torch.zeros_like(peak)
        # The two sums travel together.
        sums = torch.stack([exponentials.sum(-1), torch.where(here, label_score, torch.zeros_like(peak))])
        dist.all_reduce(sums, group=group)
        partition, label_score = sums
        log_partition = partition.log().add_(peak)

        softmax = exponentials.div_(partition.unsqueeze(-1))
        ctx.save_for_backward(softmax.to(logits.dtype), index, here)
        ctx.rows = rows
        return log_partition - label_score, log_partition

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_log_partition: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, here = ctx.saved_tensors
        grad_valid = softmax.float() * (grad_loss + grad_log_partition).unsqueeze(-1)
        if softmax.shape[-1]:
            grad_valid.scatter_add_(-1, index, torch.where(here, -grad_loss, torch.zeros_like(grad_loss)).unsqueeze(-1))
        grad = torch.nn.functional.pad(grad_valid.to(softmax.dtype), (0, ctx.rows - softmax.shape[-1]))
        return grad, None, None, None


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
