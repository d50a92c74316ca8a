"""The datasets of a run: Megatron's GPT datasets, opened only after they have been checked."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_exo.data.validate import DatasetError, check_dataset, check_sidecar


def check_data_arguments(args: Namespace, tokenizer: Any) -> None:
    """Check every dataset of the command line against the files and the tokenizer, before the model is built.

    Raises:
        DatasetError: nothing to train on, a missing or damaged dataset, or one made with another tokenizer.
    """
    if args.mock_data:
        return
    prefixes = dataset_prefixes(args)
    if not prefixes:
        raise DatasetError(
            "no data: pass --data-path PREFIX (tools/preprocess_data.py makes one), --mock-data, "
            "or run examples/quickstart.sh once"
        )
    for prefix in prefixes:
        check_dataset(prefix, vocab_size=tokenizer.vocab_size)
        check_sidecar(prefix, args.tokenizer_type, args.tokenizer_model, tokenizer.vocab_size)


def dataset_prefixes(args: Namespace) -> list[Path]:
    """The prefixes of all ``.bin``/``.idx`` pairs that the arguments name, in order, without repeats."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(per_split or [])]
    return list(dict.fromkeys(Path(prefix) for one in blends if one is not None for prefix in one[0]))


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the train, validation and test datasets; ``num_samples`` as ``megatron.training.pretrain`` gives them."""
    args = get_args()
    config = gpt_dataset_config(args, get_tokenizer())
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset

    def needed_on_this_rank() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage)

    builder = BlendedMegatronDatasetBuilder(dataset_class, num_samples, needed_on_this_rank, config)
    train, valid, test = builder.build()
    return train, valid, test


train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # each rank opens the files


def gpt_dataset_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """Megatron's dataset configuration for a parsed command line."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
