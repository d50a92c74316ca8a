"""A run that has stopped half-way, made once for all tests of going on from it."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_exo.checkpoints.reading import read_index, read_saved_arguments
from tests.programs import Outcome
from tests.resume.runs import pretrain


@pytest.fixture(scope="session")
def first_half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a run that stopped after two of four iterations, and what it printed."""
    run = tmp_path_factory.mktemp("first-half") / "run"
    outcome = pretrain(run, "--exit-interval", "2")
    assert outcome.status == 0, outcome.err
    return run, outcome


@pytest.fixture
def run(first_half: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(first_half[0], tmp_path / "run"))


@pytest.fixture
def args(run: Path) -> Namespace:
    """The arguments with which the run would go on."""
    folder = run / "iter_0000002"
    saved = read_saved_arguments(folder, read_index(folder))
    saved.load = saved.save = str(run)
    return saved
