"""Train an ExoFormer: ``torchrun … -m megatron_exo.pretrain [--preset demo] [--exo-variant NAME] [Megatron's arguments]``.

The engine is ``megatron.training.pretrain``; this module hands it the model, the data, and room on the wire between
pipeline stages.
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path

from megatron_exo import platform


def main() -> None:
    """Parse the command line and train. Exits with status 1 and one line where the request cannot be met."""
    platform.activate()
    from megatron_exo.config import ExoConfigError
    from megatron_exo.data.validate import DatasetError

    try:
        run()
    except (ExoConfigError, DatasetError) as error:
        _exit_with(str(error))


def run() -> None:
    """Everything from the command line to the last checkpoint, on one rank."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_tokenizer, pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import _initialize_distributed

    from megatron_exo import console
    from megatron_exo.arguments import add_exo_arguments, check_arguments, exo_config_from_args
    from megatron_exo.builder import model_config_from_args
    from megatron_exo.data.provider import check_data_arguments, train_valid_test_datasets_provider
    from megatron_exo.forward_step import forward_step
    from megatron_exo.model.wire import ExoP2PCommunicator

    args = parse_and_validate_args(add_exo_arguments)
    check_arguments(args)
    exo = exo_config_from_args(args)
    tokenizer = get_tokenizer()
    check_data_arguments(args, tokenizer)
    model_config = model_config_from_args(args, exo, tokenizer.vocab_size)

    # The communicator needs the process groups, and pretrain() would make them only later; it keeps ours.
    _initialize_distributed(None, None, None)
    pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    communicator = None
    if args.pipeline_model_parallel_size > 1:
        communicator = ExoP2PCommunicator(pp_group=pg_collection.pp, config=model_config.transformer)
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        p2p_communicator=communicator,
        pg_collection=pg_collection,
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _exit_with(message: str) -> None:
    """Print one line on one rank and end with status 1."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
