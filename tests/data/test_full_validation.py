"""Whole evaluation sets: what is read for them, and what cannot be read so. Their losses: tests/parallel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer

from megatron_exo.data.full_validation import PaddedPasses, UncutGPTDataset
from megatron_exo.pretrain import main
from tests.programs import MODEL, RUN, one_line, run_program

MakeDataset = Callable[..., Path]
SEQUENCE = 8
DOCUMENTS = [list(range(1, 24)), list(range(24, 30)), list(range(30, 45))]
"""44 tokens, all different: 43 predictions in 5 sequences and a partial one."""


def build(dataset_class: type[GPTDataset], prefix: Path, tokenizer: Any, *, cut: bool) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE,
        blend=([str(prefix)], None),
        split="0,100,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=cut,
    )
    documents = np.arange(len(DOCUMENTS), dtype=np.int32)
    return dataset_class(IndexedDataset(str(prefix)), str(prefix), documents, None, Split.valid, config)


def tokenizer_with_padding(token: int | None) -> Any:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=64)
    tokenizer._tokenizer._pad_id = token  # None, as GPT-2's has none, cannot be asked for
    return tokenizer


@pytest.mark.parametrize("padding", [-1, 63, None])
@pytest.mark.parametrize("first", range(6))
def test_every_token_but_the_first_is_predicted_once_whichever_sample_is_read_first(
    make_dataset: MakeDataset, padding: int | None, first: int
) -> None:
    dataset = build(UncutGPTDataset, make_dataset(DOCUMENTS), tokenizer_with_padding(padding), cut=False)
    samples = [dataset[(first + index) % 6] for index in range(len(dataset))]
    labels = [label for sample in samples for label in sample["labels"][sample["loss_mask"] == 1].tolist()]
    assert len(labels) == len(set(labels)) == 43


def test_the_last_sequence_is_there_although_an_index_without_it_is_on_disk(make_dataset: MakeDataset) -> None:
    prefix = make_dataset(DOCUMENTS)
    assert len(build(GPTDataset, prefix, tokenizer_with_padding(-1), cut=True)) == 5
    assert len(build(UncutGPTDataset, prefix, tokenizer_with_padding(-1), cut=False)) == 6


@pytest.mark.parametrize("begin", [0, 3, 7, 8, 8000])
def test_a_pass_may_begin_anywhere_and_has_every_sample_once_and_padding_without_weight(
    make_dataset: MakeDataset, begin: int
) -> None:
    dataset = build(UncutGPTDataset, make_dataset(DOCUMENTS), tokenizer_with_padding(-1), cut=False)
    passes = PaddedPasses(dataset, 8, Split.valid)
    samples = [passes[index] for index in range(begin, begin + 8)]
    counting = [sample["tokens"].tolist() for sample in samples if sample["loss_mask"].any()]
    assert sorted(counting) == sorted(dataset[index]["tokens"].tolist() for index in range(6))
    assert sum(int(sample["loss_mask"].sum()) for sample in samples) == 43
    assert torch.equal(passes[6]["tokens"], dataset[0]["tokens"])  # padding is a sample like another, for collation


REFUSALS = {
    "mock data": ("--mock-data", "--full-validation with --mock-data, which has no end; pass --eval-iters instead"),
    "several sets": (
        "--train-data-path {0} --valid-data-path {0} {0} --multiple-validation-sets",
        "--multiple-validation-sets is not supported: .*; evaluate a checkpoint on each set with --skip-train",
    ),
    "weights": (
        "--train-data-path 0.3 {0} 0.7 {0} --valid-data-path 0.3 {0} 0.7 {0}",
        "counts every token once, but the validation data has weights; name its prefixes without weights",
    ),
    "another order": (
        "--train-data-path {0} --valid-data-path {0} --dataloader-type cyclic",
        "reads the set in order; leave out --dataloader-type cyclic",
    ),
    "no set": ("--train-data-path {0}", "without a validation set; pass --valid-data-path, give validation a weight"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_no_whole_set_is_refused_in_one_line(make_dataset: MakeDataset, case: str) -> None:
    words, message = REFUSALS[case]
    prefix = make_dataset(DOCUMENTS * 20)
    arguments = f"{MODEL} {RUN} --tokenizer-type NullTokenizer --vocab-size 64 --full-validation {words.format(prefix)}"
    outcome = run_program(main, arguments.split())
    assert outcome.status == 1
    assert re.search(message, one_line(outcome.err)), outcome.err
