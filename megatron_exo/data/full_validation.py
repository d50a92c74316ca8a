"""``--full-validation``: an evaluation takes every token of its set once, whatever the batch and the layout of ranks.

Megatron's own implementation (0.19.2) ends in an error with one validation set, or where a pipeline stage reads no
data; takes micro-batches of one sample whatever size the schedule expects; and where the samples cannot be divided
evenly over data-parallel ranks, some ranks begin the set anew and count samples twice. So its flag stays off here, and
the sets are laid out so that ``--eval-iters`` iterations are one pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split
from megatron.training import get_args
from torch import Tensor
from torch.utils.data import Dataset

from megatron_exo import platform
from megatron_exo.data.provider import build_datasets
from megatron_exo.data.validate import DatasetError


class PaddedPasses(Dataset[dict[str, Tensor]]):
    """A dataset over and over, without end, each pass filled up with samples that weigh nothing.

    Any ``samples_per_pass`` samples in a row have every sample of the dataset once: an evaluation may begin anywhere,
    as in a run that was resumed with another batch size.

    Args:
        dataset: its samples have a ``loss_mask`` [s], 0 where a token does not count.
        samples_per_pass: at least the length of the dataset.
        split: where Megatron looks up which of its batch sizes to use.
    """

    def __init__(self, dataset: Dataset[dict[str, Tensor]], samples_per_pass: int, split: Split) -> None:
        self.dataset = dataset
        self.samples_per_pass = samples_per_pass
        self.split = split

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        position = index % self.samples_per_pass
        if position < len(self.dataset):  # type: ignore[arg-type]
            return self.dataset[position]
        padding = self.dataset[0]
        return padding | {"loss_mask": torch.zeros_like(padding["loss_mask"])}


class UncutGPTDataset(GPTDataset):
    """Megatron's dataset for a configuration without ``drop_last_partial_validation_sequence``.

    A class of its own has an index on disk of its own; Megatron's does not say whether the last sequence is in it.
    """

    _pad_token_id: int | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.index_split == Split.valid:
            # What Megatron would cache is the first sample's mask, after the padding of that sample was masked in it.
            self.masks_and_position_ids_are_cacheable = False
            if self._pad_token_id is None:  # the tokenizer has none, as GPT-2's
                self._pad_token_id = -1


def full_validation_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, PaddedPasses | None, PaddedPasses | None]:
    """As :func:`~megatron_exo.data.provider.train_valid_test_datasets_provider`, with whole evaluation sets.

    Sets ``args.eval_iters`` to the iterations of a pass; the test set takes as many as the validation set. The last
    sequence of the validation set is padded, that of the test set left out if it is not full: Megatron can do no other.

    Raises:
        DatasetError: there is no validation set, or the index of the samples cannot be written beside the data.
    """
    args = get_args()
    sizes = [num_samples[0], None, None]
    train, *evaluated = build_datasets(sizes, vp_stage, UncutGPTDataset, drop_last_partial_validation_sequence=False)
    if not vp_stage:  # else it is known already, and perhaps no rank has this stage's data
        lengths = torch.tensor([len(part) if part else 0 for part in evaluated], device=platform.device())
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX)
        if lengths[0] == 0:
            raise DatasetError(
                "--full-validation without a validation set; pass --valid-data-path, give validation a weight in "
                "--split, or leave --full-validation out"
            )
        args.eval_iters = -(-int(lengths.max()) // args.eval_global_batch_size)
    samples_per_pass = args.eval_iters * args.eval_global_batch_size
    valid, test = (
        PaddedPasses(part, samples_per_pass, split) if part else None
        for part, split in zip(evaluated, (Split.valid, Split.test), strict=True)
    )
    return train, valid, test


full_validation_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # each rank opens the files
