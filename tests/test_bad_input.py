"""What a user can get wrong is answered with one line that says what, why, and what to do, before anything is built."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_exo import startup
from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.variants import VARIANTS
from tests.programs import MOCK_DATA, MODEL, RUN, one_line

# -- seen on the command line itself ----------------------------------------------------------------------------

COMMAND_LINES: list[tuple[str, int, str]] = [
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-varient gated", 2, "unknown argument --exo-varient; did you mean --exo-variant"),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-var gated", 2, "unknown argument --exo-var; did you mean"),  # no abbreviations
    (f"{MODEL} {RUN} {MOCK_DATA} --tensor-model-paralel-size=2", 2, "did you mean --tensor-model-parallel-size"),
    (f"{MODEL} {RUN} {MOCK_DATA} --qqq", 2, "unknown argument --qqq; --help lists them all"),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-gate headwise", 2, "argument --exo-gate: invalid choice: 'headwise'"),
    (f"{MODEL} {RUN} {MOCK_DATA} --num-layers many", 2, "argument --num-layers: invalid int value: 'many'"),
    (f"{MODEL} {RUN} {MOCK_DATA} --preset demo --hidden-size wide", 2, "argument --hidden-size: invalid int value"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --exo-variant e-exofromer",
        1,
        "unknown variant 'e-exofromer'; did you mean e-exoformer",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --preset 450", 1, "unknown preset '450'; did you mean 450M"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --exo-pathways xyz",
        1,
        "exo pathways: 'xyz' is not a subset of the pathways Q, K, V, G",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-anchor none", 1, "exo pathways 'qkvg' has no effect without an anchor; choose"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --exo-drop-anchor q",
        1,
        "interventions at inference; leave them out, or .* --skip-train",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-drop-current q", 1, "interventions at inference"),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-z-loss-weight -1", 1, "must not be negative, got -1.0; pass 0 for none"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --reset-attention-mask",
        1,
        "--reset-attention-mask does not reach an ExoFormer's attention; pass --exo-documents masked or restarted",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --reset-position-ids", 1, "--reset-position-ids does not reach .* --exo-documents"),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-documents restarted --position-embedding-type none", 1, "is about rotary posit"),
    (f"{MODEL} {RUN} {MOCK_DATA} --exo-documents apart", 2, "argument --exo-documents: invalid choice: 'apart'"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --use-megatron-fsdp",
        1,
        "--use-megatron-fsdp is not supported with ExoFormer; leave it",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --multi-latent-attention",
        1,
        "--multi-latent-attention is not supported with ExoFormer",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --use-checkpoint-args",
        1,
        "--use-checkpoint-args reads the checkpoint before it has been checked",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --yaml-cfg run.yaml", 1, "--yaml-cfg replaces the command line .* pass arguments"),
    (
        f"{RUN} {MOCK_DATA}",
        1,
        "not given: --num-layers, --hidden-size, .* pass these, or --preset with one of demo, 20M, .* 7B",
    ),
    (f"{MODEL} {MOCK_DATA}", 1, "not given: --micro-batch-size, --lr, --eval-interval"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --train-iters 0",
        1,
        "length of the run is not given; pass --train-iters, --train-samples",
    ),
    (f"{MODEL} {RUN}", 1, "no data: pass --data-path PREFIX .* --mock-data, or run examples/quickstart.sh"),
    (
        f"{MODEL} {RUN} --mock-data",
        1,
        "no tokenizer; pass --tokenizer-type and --tokenizer-model as the data was made with",
    ),
    (f"{MODEL} {RUN} --mock-data --tokenizer-type NullTokenizer", 1, "has no vocabulary of its own; pass --vocab-size"),
    (
        f"{MODEL} {RUN} --data-path a --tokenizer-type SentencePieceTokenizer --tokenizer-model a.model",
        1,
        "a.model is no file; pass the SentencePiece .model that made the data",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --save runs",
        1,
        "--save without --save-interval; pass the number of iterations between",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --lr-warmup-iters 4",
        1,
        "warmup-iters 4 is not shorter than the schedule of 4 iters; pass",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --rampup-batch-size 2 2 24",
        1,
        "Megatron ignores --rampup-batch-size; pass --step-batch-size-schedule 'TOKENS:BATCH",
    ),
    (
        f"{MODEL} {RUN.replace('--global-batch-size 8', '')} {MOCK_DATA} --step-batch-size-schedule 0:2",
        1,
        "--step-batch-size-schedule with --train-iters; pass the length as --train-tokens or --train-samples",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --min-lr 1e-2", 1, "--lr 0.001 is below --min-lr 0.01, .* pass a smaller --min-lr"),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --lr-decay-style WSD",
        1,
        "WSD without --lr-wsd-decay-iters; pass the length of its last",
    ),
    (
        f"{MODEL} {RUN} {MOCK_DATA} --preset demo --hidden-size 33",
        1,
        "hidden size 33 cannot be divided into 4 heads; give",
    ),
    (f"{MODEL} {RUN} {MOCK_DATA} --match depth", 1, "--match is about the sizes of a preset; pass --preset, or leave"),
    (f"{MODEL} {RUN} {MOCK_DATA} --train-tokens 1e6", 1, "--train-tokens and --train-iters both give the length of"),
    (f"{MODEL} {MOCK_DATA} --train-tokens 1e6", 1, "--train-tokens needs --global-batch-size and --seq-length, or"),
    (f"{MODEL} {MOCK_DATA} --train-tokens 1.5", 2, "argument --train-tokens: '1.5' is no number of tokens; write"),
    (f"{MODEL} {MOCK_DATA} --train-tokens many", 2, "argument --train-tokens: 'many' is no number of tokens; write"),
    (f"{MODEL} {RUN} {MOCK_DATA} --dry-run", 1, "--dry-run is an option of training alone; leave it out"),
]


@pytest.fixture
def preview(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """What a program does first with its command line; returns exit status and message."""

    def preview(words: str, **environment: str) -> tuple[int, str]:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MEGATRON_EXO_DEVICE", "cpu")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["pretrain", *words.split()])
        with pytest.raises(SystemExit) as end, one_line_errors():
            startup.preview()
        assert isinstance(end.value.code, int)
        return end.value.code, one_line(capsys.readouterr().err)

    return preview


@pytest.mark.parametrize(("words", "status", "message"), COMMAND_LINES, ids=[line[2][:40] for line in COMMAND_LINES])
def test_a_command_line_that_cannot_be_met_is_refused(preview: Any, words: str, status: int, message: str) -> None:
    seen = preview(words)
    assert seen[0] == status
    assert re.search(message, seen[1]), seen[1]


@pytest.mark.parametrize(("have_te", "why"), [(False, "it is not installed"), (True, "it needs a CUDA device")])
def test_transformer_engine_where_it_cannot_run_is_refused(
    preview: Any, monkeypatch: pytest.MonkeyPatch, have_te: bool, why: str
) -> None:
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", have_te)
    status, message = preview(f"{MODEL} {RUN} {MOCK_DATA} --transformer-impl transformer_engine")
    assert status == 1
    assert f"cannot be used here: {why}; use --transformer-impl local" in message


LAYOUTS = [
    (3, "--tensor-model-parallel-size 3", "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"),
    (3, "--tensor-model-parallel-size 2", "3 processes cannot be divided into groups of tp 2 x pp 1 x cp 1 = 2; start"),
    (3, "--pipeline-model-parallel-size 3", "--num-layers 4 is not divisible by --pipeline-model-parallel-size 3; use"),
    (3, "", "--global-batch-size 8 is not divisible by --micro-batch-size 2 x 3 data-parallel processes; change one"),
]


@pytest.mark.parametrize(("world_size", "words", "message"), LAYOUTS)
def test_a_layout_that_does_not_fit_the_processes_is_refused(
    preview: Any, world_size: int, words: str, message: str
) -> None:
    status, seen = preview(f"{MODEL} {RUN} {MOCK_DATA} {words}", WORLD_SIZE=str(world_size))
    assert status == 1
    assert message in seen


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(preview: Any, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    for folder, why in ((file, "it is a file"), (file / "run", "Not a directory")):
        status, message = preview(f"{MODEL} {RUN} {MOCK_DATA} --save {folder} --save-interval 2")
        assert (status, message) == (1, f"--save {folder} cannot be written: {why}; choose another folder")


def test_a_disk_with_less_room_than_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "kv_channels": 64, "seq_length": 2048}
    args = Namespace(**sizes, ffn_hidden_size=2048, group_query_attention=False, bf16=True, fp16=False)
    args.save, args.no_save_optim, args.untie_embeddings_and_output_weights = str(tmp_path), False, True
    args.rotary_base, args.layernorm_epsilon = 500_000, 1e-6

    def check(free: float) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        startup.check_storage(args, VARIANTS["base"].exo, vocab_size=50_257)

    # 144M parameters in bf16, with fp32 masters and two moments: 14 bytes each.
    check(free=2.1e9)
    with pytest.raises(UserError, match=r"has 1\.5 GB free and one checkpoint takes about 2\.0 GB; make room"):
        check(free=1.5e9)
    args.no_save_optim = True
    check(free=1.5e9)
    args.save = None
    check(free=0)


@pytest.mark.slow
def test_a_real_start_prints_the_one_line_and_nothing_else() -> None:
    program = [sys.executable, "-m", "megatron_exo.pretrain", "--exo-variant", "e-exofromer"]
    outcome = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert "did you mean e-exoformer" in one_line(outcome.stderr)
