"""The datasets of a run: Megatron's GPT datasets, opened only after they have been checked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_exo.argument_checks import NO_DATA
from megatron_exo.data.validate import DatasetError, check_dataset, check_sidecar
from megatron_exo.errors import reason

_LONGEST_PREFIX = 900
"""Characters; a message that repeats a prefix is still a line."""


def check_data_arguments(args: Namespace, tokenizer: Any) -> None:
    """Check every dataset of the command line against the files and the tokenizer, before the model is built.

    Raises:
        DatasetError: nothing to train on, a missing or damaged dataset, one made with another tokenizer, one with too
            few documents for its ``--split``, or validation sets that are no whole set.
    """
    if args.exo_documents != "joined" and tokenizer.eod in (None, -1):
        raise DatasetError(
            f"--exo-documents {args.exo_documents} needs a token that separates documents, and the tokenizer names no "
            "end of text; pass another tokenizer, or --exo-documents joined"
        )
    if args.multiple_validation_sets:
        raise DatasetError(
            "--multiple-validation-sets is not supported: Megatron's losses of them depend on the layout of ranks; "
            "evaluate a checkpoint on each set with --skip-train, --valid-data-path and --full-validation"
        )
    if args.mock_data:
        if args.full_validation:
            raise DatasetError("--full-validation with --mock-data, which has no end; pass --eval-iters instead")
        return
    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except Exception as error:  # Megatron takes the content of the files for what it should be
        named = args.data_args_path or args.per_split_data_args_path or "--data-path"
        raise DatasetError(
            f"{named} cannot be read as dataset prefixes, with or without weights: {reason(error)}"
        ) from error
    shared = _prefixes([blend])
    prefixes = shared or _prefixes(blend_per_split or [])
    if not prefixes:
        raise DatasetError(NO_DATA)
    if args.full_validation:
        _check_full_validation(args, blend or blend_per_split[1])
    for prefix in prefixes:
        if not str(prefix).isprintable() or len(str(prefix)) > _LONGEST_PREFIX:
            raise DatasetError(
                f"{str(prefix)[:80]!r} … is no prefix of a dataset; name files with shorter, plain names"
            )
        report = check_dataset(prefix, vocab_size=tokenizer.vocab_size)
        check_sidecar(prefix, args.tokenizer_type, args.tokenizer_model, tokenizer.vocab_size)
        if shared:
            _check_split(prefix, report.sequences, args.split)


def _check_full_validation(args: Namespace, blend: tuple[list[str], list[float] | None] | None) -> None:
    """Refuse what whole validation sets cannot be made of; ``blend`` is what they come from."""
    if blend is not None and blend[1] is not None:
        raise DatasetError(
            "--full-validation counts every token once, but the validation data has weights; "
            "name its prefixes without weights, by themselves in --valid-data-path"
        )
    if args.dataloader_type != "single":
        raise DatasetError(
            f"--full-validation reads the set in order; leave out --dataloader-type {args.dataloader_type}"
        )


def _prefixes(blends: Iterable[tuple[list[str], list[float] | None] | None]) -> list[Path]:
    """The prefixes of ``.bin``/``.idx`` pairs in Megatron's (prefixes, weights), in order, without repeats."""
    return list(dict.fromkeys(Path(prefix) for blend in blends if blend is not None for prefix in blend[0]))


def _check_split(prefix: Path, sequences: int, split: str) -> None:
    """Refuse a split that leaves a part without documents: Megatron would count its epochs for ever."""
    try:
        bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        counts = [
            None if bound is None else round(bound[1] * sequences) - round(bound[0] * sequences) for bound in bounds
        ]
    except (AssertionError, ValueError) as error:
        raise DatasetError(f"--split {split!r} is no list of up to three weights; write for example 98,1,1") from error
    for part, count in zip(("train", "validation", "test"), counts, strict=True):
        if count == 0:
            raise DatasetError(
                f"--split {split} leaves no document for {part}: dataset {prefix} has {sequences}; use a more even "
                "split such as 80,10,10, weight 0 for a part that is not wanted, or datasets of their own "
                "(--train-data-path, --valid-data-path, --test-data-path)"
            )


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the train, validation and test datasets; ``num_samples`` as ``megatron.training.pretrain`` gives them.

    Raises:
        DatasetError: the index of the samples cannot be written beside the data.
    """
    return build_datasets(num_samples, vp_stage, GPTDataset)


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # each rank opens the files


def build_datasets(
    num_samples: Sequence[int | None], vp_stage: int | None, dataset_class: type[GPTDataset], **config: Any
) -> tuple[Any, Any, Any]:
    """The train, validation and test datasets of the command line; ``None`` where this stage reads no data.

    Args:
        num_samples: at least so many samples of each, in several epochs if need be; ``None`` for one epoch.
        dataset_class: what they are built of, unless the command line asks for mock data.
        config: ``GPTDatasetConfig`` fields beside those that follow from the command line.

    Raises:
        DatasetError: the index of the samples cannot be written beside the data.
    """
    args = get_args()

    def needed_on_this_rank() -> bool:
        # Attention is on every stage, and so are the boundaries of documents.
        return args.exo_documents != "joined" or is_first_or_last_pipeline_stage(vp_stage)

    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else dataset_class,
        num_samples,
        needed_on_this_rank,
        gpt_dataset_config(args, get_tokenizer(), **config),
    )
    try:
        train, valid, test = builder.build()
    except Exception as error:
        cause = error if isinstance(error, OSError) else error.__cause__  # Megatron wraps what rank 0 meets
        if not isinstance(cause, OSError):
            raise
        raise DatasetError(
            f"the index of the training samples cannot be written: {cause}; "
            "pass a writable folder with room as --data-cache-path"
        ) from error
    return train, valid, test


def gpt_dataset_config(args: Namespace, tokenizer: Any, **config: Any) -> GPTDatasetConfig:
    """Megatron's dataset configuration for a parsed command line, and further fields of it."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **config,
    )
