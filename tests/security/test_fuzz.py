"""Damaged files of every kind are read, or refused in one line: no traceback, crash, hang or giant allocation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_exo.errors import UserError
from megatron_exo.fuzzing import process
from megatron_exo.fuzzing.kinds import KINDS, Kind, damaged
from megatron_exo.fuzzing.process import FAILURES, OUTCOMES, fuzz
from tests.ranks import forked

MEMORY = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def same_server() -> None:
    """Or the server of the fuzzer would be that of all tests that come later."""
    forked()


ARCHIVES = (
    *("reference", "index", "shared-state", "tensor", "chunks", "manifest", "description", "tracker"),
    *("rank-file", "tokens", "weights-loaded", "config-loaded", "generation"),
)
"""Kinds of which an input takes long, some of them a tenth of a second and more."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ARCHIVES else []) for name in KINDS]
)
def test_two_hundred_damaged_files_are_read_or_refused(name: str, samples: Path) -> None:
    result = fuzz(name, samples, inputs=200, seed=0, memory=MEMORY, time_out=60.0)
    assert not result.failures
    assert sum(result.counts.values()) == 200
    assert result.counts["refused"] > 0


def test_an_input_depends_on_its_number_and_the_seed_alone(samples: Path) -> None:
    kind, valid = KINDS["sidecar"](), (samples / "data.json").read_bytes()
    inputs = [damaged(kind, valid, "sidecar", 0, number) for number in range(50)]
    assert inputs == [damaged(kind, valid, "sidecar", 0, number) for number in range(50)]
    assert inputs != [damaged(kind, valid, "sidecar", 1, number) for number in range(50)]
    assert len(set(inputs)) > 40


def _fail_now_and_then(folder: Path) -> None:
    content = (folder / "data.json").read_bytes()
    match sum(content) % 7 if not content.startswith(b'{\n  "tokenizer_type": "SentencePieceTokenizer"') else 0:
        case 1:
            raise UserError("refused")
        case 2:
            raise UserError("refused\nin two lines")
        case 3:
            raise KeyError("raw")
        case 4:
            os.abort()
        case 5:
            bytearray(4 * MEMORY)
        case 6:
            while True:
                pass


def test_every_way_to_fail_is_seen(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: workers are forked here, so that they have the planted reader."""
    import multiprocessing

    monkeypatch.setitem(KINDS, "planted", lambda: Kind("data.json", _fail_now_and_then))
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(fork, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(process.multiprocessing, "get_context", lambda method: fork)
    result = fuzz("planted", samples, inputs=60, seed=0, memory=MEMORY, time_out=2.0)
    assert set(result.counts) == set(OUTCOMES)
    assert {outcome for _, outcome, _ in result.failures} == set(FAILURES)
    assert any(said.startswith("not one line") for _, _, said in result.failures)
