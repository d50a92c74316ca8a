"""The vocabulary-parallel cross-entropy is torch's cross-entropy, on any number of ranks and whatever the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_exo.model import loss as loss_module
from megatron_exo.model.loss import vocab_parallel_cross_entropy
from tests.ranks import run_on_ranks

PADDED = 32


@dataclass(frozen=True)
class Case:
    """``vocab_size`` of 32 rows stand for tokens; with 15 rows and four ranks, two ranks hold nothing but padding."""

    vocab_size: int = PADDED
    dtype: torch.dtype = torch.float32
    scale: float = 3.0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [s, b, PADDED] with large values in the padding, labels [s, b], weights of both outputs [2, s, b]."""
        generator = torch.Generator().manual_seed(self.vocab_size)
        logits = torch.randn(6, 2, PADDED, generator=generator) * self.scale
        logits[..., self.vocab_size :] = 50.0
        labels = torch.randint(0, self.vocab_size, (6, 2), generator=generator)
        labels[0], labels[1] = 0, self.vocab_size - 1
        return logits.to(self.dtype), labels, torch.randn(2, 6, 2, generator=generator)


CASES = {
    "no padding": Case(),
    "padding within a rank": Case(vocab_size=29),
    "ranks of padding alone": Case(vocab_size=15),
    "bfloat16": Case(vocab_size=29, dtype=torch.bfloat16),
    "huge logits": Case(vocab_size=29, scale=1e4),
}


def _sharded() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Both outputs and this rank's part of the gradient, for every case; five positions at a time."""
    loss_module._TOGETHER = 5 * PADDED // dist.get_world_size()
    results = {}
    for name, case in CASES.items():
        logits, labels, weights = case.inputs()
        shard = logits.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].clone().requires_grad_()
        loss, log_partition = vocab_parallel_cross_entropy(shard, labels, case.vocab_size, dist.group.WORLD)
        (weights[0] * loss + weights[1] * log_partition).sum().backward()
        assert shard.grad is not None
        results[name] = loss.detach(), log_partition.detach(), shard.grad
    return results


@pytest.fixture(scope="module", params=[1, 2, 4])
def sharded(request: pytest.FixtureRequest) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
    return run_on_ranks(request.param, _sharded)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_whole_logits(sharded: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    logits, labels, weights = case.inputs()
    whole = logits.float()[..., : case.vocab_size].requires_grad_()
    loss = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    log_partition = torch.logsumexp(whole, dim=-1)
    (weights[0] * loss + weights[1] * log_partition).sum().backward()
    for rank in sharded:
        ours, our_partition, _ = rank[name]
        assert ours.dtype == our_partition.dtype == torch.float32
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(our_partition, log_partition.detach(), rtol=1e-6, atol=2e-6)
    gradient = torch.cat([rank[name][2] for rank in sharded], dim=-1)
    assert gradient.dtype == case.dtype
    # bfloat16 keeps eight bits, and both the saved softmax and the gradient are rounded to them.
    tolerance = 1e-6 if case.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(
        gradient[..., : case.vocab_size].float(),
        whole.grad,
        rtol=tolerance,
        atol=tolerance * float(weights.abs().max()),
    )


@pytest.mark.parametrize("name", CASES)
def test_padding_gets_no_gradient_at_all(sharded: list[dict[str, Any]], name: str) -> None:
    gradient = torch.cat([rank[name][2] for rank in sharded], dim=-1)
    assert gradient.shape[-1] == PADDED
    assert not gradient[..., CASES[name].vocab_size :].any()


def test_one_output_alone_can_be_differentiated() -> None:
    results = run_on_ranks(1, _each_output_alone)[0]
    logits, labels, _ = CASES["no padding"].inputs()
    softmax = logits.softmax(-1)
    torch.testing.assert_close(results[0], softmax - F.one_hot(labels, PADDED), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(results[1], softmax, rtol=0.0, atol=1e-6)


def _each_output_alone() -> list[Tensor]:
    logits, labels, _ = CASES["no padding"].inputs()
    gradients = []
    for output in (0, 1):
        leaf = logits.clone().requires_grad_()
        vocab_parallel_cross_entropy(leaf, labels, PADDED, dist.group.WORLD)[output].sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return gradients


class _LargestFloat32(TorchDispatchMode):
    """How many elements the largest float32 tensor has that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                self.elements = max(self.elements, each.numel())
        return result


def _largest_float32() -> tuple[int, int]:
    """In forward and backward over 12 positions, three at a time; and the number of logits."""
    loss_module._TOGETHER = 3 * PADDED
    logits, labels, weights = Case(dtype=torch.bfloat16).inputs()
    logits.requires_grad_()
    with _LargestFloat32() as found:
        loss, log_partition = vocab_parallel_cross_entropy(logits, labels, PADDED, dist.group.WORLD)
        (weights[0] * loss + weights[1] * log_partition).sum().backward()
    return found.elements, logits.numel()


def test_no_float32_copy_of_bfloat16_logits_is_made() -> None:
    ((largest, logits),) = run_on_ranks(1, _largest_float32)
    assert largest == 3 * PADDED < logits
