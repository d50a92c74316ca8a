"""The command lines of tools/: help, refusals, and one pass from text to a checked dataset."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(tool: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{tool}", TOOLS / f"{tool}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "tool", ["build_demo_corpus.py", "train_tokenizer.py", "preprocess_data.py", "convert_shards.py"]
)
def test_help_explains_the_tool(tool: str) -> None:
    command = [sys.executable, str(TOOLS / tool), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"python tools/{tool}" in result.stdout


def test_text_becomes_a_checked_dataset(tmp_path: Path, jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, prefix = str(tmp_path / "tokenizer.model"), str(tmp_path / "data/train")
    load("train_tokenizer").main(["--input", str(jsonl), "--output", model, "--vocab-size", "500"])
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    preprocess_data = load("preprocess_data").main
    preprocess_data(["--input", str(jsonl), "--output-prefix", prefix, *tokenizer, "--workers", "2"])
    assert f"train with --data-path {prefix}" in capsys.readouterr().out
    preprocess_data(["--check", prefix, *tokenizer])
    assert "documents without a final separator  0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^preprocess_data: .*outside the vocabulary of 100"):
        preprocess_data(["--check", prefix, "--vocab-size", "100"])


def test_the_demo_corpus_tool_writes_both_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load("build_demo_corpus")
    topics = [source for source in tool.installed_sources() if source.kind == "topic"]
    monkeypatch.setattr(tool, "installed_sources", lambda: topics)
    tool.main(["--output-dir", str(tmp_path), "--validation-fraction", "0.1", "--workers", "1"])
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "validation.jsonl"}
    assert "topic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "x.jsonl"], "needs --output-prefix, --tokenizer-type, --tokenizer-model"),
        (["--check", "x", "--input", "y"], "drop --input"),
        (["--check", "x", "--tokenizer-type", "GPT2BPETokenizer"], "needs both"),
        (["--check", "x", "--workers", "0"], "--workers must be at least 1, not 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("preprocess_data").main(arguments)
    assert message in capsys.readouterr().err


def test_errors_end_the_tool_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^preprocess_data: no dataset at .*nowhere"):
        load("preprocess_data").main(["--check", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match=r"^train_tokenizer: .*nowhere\.txt: no such file"):
        load("train_tokenizer").main(["--input", str(tmp_path / "nowhere.txt"), "--output", "x"])
