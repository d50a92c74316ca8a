"""2N steps are N steps, a checkpoint, and N steps: to the bit in the same layout, and with the same data in any."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_exo.checkpoints.inspection import checkpoint_at, compare
from megatron_exo.data.sample_log import read_sample_log
from megatron_exo.errors import UserError
from tests.programs import MOCK_DATA, MODEL
from tests.ranks import run_on_ranks

RUN = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --eval-iters 1"
RUN += " --train-iters 8 --eval-interval 3 --log-interval 1 --num-workers 0 --hidden-dropout 0.1 --exo-log-samples"
SAME_LAYOUT = {
    "1": (1, ""),
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 vpp2, documents masked": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --exo-documents masked",
    ),
    "bf16": (1, "--bf16"),
    # The momentum of each of the eight updates is another.
    "muon tp2": (2, "--optimizer muon --exo-muon-split per-component --tensor-model-parallel-size 2"),
    "muon dp2": (
        2,
        "--optimizer muon --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}


def _pretrain(arguments: Sequence[str]) -> None:
    import sys

    from megatron_exo.pretrain import main

    sys.argv = ["pretrain", *arguments]
    with contextlib.suppress(SystemExit):  # how Megatron ends at --exit-interval
        main()


def _train(folder: Path, ranks: int, words: str) -> None:
    arguments = f"{MODEL} {MOCK_DATA} {RUN} --save {folder} --load {folder} {words}"
    run_on_ranks(ranks, _pretrain, arguments.split(), process_group=False)


def _records(folder: Path) -> tuple[list[tuple[int, float, int]], list[float]]:
    """(iteration, learning rate, consumed tokens) and the loss of every iteration."""
    lines = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    train = [record for record in lines if record["kind"] == "train"]
    counted = [(r["iteration"], r["learning_rate"], r["consumed_tokens"]) for r in train]
    return counted, [record["lm_loss"] for record in train]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "dp2" else pytest.mark.slow) for name in SAME_LAYOUT]
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path, layout: str) -> None:
    ranks, words = SAME_LAYOUT[layout]
    _train(tmp_path / "whole", ranks, f"{words} --save-interval 8")
    _train(tmp_path / "parts", ranks, f"{words} --save-interval 4 --exit-interval 4")
    _train(tmp_path / "parts", ranks, f"{words} --save-interval 4")
    (counted, losses), expected = _records(tmp_path / "parts"), _records(tmp_path / "whole")
    assert counted == expected[0]
    assert losses == pytest.approx(expected[1], abs=2e-6)  # as printed, with six decimals
    assert read_sample_log(tmp_path / "parts" / "logs") == read_sample_log(tmp_path / "whole" / "logs")
    ends = [checkpoint_at(tmp_path / run) for run in ("whole", "parts")]
    assert [end.name for end in ends] == ["iter_0000008"] * 2
    difference = compare(*ends)
    assert difference.equal > 100  # weights, masters, moments
    assert not difference.tensors_differ()
    assert not difference.objects  # among them what the next dropout would draw from


@pytest.mark.slow
def test_the_same_samples_are_taken_with_another_data_parallel_size(tmp_path: Path) -> None:
    _train(tmp_path / "whole", 1, "--save-interval 8")
    _train(tmp_path / "parts", 1, "--save-interval 4 --exit-interval 4")
    _train(tmp_path / "parts", 2, "--save-interval 4")
    samples = read_sample_log(tmp_path / "whole" / "logs")
    assert sorted(samples) == list(range(1, 9))
    assert len({number for step in samples.values() for number in step}) == 8 * 4
    assert read_sample_log(tmp_path / "parts" / "logs") == samples


def test_repeated_iterations_count_once(tmp_path: Path) -> None:
    lines = [(1, [0]), (2, [1]), (3, [2]), (2, [1]), (3, [2]), (4, [3])]
    text = "\n".join(json.dumps({"iteration": step, "samples": samples}) for step, samples in lines)
    (tmp_path / "samples-dp0.jsonl").write_text(text)
    assert read_sample_log(tmp_path) == {1: [0], 2: [1], 3: [2], 4: [3]}


def test_a_log_of_samples_names_the_line_that_it_cannot_read(tmp_path: Path) -> None:
    log = tmp_path / "samples-dp0.jsonl"
    for line in (
        '{"iteration": 2, "sam',
        '{"iteration": "2", "samples": []}',
        '{"iteration": 2, "samples": [0.5]}',
        "2",
    ):
        log.write_text('{"iteration": 1, "samples": [0]}\n' + line)
        with pytest.raises(UserError, match=r"samples-dp0\.jsonl, line 2 is no record of a step"):
            read_sample_log(tmp_path)
