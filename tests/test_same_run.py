"""A run goes on with the tokenizer, the data and the batches it began with, or says what has changed."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from megatron_exo.checkpoints.integrity import MANIFEST
from megatron_exo.checkpoints.reading import CheckpointError, read_index, read_saved_arguments
from megatron_exo.config import ExoConfig
from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.pretrain import main
from megatron_exo.resume import check_load
from megatron_exo.same_run import changes
from tests.programs import MODEL, Outcome, one_line, run_program

RUN = "--micro-batch-size 2 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --eval-interval 9 --train-samples 32"
RUN += " --num-workers 0 --save-interval 2 --log-interval 1 --tokenizer-type SentencePieceTokenizer"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers of one size, and two datasets made with the first."""
    folder = tmp_path_factory.mktemp("corpus")
    names = sorted(topics)
    for part, chosen in (("one", names[:8]), ("two", names[8:14])):
        (folder / part).mkdir()
        for name in chosen:
            (folder / part / f"{name}.txt").write_text(topics[name])
    train_tokenizer([str(folder / "one"), str(folder / "two")], str(folder / "tokenizer"), vocab_size=500)
    train_tokenizer([str(folder / "two")], str(folder / "other"), vocab_size=500)
    spec = TokenizerSpec("SentencePieceTokenizer", str(folder / "tokenizer.model"))
    for part in ("one", "two"):
        preprocess([str(folder / part)], str(folder / f"data-{part}"), spec)
    return folder


def blend(corpus: Path, *weights: float, names: Sequence[str] = ("one", "two")) -> list[str]:
    return [str(word) for pair in zip(weights, (corpus / f"data-{n}" for n in names), strict=True) for word in pair]


def pretrain(corpus: Path, run: Path, *words: object) -> Outcome:
    arguments = [*f"{MODEL} {RUN}".split(), "--tokenizer-model", corpus / "tokenizer.model", "--save", run]
    arguments += ["--load", run, "--global-batch-size", "8", "--split", "1,0,0"]
    arguments += ["--data-path", *blend(corpus, 3, 1)]
    return run_program(main, [*arguments, *words])


