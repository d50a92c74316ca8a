"""Cross-entropy and log-partition over vocabulary-parallel logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_exo.model.loss import vocab_parallel_cross_entropy
from tests.ranks import run_on_ranks

VOCAB, PADDED = 10, 16  # on four ranks of four rows, the last holds padding alone, and the third two rows of it


def _logits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [s, b, padded] with large padding, labels, and a weight for each of the two results."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(5, 3, PADDED, generator=generator)
    logits[..., VOCAB:] = 50.0  # would rule the softmax if it took part
    labels = torch.randint(0, VOCAB, (5, 3), generator=generator)
    weights = torch.randn(2, 5, 3, generator=generator)
    return logits.to(dtype), labels, weights[0], weights[1]


def _compute(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels, loss_weight, partition_weight = _logits(dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = logits.chunk(size, dim=-1)[rank].clone().requires_grad_()
    loss, log_partition = vocab_parallel_cross_entropy(mine, labels, VOCAB, dist.group.WORLD)
    (loss * loss_weight + log_partition * partition_weight).sum().backward()
    return loss.detach(), log_partition.detach(), mine.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_whole_vocabulary_without_padding(ranks: int, dtype: torch.dtype) -> None:
    results = run_on_ranks(ranks, _compute, dtype)
    logits, labels, loss_weight, partition_weight = _logits(dtype)
    whole = logits[..., :VOCAB].float().requires_grad_()
    loss = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    log_partition = whole.logsumexp(-1)
    (loss * loss_weight + log_partition * partition_weight).sum().backward()
    for result in results:
        assert torch.allclose(result[0], loss.detach(), atol=1e-5)
        assert torch.allclose(result[1], log_partition.detach(), atol=1e-5)
    gradient = torch.cat([result[2] for result in results], dim=-1)
    assert gradient.dtype == dtype
    # bf16: the softmax is kept in the dtype of the logits, 8 bits, and so is the gradient.
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert (gradient[..., :VOCAB].float() - whole.grad).abs().max() < tolerance
    assert not gradient[..., VOCAB:].any(), "padding must not be trained"
