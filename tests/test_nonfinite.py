"""A loss or a gradient that is not finite ends the run with its step, and its batch in a file that can be replayed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo import forward_step, nonfinite, pretrain
from megatron_exo.checkpoints import hooks
from megatron_exo.checkpoints.integrity import damages
from megatron_exo.errors import UserError
from megatron_exo.launch import ROOT
from megatron_exo.nonfinite import StepBatches, batch_saved_when_not_finite
from megatron_exo.replay import read_batch
from tests.programs import MOCK_DATA, MODEL, RUN, Outcome, one_line, run_program

ARGUMENTS = f"{MODEL} {MOCK_DATA} {RUN} --save-interval 2 --log-interval 1 --num-workers 0".split()
MICRO_BATCHES = 4


def _poison(at: int, spoil: Any) -> None:
    """Let ``spoil`` change the loss of one micro-batch, counted over the run."""
    original, seen = forward_step.reduce_loss, 0

    def reduce_loss(*args: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        nonlocal seen
        seen += 1
        loss, num_tokens, logged = original(*args)
        return spoil(loss) if seen == at else loss, num_tokens, logged

    forward_step.reduce_loss = reduce_loss


def with_a_loss_that_is_nan() -> None:
    """In the second micro-batch of iteration 3."""
    _poison(2 * MICRO_BATCHES + 2, lambda loss: loss * float("nan"))
    pretrain.main()


def with_losses_that_are_nan_while_a_checkpoint_is_written() -> None:
    """From iteration 3 on, also when it is tried again; what is written in the background takes its time."""
    original_loss, original_digest, seen = forward_step.reduce_loss, hooks.leave_digest, 0

    def reduce_loss(*args: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        nonlocal seen
        seen += 1
        loss, num_tokens, logged = original_loss(*args)
        return loss * float("nan") if seen > 2 * MICRO_BATCHES else loss, num_tokens, logged

    def leave_digest(path: Path) -> None:
        time.sleep(3)
        original_digest(path)

    forward_step.reduce_loss, hooks.leave_digest = reduce_loss, leave_digest
    pretrain.main()


def with_gradients_that_are_infinite() -> None:
    """From the last micro-batch of iteration 4 on; the loss itself is finite."""

    def spoil(loss: Tensor) -> Tensor:
        loss = loss * 1.0
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    _poison(4 * MICRO_BATCHES, spoil)
    pretrain.main()


def with_a_spike() -> None:
    """In the first micro-batch after the hundred that Megatron takes its measure from."""
    _poison(101, lambda loss: loss * 100)
    pretrain.main()


def with_a_weight_that_is_nan() -> None:
    """In the second layer's MLP, from the start."""
    from megatron_exo.model.layer import ExoTransformerLayer

    original = ExoTransformerLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_number == 2:
            self.mlp.linear_fc1.weight.data[0, 0] = float("nan")
        return original(self, *args, **kwargs)

    ExoTransformerLayer.forward = forward  # type: ignore[method-assign]
    pretrain.main()


def _run(program: Any, folder: Path, *words: str) -> Outcome:
    return run_program(program, [*ARGUMENTS, "--save", folder, "--load", folder, *words])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("nan") / "run"
    return folder, _run(with_a_loss_that_is_nan, folder)


def test_a_loss_that_is_nan_stops_the_run_with_step_rank_and_batch(stopped: tuple[Path, Outcome]) -> None:
    folder, outcome = stopped
    path = folder / "not-finite" / "iteration-3-rank-0.pt"
    assert outcome.status == 1
    assert one_line(outcome.err).startswith(
        f"rank 0: found NaN in the local loss, iteration 3; its batch is in {path}, see --replay; "
        "the checkpoints before it are whole"
    )
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    saved = torch.load(path, weights_only=True)
    assert (saved["iteration"], saved["rank"]) == (3, 0)
    assert len(read_batch(path)) == 2  # of the step's four micro-batches, those that were read
    assert {name: tuple(value.shape) for name, value in saved["batches"][0].items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, 32)
    )


