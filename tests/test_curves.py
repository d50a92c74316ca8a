"""Loss curves out of metrics.jsonl."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_exo.curves import CurveError, Run, draw, read_run, sparkline, summary

TOOL = Path(__file__).parents[1] / "tools" / "plot_curve.py"
PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def train(iteration: int, loss: float | None, tokens_per_iteration: int = 2048) -> dict[str, Any]:
    tokens = iteration * tokens_per_iteration
    return {"kind": "train", "iteration": iteration, "lm_loss": loss, "consumed_tokens": tokens}


def validation(iteration: int, loss: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "validation", "iteration": iteration, "lm_loss": loss, **fields}


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    logs = folder / "logs"
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_a_resumed_run_is_one_curve_without_what_it_went_back_behind(tmp_path: Path) -> None:
    before = [train(10, 9.0), train(20, 8.0), validation(20, 8.1), train(30, 7.0), validation(30, 7.1), train(40, 6.0)]
    after = [train(21, 7.9), train(30, 7.2), validation(30, 7.3)]
    run = read_run(write_run(tmp_path / "run", before + after))
    assert [(r["iteration"], r["lm_loss"]) for r in run.train] == [(10, 9.0), (20, 8.0), (21, 7.9), (30, 7.2)]
    assert [(r["iteration"], r["lm_loss"]) for r in run.evaluations] == [(20, 8.1), (30, 7.3)]


def test_the_last_validation_of_an_iteration_counts(tmp_path: Path) -> None:
    records = [train(10, 9.0), validation(10, 8.1), validation(10, 8.2), validation(10, 5.0, set="wiki")]
    run = read_run(write_run(tmp_path / "run", records))
    assert [r["lm_loss"] for r in run.validation_sets()[None]] == [8.2]
    assert [r["lm_loss"] for r in run.validation_sets()["wiki"]] == [5.0]


@pytest.mark.parametrize("torn", ['{"kind": "tra', "[1, 2]", '{"kind": "train", "iteration": "10"}', "\\xff"])
def test_a_line_that_is_not_a_record_is_skipped_with_a_notice(torn: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train(10, 9.0)])
    with (folder / "logs" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    run = read_run(folder)
    assert len(run.train) == 1
    (notice,) = run.notices
    assert "line 2 is not a record" in notice


@pytest.mark.parametrize("place", ["run", "run/logs", "run/logs/metrics.jsonl"])
def test_a_run_is_named_by_its_folder_however_it_is_given(place: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [train(10, 9.0)])
    assert read_run(tmp_path / place).name == "run"


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(CurveError, match="no records yet"):
        read_run(write_run(tmp_path / "run", []))


@pytest.mark.parametrize(
    ("iteration", "tokens"),
    [
        (5, 5 * 2048),  # before the first record
        (10, 10 * 2048),
        (15, 10 * 2048 + 5 * 6144),  # between records of which the second has a larger batch
        (25, 20 * 4096 + 5 * 6144),  # after the last
    ],
)
def test_validation_is_placed_at_its_training_tokens(iteration: int, tokens: int) -> None:
    run = Run("run", train=[train(10, 9.0), train(20, 8.0, tokens_per_iteration=4096)])
    assert run.position(validation(iteration, 8.5), "tokens") == tokens
    assert run.position(validation(iteration, 8.5), "iterations") == iteration


def test_validation_without_training_has_no_place_in_tokens() -> None:
    with pytest.raises(CurveError, match="use --x iterations"):
        Run("run").position(validation(10, 8.5), "tokens")


def test_a_sparkline_goes_from_the_highest_to_the_lowest_bar() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([float(value) for value in range(100, 0, -1)], width=5) == "█▆▅▃▁"
    assert sparkline([2.0, math.nan, 1.0]) == "█ ▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([math.nan]) == " "
    assert sparkline([]) == ""


def test_a_summary_has_the_first_and_the_last_loss() -> None:
    run = Run("base", train=[train(10, 9.0), train(20, None), train(30, 5.5)], evaluations=[validation(30, 5.6)])
    assert summary(run) == "█ ▁  base: loss 9.0000 → 5.5000 at iteration 30, validation 5.6000"


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"use for example \.png"):
        draw([Run("run", train=[train(10, 9.0)])], tmp_path / "curve.txt")


def test_the_picture_holds_every_curve_and_reference(tmp_path: Path) -> None:
    runs = [
        Run("a", train=[train(10, 9.0), train(20, 8.0)], evaluations=[validation(20, 7.5)]),
        Run("b", train=[train(10, 8.0)], evaluations=[validation(10, 7.0), validation(10, 6.0, set="wiki")]),
    ]
    draw(runs, tmp_path / "new" / "curve.svg", references={"unigram entropy": 6.98})
    picture = (tmp_path / "new" / "curve.svg").read_text()
    for text in (
        "a, training",
        "a, validation: 7.500",
        "b, validation (wiki): 6.000",
        "unigram entropy 6.980",
        "training tokens (thousands)",
    ):
        assert f"<!-- {text} -->" in picture  # the SVG writer names the glyphs it draws


def test_seeds_share_a_colour_and_many_runs_have_their_legend_beside_them(tmp_path: Path) -> None:
    runs = [
        Run(f"{name}-{seed}", train=[train(10, 9.0), train(20, 8.0)], evaluations=[validation(20, 7.0 + seed)])
        for name in ("gated", "exo")
        for seed in (1, 2, 3)
    ]
    draw(runs, tmp_path / "curve.svg")
    picture = (tmp_path / "curve.svg").read_text()
    assert "<!-- exo-3, validation: 10.000 -->" in picture
    assert "training -->" not in picture
    assert {f"stroke: {color}" in picture for color in ("#1f77b4", "#ff7f0e")} == {True}
    assert "stroke: #2ca02c" not in picture


def test_the_tool_draws_and_tells(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [train(10, 9.0), train(20, 8.0), validation(20, 8.5)]) for name in ("a", "b")]
    with (runs[0] / "logs" / "metrics.jsonl").open("a") as file:
        file.write("{")
    done = run_tool(*runs, "--output", tmp_path / "loss.png", "--reference", "unigram entropy=6.98")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_HEADER)
    assert "a: loss 9.0000 → 8.0000" in done.stdout
    assert done.stdout.endswith(f"wrote {tmp_path / 'loss.png'}\n")
    assert "line 4 is not a record" in done.stderr


def test_the_tool_writes_into_the_run_unless_told_otherwise_and_tells_equal_names_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / seed / "run", [train(10, 9.0)]) for seed in ("1", "2")]
    done = run_tool(*runs, "--x", "iterations")
    assert done.returncode == 0, done.stderr
    assert (runs[0] / "loss.png").is_file()
    assert all(str(run) in done.stdout for run in runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "plot_curve: missing has no metrics.jsonl"),
        (["missing", "--reference", "unigram"], "'unigram' is not NAME=VALUE"),
        (["missing", "--reference", "unigram=nan"], "'unigram=nan' is not NAME=VALUE"),
    ],
)
def test_the_tool_says_in_one_line_what_is_wrong(arguments: list[str], message: str) -> None:
    done = run_tool(*arguments)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_tool_has_help() -> None:
    done = run_tool("--help")
    assert done.returncode == 0
    assert "--reference NAME=VALUE" in done.stdout