@pytest.fixture(scope="module")
def first_half(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("first-half") / "run"
    outcome = pretrain(corpus, run, "--exit-interval", "2")
    assert outcome.status == 0, outcome.err
    return run


@pytest.fixture
def args(first_half: Path, tmp_path: Path) -> Namespace:
    """The arguments with which the run would go on."""
    run = Path(shutil.copytree(first_half, tmp_path / "run"))
    saved = read_saved_arguments(run / "iter_0000002", read_index(run / "iter_0000002"))
    saved.load = str(run)
    return saved


def check(args: Namespace) -> None:
    check_load(args, ExoConfig(**{name: getattr(args, f"exo_{name}") for name in vars(ExoConfig())}))


def refusal(args: Namespace) -> str:
    with pytest.raises(CheckpointError) as refused:
        check(args)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_a_run_that_goes_on_with_other_data_stops_with_both_named_until_that_is_meant(
    corpus: Path, first_half: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(first_half, tmp_path / "run"))
    other = ["--data-path", *blend(corpus, 1, 1)]
    refused = pretrain(corpus, run, *other)
    assert refused.status == 1
    before, now = (" + ".join(f"{w} × {corpus}/data-{n}" for w, n in zip(weights, ("one", "two"), strict=True))
                   for weights in ("31", "11"))  # fmt: skip
    assert one_line(refused.err) == (
        f"checkpoint {run}/iter_0000002 was trained on something else: data: {before}, not {now}; pass the arguments "
        "it was trained with, or, if that is meant, --exo-accept-change data"
    )
    accepted = pretrain(corpus, run, *other, "--exo-accept-change", "data")
    assert accepted.status == 0, accepted.err
    assert f"accepted: data of {run}/iter_0000002: {before}, not {now}" in accepted.out
    assert "iteration 4/4" in accepted.out


def test_the_same_run_goes_on_and_its_files_may_have_moved(
    args: Namespace, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(args)
    moved = Path(shutil.copytree(corpus, tmp_path / "moved"))
    args.tokenizer_model = str((moved / "tokenizer.model").rename(moved / "renamed.model"))
    args.data_path = blend(moved, 0.75, 0.25)
    check(args)
    assert "accepted" not in capsys.readouterr().out


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("data", {"seed": 5}, "seed 1234, not 5"),
    ("data", {"split": "9,1,0"}, "split 1,0,0, not 9,1,0"),
    ("data", {"eod_mask_loss": True}, "eod_mask_loss False, not True"),
    ("data", {"mock_data": True, "data_path": None}, "3 × .*data-one .*, not mock data"),
    ("seq-length", {"seq_length": 16}, "seq_length 32, not 16"),
    ("batch-size", {"global_batch_size": 4}, "global_batch_size 8, not 4"),
    ("training", {"clip_grad": 0.5}, "clip_grad 1.0, not 0.5"),
    ("training", {"hidden_dropout": 0.1, "bf16": True}, "hidden_dropout 0.0, not 0.1; training: bf16 False, not True"),
    ("training", {"exo_z_loss_weight": 0.0}, "exo_z_loss_weight 1e-05, not 0.0"),
    ("batch-size", {"rampup_batch_size": ["4", "4", "8"]}, r"rampup_batch_size None, not \['4', '4', '8'\]"),
]


@pytest.mark.parametrize(("kind", "change", "message"), CHANGES, ids=[case[2][:30] for case in CHANGES])
def test_a_change_is_named_with_both_values_and_can_be_meant(
    args: Namespace, kind: str, change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(args, name, value)
    assert re.search(f"something else: {kind}: {message}; .* --exo-accept-change {kind}$", refusal(args))
    args.exo_accept_change = [kind]
    check(args)


def test_a_checkpoint_from_before_documents_could_be_masked_is_of_joined_ones(args: Namespace) -> None:
    saved = Namespace(**{name: value for name, value in vars(args).items() if name != "exo_documents"})
    assert list(changes(saved, None, args)) == []
    args.exo_documents = "masked"
    assert list(changes(saved, None, args)) == [("data", "exo_documents joined, not masked")]


def test_muons_numbers_are_compared_by_what_they_come_to(args: Namespace) -> None:
    saved = Namespace(**vars(args) | {"optimizer": "muon"})
    same = Namespace(**vars(saved) | {"exo_muon_beta2": 0.95, "exo_muon_split": "fused"})  # the defaults
    assert list(changes(saved, None, same)) == []
    other = Namespace(**vars(saved) | {"muon_momentum": 0.9, "exo_muon_split": "per-head"})
    assert list(changes(saved, None, other)) == [
        ("training", "muon_momentum 0.95, not 0.9"),
        ("training", "exo_muon_split fused, not per-head"),
    ]


def test_another_tokenizer_is_refused_by_what_it_does_and_for_weights_alone_too(args: Namespace, corpus: Path) -> None:
    args.tokenizer_model = str(corpus / "other.model")
    named = "tokenizer: SentencePieceTokenizer tokenizer.model, not SentencePieceTokenizer other.model"
    assert named in refusal(args)
    args.finetune = True
    assert named in refusal(args)
    args.exo_accept_change = ["tokenizer"]
    check(args)


def test_a_tokenizer_and_a_dataset_that_were_changed_in_place_are_seen(
    args: Namespace, corpus: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(corpus, tmp_path / "moved"))
    args.data_path, args.tokenizer_model = blend(moved, 3, 1), str(moved / "tokenizer.model")
    check(args)
    (moved / "other.model").replace(moved / "tokenizer.model")
    for suffix in (".bin", ".idx"):
        (moved / f"data-two{suffix}").replace(moved / f"data-one{suffix}")
        shutil.copyfile(corpus / f"data-one{suffix}", moved / f"data-two{suffix}")
    text = refusal(args)
    assert "tokenizer: SentencePieceTokenizer tokenizer.model, with another content; data: " in text
    assert text.endswith("--exo-accept-change tokenizer data")


def test_what_is_accepted_already_is_named_with_what_is_not(args: Namespace) -> None:
    args.seed, args.global_batch_size, args.exo_accept_change = 5, 4, ["data"]
    text = refusal(args)
    assert "data: " not in text
    assert text.endswith("--exo-accept-change data batch-size")


def test_a_run_that_takes_only_weights_may_train_on_anything(args: Namespace) -> None:
    args.finetune, args.seed, args.global_batch_size, args.seq_length = True, 5, 4, 16
    check(args)


def test_without_a_manifest_what_the_arguments_say_is_compared(args: Namespace) -> None:
    (Path(args.load) / "iter_0000002" / MANIFEST).unlink()
    args.seed, args.global_batch_size = 5, 4
    assert "something else: batch-size: global_batch_size 8, not 4; " in refusal(args)
