"""``--data-path WEIGHT PREFIX WEIGHT PREFIX …``: what a run takes from each."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_exo.data.provider import check_data_arguments
from megatron_exo.data.validate import DatasetError
from megatron_exo.pretrain import main
from tests.programs import MODEL, RUN, one_line, run_program

COMMON = f"{MODEL} {RUN} --tokenizer-type NullTokenizer --vocab-size 64 --split 100,0,0 --eval-iters 0 --num-workers 0"


def main_that_notes_datasets() -> None:
    """The program, with the number of the dataset of every training sample appended to the file ``NOTES``."""
    from megatron.core.datasets.blended_dataset import BlendedDataset

    original = BlendedDataset.__getitem__

    def noting(self: Any, index: int) -> dict[str, Any]:
        sample = original(self, index)
        low, high = int(sample["tokens"].min()), int(sample["tokens"].max())
        with Path(os.environ["NOTES"]).open("a") as file:
            file.write(f"{sample['dataset_id']} {low // 16} {high // 16}\n")
        return sample

    BlendedDataset.__getitem__ = noting
    main()


def test_each_dataset_has_its_share_of_the_samples_however_small_it_is(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    large = make_dataset([[*range(1, 15)]] * 100, name="large")
    small = make_dataset([[*range(16, 31)]] * 4, name="small")  # one sample of 32 tokens, for 8
    notes = tmp_path / "notes"
    arguments = f"{COMMON} --data-path 3 {large} 1 {small}"
    outcome = run_program(main_that_notes_datasets, arguments.split(), environment={"NOTES": str(notes)})
    assert outcome.status == 0, outcome.err
    assert Counter(notes.read_text().splitlines()) == {"0 0 0": 24, "1 1 1": 8}  # of 4 iterations of 8 samples


def test_datasets_without_weights_are_read_once_and_a_run_that_needs_more_is_refused(
    make_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    large = make_dataset([[*range(1, 15)]] * 60, name="large")  # 26 samples of 32 tokens
    small = make_dataset([[*range(16, 31)]] * 20, name="small")  # 9
    notes = tmp_path / "notes"
    arguments = f"{COMMON} --data-path {large} {small}".split()
    outcome = run_program(main_that_notes_datasets, arguments, environment={"NOTES": str(notes)})
    assert outcome.status == 0, outcome.err
    assert len(notes.read_text().splitlines()) == 32
    outcome = run_program(main, [*arguments, "--train-iters", "5"])
    assert outcome.status == 1
    assert "the training datasets hold 35 samples, the run takes 40: several datasets without weights" in outcome.err
    assert "iteration 1/5" not in outcome.out


def test_every_dataset_of_a_blend_is_checked(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    good, bad = make_dataset([[1, 2, 3]] * 100, name="good"), make_dataset([[1, 2, 99]] * 100, name="bad")
    for prefix, message in (
        (bad, f"{bad}.bin: token 99 at position 2 (document 0) is outside the vocabulary of 64"),
        (tmp_path / "none", f"no dataset at {tmp_path / 'none'}"),
    ):
        outcome = run_program(main, f"{COMMON} --data-path 0.5 {good} 0.5 {prefix}".split())
        assert outcome.status == 1
        assert message in one_line(outcome.err)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "cannot be read as dataset prefixes, with or without weights: RecursionError"),
        ("[]", "cannot be read as dataset prefixes, with or without weights: TypeError"),
        ('{"train": ["a"]}', "cannot be read as dataset prefixes, with or without weights: KeyError: 'valid'"),
        ('{"train": [' + "9" * 400 + ', "a"], "valid": ["b"], "test": ["b"]}', "OverflowError: int too large"),
        ('{"train": ["a\\nb"], "valid": ["b"], "test": ["b"]}', r"'a\\nb' … is no prefix of a dataset"),
        ('{"train": ["' + "x" * 10_000 + '"], "valid": ["b"], "test": ["b"]}', r"'x{80}' … is no prefix of a dataset"),
    ],
    ids=["deep", "a list", "without a part", "large", "two lines", "long"],
)
def test_a_file_of_prefixes_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "prefixes.json").write_text(content)
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    args = Namespace(**dict.fromkeys(names), per_split_data_args_path=str(tmp_path / "prefixes.json"))
    args.exo_documents, args.split = "joined", None
    args.multiple_validation_sets = args.mock_data = args.full_validation = False
    with pytest.raises(DatasetError, match=message) as refusal:
        check_data_arguments(args, None)
    assert "\n" not in str(refusal.value)
