"""The campaign of kills, in short: what it finds after each kill is right, and a run that lost something fails it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_exo.checkpoints.integrity import MANIFEST
from megatron_exo.checkpoints.reading import TRACKER
from tools import crash_campaign


@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_disturbed_them(tmp_path: Path) -> None:
    record = tmp_path / "kills.json"
    words = f"--kills 2 --iterations 20 --async-save --max-restarts --folder {tmp_path} --json {record}"
    crash_campaign.main(words.split())
    kills = json.loads(record.read_text())
    assert len(kills) == 2
    assert all(kill["trouble"] == "" and kill["seconds_to_end"] < 60 for kill in kills)
    assert (tmp_path / "undisturbed" / TRACKER).read_text() == "20"


def _checkpoint(root: Path, iteration: int, named: bool) -> Path:
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")  # damaged
    if named:
        (root / TRACKER).write_text(str(iteration))
    return folder


def test_a_damaged_checkpoint_that_the_run_names_is_trouble(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 4, named=True)
    assert crash_campaign.loadable_iteration(tmp_path) == 4
    assert "is damaged" in crash_campaign.trouble_with(tmp_path, 4)


def test_a_damaged_checkpoint_that_nothing_names_is_not_one_to_load(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 2, named=False)
    assert crash_campaign.loadable_iteration(tmp_path) is None
    assert crash_campaign.trouble_with(tmp_path, None) == ""
