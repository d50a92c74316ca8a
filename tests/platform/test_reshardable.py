"""The distributed optimizer's reshardable checkpoints hold every parameter's own values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_exo.platform.reshardable import index_without_padding
from tests.platform.plain_gpt import train
from tests.ranks import run_on_ranks


@dataclass
class Bucket:
    offset: int
    numel_unpadded: int


@dataclass
class Buffer:
    param_index_map: dict[str, tuple[int, int, int]]
    buckets: list[Bucket]


@dataclass
class Optimizer:
    buffers: list[Buffer]


@pytest.fixture
def optimizer() -> Optimizer:
    """A buffer of three buckets with 56 and 54 elements of padding, and one of a single bucket."""
    index = {"a": (0, 100, 0), "b": (128, 200, 0), "c": (256, 300, 1), "d": (320, 330, 1), "e": (384, 400, 2)}
    three = Buffer(index, [Bucket(0, 200), Bucket(256, 74), Bucket(384, 16)])
    return Optimizer([three, Buffer({"f": (0, 7, 0)}, [Bucket(0, 7)])])


def _index_seen(self: Any, *, is_loading: bool) -> list[dict[str, tuple[int, int, int]]]:
    assert is_loading
    return [buffer.param_index_map for buffer in self.buffers]


def test_parameters_are_looked_up_where_the_padding_is_left_out(optimizer: Optimizer) -> None:
    seen = index_without_padding(_index_seen)(optimizer, is_loading=True)
    moved = {"a": (0, 100, 0), "b": (128, 200, 0), "c": (200, 244, 1), "d": (264, 274, 1), "e": (274, 290, 2)}
    assert seen == [moved, {"f": (0, 7, 0)}]
    assert list(seen[0]) == list("abcde")  # parameters are numbered by their order


def test_the_index_is_the_buffers_own_again_afterwards(optimizer: Optimizer) -> None:
    index = [buffer.param_index_map for buffer in optimizer.buffers]
    with pytest.raises(AssertionError):
        index_without_padding(_index_seen)(optimizer, is_loading=False)
    assert all(buffer.param_index_map is own for buffer, own in zip(optimizer.buffers, index, strict=True))


def test_another_release_of_megatron_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.19.3+0123abc")
    assert index_without_padding(_index_seen) is _index_seen


def _train_unpatched(arguments: list[str]) -> Any:
    DistributedOptimizer.sharded_param_state_fully_reshardable = (
        DistributedOptimizer.sharded_param_state_fully_reshardable.__wrapped__
    )
    return train(arguments)


@pytest.mark.slow
def test_the_installed_release_still_mixes_parameters_up(tmp_path: Path) -> None:
    overlap = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "4000"]
    words = [*overlap, "--train-iters", "4", "--eval-interval", "4"]
    (whole,) = run_on_ranks(
        1, _train_unpatched, [*words, "--save", str(tmp_path), "--save-interval", "2"], process_group=False
    )
    (resumed,) = run_on_ranks(
        1, _train_unpatched, [*words, "--load", str(tmp_path), "--ckpt-step", "2"], process_group=False
    )
    expected, got = (sum(loss for loss, _ in losses[-4:]) for losses in (whole, resumed))
    assert abs(got - expected) > 0.1 * expected