def test_a_gradient_that_is_infinite_stops_the_run_too(tmp_path: Path) -> None:
    outcome = _run(with_gradients_that_are_infinite, tmp_path)
    assert outcome.status == 1
    message = one_line(outcome.err)
    assert re.match(
        r"rank 0: found (NaN|Inf) in local grad norm for bucket #0 .*, iteration 4; its batch is in", message
    )
    assert len(read_batch(tmp_path / "not-finite" / "iteration-4-rank-0.pt")) == MICRO_BATCHES


def test_a_replay_trains_one_iteration_on_that_batch_and_saves_nothing(
    stopped: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(stopped[0], tmp_path / "run"))
    batch = str(folder / "not-finite" / "iteration-3-rank-0.pt")
    outcome = _run(pretrain.main, folder, "--replay", batch)
    assert outcome.status == 0, outcome.err
    assert re.search(r"iteration 3/3  loss \d\.\d+", outcome.out)
    assert "saved checkpoint" not in outcome.out
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"

    outcome = _run(with_a_weight_that_is_nan, folder, "--replay", batch)
    assert outcome.status == 1
    assert "the output of module.decoder.layers.1.mlp.linear_fc1 is the first that is not finite" in one_line(
        outcome.err
    )


def test_a_batch_of_an_earlier_start_is_not_taken_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonfinite, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(nonfinite.parallel_state, "get_data_parallel_rank", lambda: 0)
    (tmp_path / "iteration-3-rank-1.pt").write_bytes(b"of an earlier start")
    found = RuntimeError("Unexpected result nan on rank 1 at iteration #4 (message='found NaN in the local loss')")
    with (
        pytest.raises(UserError, match="found NaN in the local loss, iteration 3; no rank has its batch"),
        batch_saved_when_not_finite(Namespace(world_size=2, rank=1, curr_iteration=2), tmp_path),
    ):
        raise found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_rerun_has_found_is_saved_for_the_next_start(tmp_path: Path) -> None:
    """In the checkpoint of the step before, which is just being written."""
    words = "--rerun-mode validate_results --async-save".split()
    stopped, again = (_run(with_losses_that_are_nan_while_a_checkpoint_is_written, tmp_path, *words) for _ in range(2))
    assert stopped.status == again.status == 16
    assert "unexpected result is reproducible" in stopped.out
    assert damages(tmp_path / "iter_0000002", checksums=True) == []
    assert f"loaded checkpoint 2 from {tmp_path}\n" in again.out
    assert "Got rescheduled on the same GPU" in again.out


@pytest.mark.slow
def test_a_spike_of_the_loss_is_in_the_log_where_asked_for(tmp_path: Path) -> None:
    words = "--train-iters 27 --save-interval 100 --check-for-spiky-loss".split()
    for program, expected in ((with_a_spike, 1), (pretrain.main, 0)):
        folder = tmp_path / program.__name__
        outcome = _run(program, folder, *words)
        assert outcome.status == 0, outcome.err
        assert (folder / "logs" / "rank-0.log").read_text().count("spiky loss") == expected


def with_gradients_a_thousand_times_larger() -> None:
    """In iteration 3, by the last micro-batch of it."""
    _poison(3 * MICRO_BATCHES, lambda loss: loss * 1000)
    pretrain.main()


def test_an_update_whose_gradients_are_too_large_is_left_out_where_asked_for(tmp_path: Path) -> None:
    outcome = _run(with_gradients_a_thousand_times_larger, tmp_path, *"--grad-norm-skip-threshold 20".split())
    assert outcome.status == 0, outcome.err
    lines = re.findall(r"^iteration (\d)/4 .*$", outcome.out, flags=re.M)
    assert lines == ["1", "2", "3", "4"]
    assert re.findall(r"^iteration (\d)/4 .* 1 skipped$", outcome.out, flags=re.M) == ["3"]
    rates = re.findall(r"lr (\S+) ", outcome.out)
    assert rates[2] != rates[1]
    assert rates[3] == rates[2]  # the schedule waits


