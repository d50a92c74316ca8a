"""2N steps are N steps, a checkpoint, and N steps: to the bit in the same layout, and with the same data in any."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_exo.checkpoints.inspection import checkpoint_at, compare
from megatron_exo.data.sample_log import read_sample_log
from megatron_exo.errors import UserError
from tests.programs import MOCK_DATA, MODEL
from tests.ranks import run_on_ranks

RUN = "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 2 --eval-iters 1"
RUN += " --train-iters 8 --eval-interval 3 --log-interval 1 --num-workers 0 --hidden-dropout 0.1 --exo-log-samples"
WITHOUT_CHANCE = "--hidden-dropout 0 --make-vocab-size-divisible-by 16 --exo-init megatron"
"""Nothing is drawn in training, padding is the same on every layout, and no first gradient is zero."""
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
    # The loss scale doubles after every third update: in the second and in the fifth step after the resume.
    "fp16": (1, "--fp16 --initial-loss-scale 1024 --loss-scale-window 3"),
    # The momentum of each of the eight updates is another.
    "muon tp2": (2, "--optimizer muon --exo-muon-split per-component --tensor-model-parallel-size 2"),
    "muon dp2": (
        2,
        "--optimizer muon --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}


SCALE = "shared state.optimizer.grad_scaler."
"""What a checkpoint says of the loss scale."""
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"
OTHER_LAYOUTS = {
    "1 to tp2 sp": ((1, ""), (2, "--tensor-model-parallel-size 2 --sequence-parallel")),
    "tp2 to pp2": ((2, "--tensor-model-parallel-size 2"), (2, "--pipeline-model-parallel-size 2")),
    "pp2 to dp2": ((2, "--pipeline-model-parallel-size 2"), (2, "--use-distributed-optimizer")),
    "dp2 to cp2": ((2, "--use-distributed-optimizer"), (2, "--context-parallel-size 2 --use-distributed-optimizer")),
    "dp4 to 1": ((4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"), (1, "")),
    "muon, tp2 to dp2": ((2, f"{MUON} --tensor-model-parallel-size 2"), (2, MUON)),
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
    assert not [name for name in difference.settings if name.startswith(SCALE)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of one process that are not interrupted, by their optimizer."""

    @functools.cache
    def run(optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        _train(folder, 1, f"{WITHOUT_CHANCE} --save-interval 8 {optimizer}")
        return folder

    return run


@pytest.mark.parametrize(
    "layouts", [pytest.param(name, marks=[] if name == "1 to tp2 sp" else pytest.mark.slow) for name in OTHER_LAYOUTS]
)
def test_a_run_that_goes_on_in_another_layout_is_the_same_run(
    tmp_path: Path, layouts: str, whole: Callable[[str], Path]
) -> None:
    first, second = OTHER_LAYOUTS[layouts]
    expected = whole(MUON if "muon" in layouts else "")
    _train(tmp_path, first[0], f"{WITHOUT_CHANCE} {first[1]} --save-interval 4 --exit-interval 4")
    _train(tmp_path, second[0], f"{WITHOUT_CHANCE} {second[1]} --save-interval 4")
    (counted, losses), (expected_counted, expected_losses) = _records(tmp_path), _records(expected)
    assert counted == expected_counted
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert read_sample_log(tmp_path / "logs") == read_sample_log(expected / "logs")
    difference = compare(*(checkpoint_at(run) for run in (expected, tmp_path)))
    weights = [each for each in difference.values if not each.name.startswith("optimizer.")]
    assert difference.equal + len(difference.values) > 100
    assert max(each.largest for each in weights) < 1e-5


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
