"""Asking for Transformer Engine where it cannot run."""

from __future__ import annotations

from megatron_exo.pretrain import main
from tests.programs import run_program


def test_transformer_engine_without_a_gpu_is_refused_in_one_line() -> None:
    arguments: list[object] = [
        "--preset",
        "demo",
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        100,
    ]
    arguments += ["--transformer-impl", "transformer_engine"]
    outcome = run_program(main, arguments, environment={"MEGATRON_EXO_DEVICE": "cpu"})
    assert outcome.status != 0
    (line,) = outcome.err.strip().splitlines()
    assert "--transformer-impl transformer_engine cannot be used here" in line
    assert "use --transformer-impl local" in line