def test_a_file_that_is_no_batch_is_refused(stopped: tuple[Path, Outcome], tmp_path: Path) -> None:
    torch.save({"batches": [{"tokens": torch.zeros(1)}]}, tmp_path / "wrong.pt")
    with pytest.raises(
        UserError, match=r"wrong.pt is no batch that a run has saved: ValueError: a batch lacks a tensor;"
    ):
        read_batch(tmp_path / "wrong.pt")
    with pytest.raises(UserError, match="is no batch that a run has saved"):
        read_batch(tmp_path / "missing.pt")


@pytest.mark.slow
def test_a_rank_that_reads_no_batches_has_another_save_the_one_in_which_it_finds_something(tmp_path: Path) -> None:
    words = [*ARGUMENTS, "--save", str(tmp_path), "--load", str(tmp_path), "--tensor-model-parallel-size", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.infinite_gradient", *words],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    path = tmp_path / "not-finite" / "iteration-3-rank-1.pt"
    assert done.returncode == 1
    said = "\n".join(re.findall("^error: (.*)$", done.stderr, flags=re.M))
    assert re.match(r"rank 1: found (NaN|Inf) in local grad norm .*, iteration 3; its batch is in ", said)
    assert f"its batch is in {path}, see --replay" in said
    assert len(read_batch(path)) == MICRO_BATCHES
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    replayed = _run(pretrain.main, tmp_path, "--replay", str(path))
    assert replayed.status == 0, replayed.err
    assert "iteration 3/3" in replayed.out


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", torch.zeros(3, 8, dtype=torch.int64), r"labels has the shape .3, 8., not .2, 8.;"),
        ("tokens", torch.zeros(2, 8), "tokens is of torch.float32;"),
        ("loss_mask", torch.zeros(2, 8, dtype=torch.int64), "loss_mask is of torch.int64;"),
        ("sample_id", torch.zeros(1, 1), r"sample_id has the shape .1, 1., not .2.;"),
        ("loss_mask", torch.ones(1, 1).expand(2, 8), "a tensor of 16 elements in 4 bytes;"),
        ("tokens", "x", "AttributeError"),
    ],
)
def test_a_batch_is_held_to_one_shape_and_its_types(tmp_path: Path, name: str, value: object, message: str) -> None:
    whole = {key: torch.zeros(2, 8, dtype=torch.int64) for key in ("tokens", "labels", "position_ids")}
    whole |= {"loss_mask": torch.ones(2, 8), "sample_id": torch.zeros(2, 1, dtype=torch.int64)}
    torch.save({"batches": [whole, whole]}, tmp_path / "batch.pt")
    assert len(read_batch(tmp_path / "batch.pt")) == 2
    torch.save({"batches": [whole, whole | {name: value}]}, tmp_path / "batch.pt")
    with pytest.raises(UserError, match=message) as refusal:
        read_batch(tmp_path / "batch.pt")
    assert "\n" not in str(refusal.value)


def test_a_rank_that_keeps_no_batch_names_the_step(tmp_path: Path) -> None:
    megatrons = "Rank 1, device cpu, iteration 8: Unexpected result nan (message='found NaN in local grad norm')"
    args = Namespace(curr_iteration=6, rank=0, world_size=1)
    with pytest.raises(UserError, match="found NaN in local grad norm, iteration 7; no rank has its batch;"):
        with batch_saved_when_not_finite(args, tmp_path / "folder"):
            raise RuntimeError(megatrons)
    assert not (tmp_path / "folder").exists()


def test_other_errors_pass(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"^something else$"),
        batch_saved_when_not_finite(Namespace(world_size=1), tmp_path),
    ):
        raise RuntimeError("something else")


def test_only_the_step_in_progress_is_kept(tmp_path: Path) -> None:
    batches = StepBatches()
    for step, value in ((1, 0), (1, 1), (2, 2)):
        batches.note(step, {"tokens": torch.tensor([value])})
    assert batches.save(tmp_path / "batch.pt")
    (kept,) = torch.load(tmp_path / "batch.pt", weights_only=True)["batches"]
    assert kept["tokens"].tolist() == [2]
