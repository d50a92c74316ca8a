"""Runs as files: what a key means, what wins over it, and the run of 1B parameters and 50B tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.training.arguments import parse_args

from megatron_exo import launch
from megatron_exo.accounting import parameters
from megatron_exo.arguments import add_exo_arguments, exo_config_from_args
from megatron_exo.presets import GPT2_VOCAB_SIZE
from megatron_exo.run_file import RunFileError, launcher_words
from megatron_exo.sizes import ModelSizes
from tests.programs import one_line, run_program

ROOT = Path(__file__).parent.parent
FALSIFICATION = ROOT / "examples" / "falsification_1b.toml"
CRITICS = (
    "dynamic-e-exoformer",
    "dynamic-e-nuresformer",
    "e-exoformer",
    "gated",
    "base",
    "e-exoformer-frozen-anchor",
    "dynamic-e-exoformer-frozen-anchor",
)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    def parse(file: Path, *words: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["pretrain", "--run-file", str(file), *words])
        return parse_args(add_exo_arguments)

    return parse


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "run.toml").write_text(text)
        return tmp_path / "run.toml"

    return write


# -- keys and values --------------------------------------------------------------------------------------------


def test_a_file_says_what_the_command_line_would(parse: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(
        """
        preset = "450M"
        exo_variant = "gated"           # either spelling
        lr = 1e-3
        bf16 = true
        sequence-parallel = false
        data-path = ["0.7", "a", 0.3, "b"]
        rl-partial-rollouts = false
        nnodes = 2
        """
    )
    from_file = vars(parse(file))
    words = "--preset 450M --exo-variant gated --lr 1e-3 --bf16 --data-path 0.7 a 0.3 b"
    monkeypatch.setattr(sys, "argv", ["pretrain", *words.split()])
    assert from_file | {"run_file": None} == vars(parse_args(add_exo_arguments))


def test_the_command_line_wins_in_either_place(parse: Any, write: Any) -> None:
    file = write('preset = "450M"\nexo-variant = "gated"\nlr = 1e-3\nseed = 7')
    args = parse(file, "--lr", "2e-3", "--exo-variant=base")
    assert (args.lr, args.min_lr, args.exo_variant, args.num_layers, args.seed) == (2e-3, 2e-4, "base", 32, 7)


@pytest.mark.parametrize("words", [["--train-iters", "5"], ["--train-samples=640"], ["--train_tokens", "1e6"]])
def test_another_way_to_give_the_length_takes_the_place_of_the_files(parse: Any, write: Any, words: list[str]) -> None:
    if "_" in words[0]:
        words = [words[0].replace("_", "-"), *words[1:]]
    args = parse(write('preset = "demo"\ntrain-tokens = 50e9'), *words)
    assert (args.train_iters, args.train_samples) == {"5": (5, None), "1e6": (489, None)}.get(words[-1], (None, 640))


def test_other_data_takes_the_place_of_the_files(parse: Any, write: Any) -> None:
    args = parse(write('data-path = "a"'), "--mock-data")
    assert (args.mock_data, args.data_path) == (True, None)


def test_texts_take_in_the_values_of_other_options(parse: Any, write: Any) -> None:
    file = write('exo-variant = "gated"\nsave = "runs/{exo-variant}-{seed}"\nload = "{ not a name }"')
    assert parse(file).save == "runs/gated-1234"  # Megatron's default seed
    args = parse(file, "--seed", "3", "--exo-variant=base")
    assert (args.save, args.load) == ("runs/base-3", "{ not a name }")


def test_the_launchers_keys_go_to_torchrun_alone(parse: Any, write: Any) -> None:
    file = write("nnodes = 4\nnproc_per_node = 8\nseed = 3")
    assert launcher_words(file) == ["--nnodes=4", "--nproc-per-node=8"]
    assert parse(file).seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian-tokens = 5", "run.toml: unknown key 'trian-tokens'; did you mean train-tokens or"),
        ("nnode = 5", "run.toml: unknown key 'nnode'; did you mean nnodes"),
        ("qqqqq = 5", "run.toml: unknown key 'qqqqq'; keys are options of the command line, see --help"),
        ('run-file = "b.toml"', "run.toml: unknown key 'run-file'"),
        ("dry-run = true", "run.toml: unknown key 'dry-run'"),
        ("bf16 = 1", "run.toml: bf16 = 1: this is a switch, give it as true or false"),
        ('bf16 = "yes"', "this is a switch"),
        ("seed = true", "run.toml: seed = True: this is not a switch, give it a value"),
        ("seed = [1, 2]", "run.toml: seed = .1, 2.: this takes one value, not a list"),
        ('save = "runs/{sed}"', "run.toml: {sed} names no option; write for example {exo-variant} or {seed}"),
        ("[model]\nseed = 1", "run.toml: .model. is a table; a run file has options"),
        ("seed", '--run-file .*run.toml is not TOML: .*; lines are like: preset = "1B"'),
        ("seed = 0x" + "f" * 5000, "run.toml is not TOML: Exceeds the limit"),
        ("seed = " + "[" * 100_000, "run.toml is not TOML: maximum recursion"),
        ("x" * 100_000 + " = 1", "run.toml: unknown key 'x*…; keys are options"),
        ('"a\\nb" = 1', "run.toml: unknown key 'a.*nb'"),
        ('["a\\nb"]', r"run.toml: .a\\nb. is a table"),
        ("seed = [1, " + '"' + "x" * 10_000 + '"]', "run.toml: seed = .1, 'x*…: this takes one value"),
        ('data-path = ["a", "b\\u0000"]', "run.toml: data-path has a NUL, which no path or option can hold"),
        ('save = "{' + "x" * 10_000 + '}"', "run.toml: {x*…} names no option"),
    ],
    ids=lambda value: value[:40],
)
def test_what_a_file_cannot_mean_is_refused(parse: Any, write: Any, text: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message) as refusal:
        parse(write(text))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def test_a_file_is_utf_8_whatever_the_locale(parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    (tmp_path / "run.toml").write_bytes('save = "läufe"'.encode())
    assert parse(tmp_path / "run.toml").save == "läufe"
    (tmp_path / "run.toml").write_bytes('save = "läufe"'.encode("latin-1"))
    with pytest.raises(RunFileError, match=r"run.toml is not TOML: 'utf-8' codec can't decode"):
        parse(tmp_path / "run.toml")


def test_a_file_that_is_not_there_is_named(parse: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"nothing\.toml cannot be read: No such file or directory; pass the path"):
        parse(tmp_path / "nothing.toml")


def test_a_value_of_the_wrong_kind_is_refused_as_on_the_command_line(
    parse: Any, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(write('lr = "fast"'))
    assert end.value.code == 2
    assert "argument --lr: invalid float value: 'fast'" in one_line(capsys.readouterr().err)


# -- the run of 1B parameters and 50B tokens --------------------------------------------------------------------


def test_the_falsification_run_is_a_short_file() -> None:
    assert len(FALSIFICATION.read_text().splitlines()) <= 17


@pytest.mark.parametrize("variant", CRITICS)
def test_the_falsification_run_is_50b_tokens_and_as_many_parameters_for_every_variant(parse: Any, variant: str) -> None:
    args = parse(FALSIFICATION, "--exo-variant", variant, "--seed", "3")
    assert args.train_tokens == 50_000_000_000
    step = args.global_batch_size * args.seq_length
    assert 0 <= args.train_iters * step - args.train_tokens < step
    assert args.lr_decay_iters == args.train_iters
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (32, 1536, 16)
    sizes = ModelSizes(32, 1536, 16, 16, 96, args.ffn_hidden_size, GPT2_VOCAB_SIZE, args.seq_length)
    assert sum(parameters(exo_config_from_args(args), sizes).values()) == pytest.approx(995.6e6, rel=0.002)
    assert args.save == args.load == f"runs/1B-50B/{variant}-3"
    assert (args.match, args.match_to, args.match_num_layers, args.match_ffn_hidden_size) == (
        ("depth", "dynamic-e-exoformer", 32, 3072)
    )


def test_the_plan_of_the_falsification_run_is_made_where_nothing_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_program(
        launch.main,
        ["--run-file", FALSIFICATION, "--dry-run", "--exo-variant", "dynamic-e-nuresformer", "--nnodes", "2"],
    )
    assert (done.status, done.err) == (0, "")
    text = " ".join(done.out.split())
    for expected in (
        "dynamic-e-nuresformer: gate elementwise, anchor internal",
        "32 layers, hidden size 1536, 16 heads of 96, FFN 3136, vocabulary 50,257",
        "depth and parameters, by FFN width, to dynamic-e-exoformer of 32 layers and FFN 3072: "
        "-0.00% of its parameters (-37,192), -0.00% of its FLOPs per token",
        "190,735 steps of 262,144 tokens (128 sequences of 2,048, documents masked), 50.00B tokens in all (35,840 more",
        "dp 16: 16 processes, 2 micro-batches of 4 a step",
        "dry run: nothing was built or started",
        "not on this machine: dataset data/fineweb-edu",
        "not on this machine: tokenizer data/gpt2 (a vocabulary of 50,257 assumed)",
    ):
        assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would_be_refused_for() -> None:
    done = run_program(launch.main, ["--run-file", FALSIFICATION, "--dry-run", "--nnodes", "3"])
    assert done.status == 1
    assert "--global-batch-size 128 is not divisible by --micro-batch-size 4 x 24" in one_line(done.err)


SMALL = (
    "--nnodes 1 --nproc-per-node 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --global-batch-size 8 --train-tokens 1000 "
    "--exo-variant dynamic-e-nuresformer --seed 5 --num-workers 0 --eval-iters 1"
).split()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["bash"], id="bash", marks=pytest.mark.slow),
        pytest.param([Path(sys.executable).parent / "torchrun", "--standalone"], id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_same_command_trains_the_same_file_at_a_small_size(command: list[object], tmp_path: Path) -> None:
    words = SMALL if command == ["bash"] else SMALL[4:]
    script = [*command, ROOT / "examples" / "pretrain_exoformer.sh", "--run-file", FALSIFICATION, *words]
    environment = os.environ | {"MEGATRON_EXO_DEVICE": "cpu"}
    done = subprocess.run(
        [*map(str, script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    text = " ".join(done.stdout.split())
    assert "4 steps of 256 tokens (8 sequences of 32, documents masked), 1.0k tokens in all (24 more" in text
    (run,) = (tmp_path / "runs" / "1B-50B").iterdir()
    assert run.name == "dynamic-e-nuresformer-5"
    records = map(json.loads, (run / "logs" / "metrics.jsonl").read_text().splitlines())
    assert [each["iteration"] for each in records if each["kind"] == "train"] == [1, 2, 3, 4]
    saved = json.loads((run / "iter_0000004" / "exo_manifest.json").read_text())["arguments"]
    # What the sizes were matched to, and what is left of the difference, is kept with the run.
    assert (saved["match"], saved["match_to"]) == ("depth", "dynamic-e-exoformer")
    assert (saved["match_num_layers"], saved["match_ffn_hidden_size"]) == (2, 128)
    assert saved["ffn_hidden_size"] > 128
    left = re.search(r"FFN 128: ([+-]\d+\.\d+)% of its parameters .*?, ([+-]\d+\.\d+)% of its FLOPs", text)
    assert left is not None
    for name, percent in zip(("parameters", "flops"), left.groups(), strict=True):
        assert 100 * saved[f"match_{name}_difference"] == pytest.approx(float(percent), abs=0.006)
    assert (saved["train_tokens"], saved["seed"], saved["bf16"]) == (1000, 5, True)
