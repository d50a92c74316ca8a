"""What Megatron's own checks, the tokenizer and the data show to be wrong is one line, before ranks meet."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.provider import check_data_arguments
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.errors import UserError
from megatron_exo.pretrain import main
from tests.programs import MODEL, RUN, Outcome, one_line, run_program


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
    arguments = [*MODEL.split(), *RUN.split(), "--tokenizer-type", "SentencePieceTokenizer"]
    arguments += ["--tokenizer-model", str(corpus / f"{tokenizer}.model")]
    arguments += ["--data-path", str(corpus / "data"), "--split", "80,10,10"]
    return run_program(main, [*arguments, *words], environment=environment)


@pytest.mark.parametrize("missing", [None, -1])
def test_documents_are_not_masked_without_a_token_that_separates_them(missing: int | None) -> None:
    with pytest.raises(
        UserError, match=r"--exo-documents masked needs a token .* pass another tokenizer, or --exo-doc"
    ):
        check_data_arguments(Namespace(exo_documents="masked"), SimpleNamespace(eod=missing))


MEGATRONS = [
    (1, "--num-dataset-builder-threads 0", "Megatron refuses these arguments: .*num_dataset_builder_threads > 0"),
    (4, "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", "num_query_groups 2 is not div"),
    (
        1,
        "--exo-variant base --attention-output-gate",
        "contradicts a variant without a gate; use --exo-gate elementwise",
    ),
    (1, "--num-layers 1 --exo-anchor h1", "anchor 'h1' is mixed from layer 2 on, but the model has 1"),
    (1, "--mtp-num-layers 1", "mtp_num_layers is not supported with ExoFormer layers: .*; leave it out"),
    (1, "--cuda-graph-impl local", "CUDA graphs are not supported: .* use --cuda-graph-impl none"),
    (
        2,
        "--pipeline-model-parallel-size 2 --exo-wire source --exo-variant s-nuresformer",
        "--exo-wire source does not go with an internal anchor: .* use --exo-wire anchors",
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
