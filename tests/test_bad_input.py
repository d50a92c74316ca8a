"""What a user can get wrong is answered with one line that says what, why, and what to do, before anything is built."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_exo import startup
from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.pretrain import main
from megatron_exo.variants import VARIANTS
from tests.programs import Outcome, run_program

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --eval-iters 1 --eval-interval 100"
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"


def one_line(err: str) -> str:
    """The message on standard error, of which there is one and nothing else."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip("\n")


# -- seen on the command line itself ----------------------------------------------------------------------------

COMMAND_LINES: list[tuple[str, int, str]] = [
    (f"{SIZES} {RUN} {MOCK} --exo-varient gated", 2, "unknown argument --exo-varient; did you mean --exo-variant"),
    (f"{SIZES} {RUN} {MOCK} --exo-var gated", 2, "unknown argument --exo-var; did you mean"),  # no abbreviations
    (f"{SIZES} {RUN} {MOCK} --tensor-model-paralel-size=2", 2, "did you mean --tensor-model-parallel-size"),
    (f"{SIZES} {RUN} {MOCK} --qqq", 2, "unknown argument --qqq; --help lists them all"),
    (f"{SIZES} {RUN} {MOCK} --exo-gate headwise", 2, "argument --exo-gate: invalid choice: 'headwise'"),
    (f"{SIZES} {RUN} {MOCK} --num-layers many", 2, "argument --num-layers: invalid int value: 'many'"),
    (f"{SIZES} {RUN} {MOCK} --preset demo --hidden-size wide", 2, "argument --hidden-size: invalid int value"),
    (f"{SIZES} {RUN} {MOCK} --exo-variant e-exofromer", 1, "unknown variant 'e-exofromer'; did you mean e-exoformer"),
    (f"{SIZES} {RUN} {MOCK} --preset 450", 1, "unknown preset '450'; did you mean 450M"),
    (f"{SIZES} {RUN} {MOCK} --exo-pathways xyz", 1, "exo pathways: 'xyz' is not a subset of the pathways Q, K, V, G"),
    (f"{SIZES} {RUN} {MOCK} --exo-anchor none", 1, "exo pathways 'qkvg' has no effect without an anchor; choose"),
    (f"{SIZES} {RUN} {MOCK} --exo-drop-anchor q", 1, "interventions at inference; leave them out, or .* --skip-train"),
    (f"{SIZES} {RUN} {MOCK} --exo-drop-current q", 1, "interventions at inference"),
    (f"{SIZES} {RUN} {MOCK} --exo-z-loss-weight -1", 1, "must not be negative, got -1.0; pass 0 for none"),
    (f"{SIZES} {RUN} {MOCK} --use-megatron-fsdp", 1, "--use-megatron-fsdp is not supported with ExoFormer; leave it"),
    (f"{SIZES} {RUN} {MOCK} --multi-latent-attention", 1, "--multi-latent-attention is not supported with ExoFormer"),
    (f"{SIZES} {RUN} {MOCK} --yaml-cfg run.yaml", 1, "--yaml-cfg replaces the command line .* pass arguments"),
    (
        f"{RUN} {MOCK}",
        1,
        "not given: --num-layers, --hidden-size, .* pass these, or --preset with one of demo, 450M, 1B",
    ),
    (f"{SIZES} {MOCK}", 1, "not given: --micro-batch-size, --lr, --eval-interval"),
    (f"{SIZES} {RUN} {MOCK} --train-iters 0", 1, "length of the run is not given; pass --train-iters, --train-samples"),
    (f"{SIZES} {RUN}", 1, "no data: pass --data-path PREFIX .* --mock-data, or run examples/quickstart.sh"),
    (
        f"{SIZES} {RUN} --mock-data",
        1,
        "no tokenizer; pass --tokenizer-type and --tokenizer-model as the data was made with",
    ),
    (f"{SIZES} {RUN} --mock-data --tokenizer-type NullTokenizer", 1, "has no vocabulary of its own; pass --vocab-size"),
    (
        f"{SIZES} {RUN} --data-path a --tokenizer-type SentencePieceTokenizer --tokenizer-model a.model",
        1,
        "a.model is no file; pass the SentencePiece .model that made the data",
    ),
    (f"{SIZES} {RUN} {MOCK} --save runs", 1, "--save without --save-interval; pass the number of iterations between"),
    (
        f"{SIZES} {RUN} {MOCK} --lr-warmup-iters 4",
        1,
        "warmup-iters 4 is not shorter than the schedule of 4 iters; pass",
    ),
    (f"{SIZES} {RUN} {MOCK} --min-lr 1e-2", 1, "--lr 0.001 is below --min-lr 0.01, .* pass a smaller --min-lr"),
    (f"{SIZES} {RUN} {MOCK} --lr-decay-style WSD", 1, "WSD without --lr-wsd-decay-iters; pass the length of its last"),
    (f"{SIZES} {RUN} {MOCK} --preset demo --hidden-size 33", 1, "hidden size 33 cannot be divided into 4 heads; give"),
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
    status, message = preview(f"{SIZES} {RUN} {MOCK} --transformer-impl transformer_engine")
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
    status, seen = preview(f"{SIZES} {RUN} {MOCK} {words}", WORLD_SIZE=str(world_size))
    assert status == 1
    assert message in seen


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(preview: Any, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    for folder, why in ((file, "it is a file"), (file / "run", "Not a directory")):
        status, message = preview(f"{SIZES} {RUN} {MOCK} --save {folder} --save-interval 2")
        assert (status, message) == (1, f"--save {folder} cannot be written: {why}; choose another folder")


def test_a_disk_with_less_room_than_a_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "kv_channels": 64, "seq_length": 2048}
    args = Namespace(**sizes, ffn_hidden_size=2048, group_query_attention=False, bf16=True, fp16=False)
    args.save, args.no_save_optim, args.untie_embeddings_and_output_weights = str(tmp_path), False, True

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


# -- seen with Megatron's own checks, the tokenizer and the data ------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a dataset of 12 documents made with it, and other tokenizers."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for name in sorted(topics)[:12]:
        (texts / f"{name}.txt").write_text(topics[name])
    for name, inputs, vocab_size in (
        ("tokenizer", [texts], 500),
        ("smaller", [texts], 400),
        ("larger", [texts], 510),
        ("other", sorted(texts.iterdir())[:8], 500),
    ):
        train_tokenizer(list(map(str, inputs)), str(folder / name), vocab_size=vocab_size)
    spec = TokenizerSpec("SentencePieceTokenizer", str(folder / "tokenizer.model"))
    preprocess([str(texts)], str(folder / "data"), spec)
    return folder


def pretrain(corpus: Path, *words: object, tokenizer: str = "tokenizer", **environment: str) -> Outcome:
    arguments = [*SIZES.split(), *RUN.split(), "--tokenizer-type", "SentencePieceTokenizer"]
    arguments += ["--tokenizer-model", str(corpus / f"{tokenizer}.model")]
    arguments += ["--data-path", str(corpus / "data"), "--split", "80,10,10"]
    return run_program(main, [*arguments, *words], environment=environment)


MEGATRONS = [
    (1, "--num-dataset-builder-threads 0", "Megatron refuses these arguments: .*num_dataset_builder_threads > 0"),
    (4, "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", "num_query_groups 2 is not div"),
    (
        1,
        "--exo-variant base --attention-output-gate",
        "contradicts a variant without a gate; use --exo-gate elementwise",
    ),
    (1, "--num-layers 1 --exo-anchor h1", "anchor 'h1' is mixed from layer 2 on, but the model has 1"),
    (
        2,
        "--context-parallel-size 2",
        "the local backend's attention has no context parallelism; use --transformer-impl",
    ),
    (1, "--flash-decode", "flash_decode is not supported with ExoFormer layers: .*; leave it out"),
    (2, "--pipeline-model-parallel-size 2 --fp32-residual-connection --bf16", "cannot share the wire between stages"),
    (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|ttttL",
        r"pipeline stage 0 \(virtual stage 0\) has no decoder layer, .* give every stage at least one",
    ),
]


@pytest.mark.parametrize(("world_size", "words", "message"), MEGATRONS, ids=[case[1][:40] for case in MEGATRONS])
def test_a_model_that_cannot_be_built_is_refused_before_ranks_meet(
    corpus: Path, world_size: int, words: str, message: str
) -> None:
    outcome = pretrain(corpus, *words.split(), WORLD_SIZE=str(world_size))
    assert outcome.status == 1
    assert re.search(message, one_line(outcome.err)), outcome.err


@pytest.fixture
def copy_of_data(corpus: Path, tmp_path: Path) -> Path:
    """A prefix that a test may damage, without the description of its tokenizer."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data{suffix}").write_bytes((corpus / f"data{suffix}").read_bytes())
    return tmp_path / "data"


def truncate(prefix: Path) -> None:
    file = prefix.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-100])


def add_unknown_token(prefix: Path) -> None:
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    tokens[1000] = 4242
    tokens.tofile(prefix.with_suffix(".bin"))


def add_empty_document(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in (50, 0, 50, 50, 50, 50, 50, 50, 50, 50):
        builder.add_document(np.arange(length, dtype=np.uint16), [length])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncate,
            r"data\.bin: the file is cut off: it has \d+ bytes, its index describes \d+ .* copy or make it again",
        ),
        (
            add_unknown_token,
            r"token 4242 at position 1000 \(document \d+\) is outside the vocabulary of 500; .* re-tok",
        ),
        (add_empty_document, r"1 of 10 documents are empty \(number 1, from 0\); .* make the dataset again"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), r"no dataset at .*data: .*data\.bin is missing; make one"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b"text"), r"data\.idx: the index is damaged or cut off"),
    ],
    ids=["truncated", "token beyond the vocabulary", "empty document", "missing", "no index"],
)
def test_damaged_data_is_refused(
    corpus: Path, copy_of_data: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy_of_data)
    outcome = pretrain(corpus, "--data-path", copy_of_data)
    assert outcome.status == 1
    assert re.search(message, one_line(outcome.err)), outcome.err


@pytest.mark.parametrize(
    ("split", "message"),
    [
        # Megatron would count epochs of no documents for ever.
        (
            "969,30,1",
            r"--split 969,30,1 leaves no document for validation: dataset .*data has 12; use a more even split",
        ),
        ("much", r"--split 'much' is no list of up to three weights; write for example 98,1,1"),
        ("1,1,1,1", r"--split '1,1,1,1' is no list of up to three weights"),
    ],
)
def test_a_split_that_leaves_a_part_without_documents_is_refused(corpus: Path, split: str, message: str) -> None:
    outcome = pretrain(corpus, "--split", split)
    assert outcome.status == 1
    assert re.search(message, one_line(outcome.err)), outcome.err


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            "smaller",
            r"token \d+ at .* is outside the vocabulary of 400; .* made with another tokenizer: re-tokenise it",
        ),
        ("larger", r"was tokenised with .* tokenizer\.model \(500 tokens\), the run's .* has 510; re-tokenise or pass"),
        (
            "other",
            r"was tokenised with .* tokenizer\.model \(500 tokens\), the run uses .*other\.model, .* re-tokenise",
        ),
    ],
)
def test_data_of_another_tokenizer_is_refused(corpus: Path, tokenizer: str, message: str) -> None:
    outcome = pretrain(corpus, tokenizer=tokenizer)
    assert outcome.status == 1
    assert re.search(message, one_line(outcome.err)), outcome.err


def test_several_processes_without_a_meeting_place_are_refused_at_once(corpus: Path) -> None:
    outcome = pretrain(corpus, "--tensor-model-parallel-size", "2", WORLD_SIZE="2")
    assert outcome.status == 1
    assert "MASTER_ADDR is not set; start with torchrun, which sets both" in one_line(outcome.err)


def test_an_index_of_samples_that_cannot_be_written_names_the_remedy(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    outcome = pretrain(corpus, "--data-cache-path", tmp_path / "taken")
    assert outcome.status == 1
    assert re.search(
        r"rank 0: the index of the training samples cannot be written: .*taken.*; pass a writable folder",
        one_line(outcome.err),
    )


def test_a_real_start_prints_the_one_line_and_nothing_else() -> None:
    program = [sys.executable, "-m", "megatron_exo.pretrain", "--exo-variant", "e-exofromer"]
    outcome = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert "did you mean e-exoformer" in one_line(outcome.stderr)
