"""``--replay FILE``: the batch that ended a run (``nonfinite.py``) once more, on the weights of a checkpoint.

It is one training iteration of Megatron's, from ``--load``, with the batch as its data; nothing is saved.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from torch import Tensor
from torch.utils.data import Dataset

from megatron_exo.errors import UserError, reason
from megatron_exo.plain_pickle import check_saved, check_tensor
from megatron_exo.resume import folder_to_load


class SavedRows(Dataset[dict[str, Tensor]]):
    """The sequences of a saved batch, over and over; any ``len(rows)`` in a row have each of them once."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index % len(self.rows)]


_OF_A_BATCH = ("tokens", "labels", "loss_mask", "position_ids")


def read_batch(path: Path) -> list[dict[str, Tensor]]:
    """The micro-batches in a file, each of ``tokens``, ``labels``, ``loss_mask``, … [b, s], all of one shape.

    Raises:
        UserError: it cannot be read, or is no saved batch.
    """
    try:
        with path.open("rb") as file:
            check_saved(file)
            batches = torch.load(file, map_location="cpu", weights_only=True)["batches"]
        _check_batches(batches)
    except Exception as error:  # a damaged file raises whatever it likes
        raise UserError(
            f"--replay {path} is no batch that a run has saved: {reason(error)}; pass a file from SAVE/not-finite"
        ) from error
    return batches


def _check_batches(batches: Any) -> None:
    if not isinstance(batches, list) or not batches:
        raise ValueError("it has no batch")
    for batch in batches:
        if not isinstance(batch, dict) or not {*_OF_A_BATCH} <= batch.keys():
            raise ValueError("a batch lacks a tensor")
        shape = batches[0]["tokens"].shape
        for name, value in batch.items():
            check_tensor(value)
            rows = shape if name in _OF_A_BATCH else shape[:1]
            if value.dim() != 2 or not value.numel() or value.shape[: len(rows)] != rows:
                raise ValueError(f"{str(name)[:40]} has the shape {list(value.shape)}, not {list(rows)}")
            is_right = value.is_floating_point() if name == "loss_mask" else value.dtype == torch.int64
            if name in _OF_A_BATCH and not is_right:
                raise ValueError(f"{name} is of {value.dtype}")


def prepare(args: Namespace) -> Callable[..., tuple[Any, None, None]]:
    """Turn validated arguments into those of one iteration on the saved batch, and give its datasets' provider.

    Raises:
        UserError: the file is no saved batch, of another sequence length or vocabulary, or there is no checkpoint to
            replay it on.
    """
    path = Path(args.replay)
    batches = read_batch(path)
    folder = folder_to_load(args)
    if folder is None:
        raise UserError("--replay without a checkpoint; pass --load (and --ckpt-step) of the run that stopped")
    length = batches[0]["tokens"].shape[1]
    if length != args.seq_length:
        raise UserError(f"--replay {path} has sequences of {length} tokens; pass --seq-length {length}")
    for batch in batches:
        tokens = torch.stack([batch["tokens"], batch["labels"]])
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < args.padded_vocab_size:
            raise UserError(
                f"--replay {path} has tokens beyond the vocabulary of {args.padded_vocab_size}; pass a batch and "
                "the options of the same run"
            )
    args.micro_batch_size = batches[0]["tokens"].shape[0]
    args.global_batch_size = args.micro_batch_size * len(batches) * args.data_parallel_size
    args.rampup_batch_size = None
    reconfigure_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    args.train_samples, args.train_iters = None, int(folder.name.removeprefix("iter_")) + 1
    args.override_opt_param_scheduler = True
    args.eval_iters, args.save, args.save_interval = 0, None, None
    rows = [{name: value[i] for name, value in b.items()} for b in batches for i in range(b["tokens"].shape[0])]

    def provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, None, None]:
        return SavedRows(rows), None, None

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def naming_the_module(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward step: the first module whose output is not finite ends the run with its name."""
    watched: set[int] = set()

    def watch(module: torch.nn.Module, name: str) -> None:
        def check(_: torch.nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.is_floating_point() and not first.isfinite().all():
                count = int((~first.isfinite()).sum())
                raise UserError(f"the output of {name} is the first that is not finite: {count} of {first.numel()}")

        module.register_forward_hook(check)

    def step(data_iterator: Any, model: torch.nn.Module) -> Any:
        if id(model) not in watched:
            watched.add(id(model))
            for name, module in model.named_modules():
                if name and not any(True for _ in module.children()):
                    watch(module, name)
        return forward_step(data_iterator, model)

    return step
