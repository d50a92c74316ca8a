"""Train an ExoFormer: ``torchrun … -m megatron_exo.pretrain --preset demo --exo-variant NAME [Megatron's arguments]``.

The engine is ``megatron.training.pretrain``; this program hands it the model, the data, and room on the wire between
pipeline stages, and shows a person what a person needs to see.
"""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_exo import platform
from megatron_exo.errors import UserError, one_line_errors
from megatron_exo.platform.children import end_children_with_this_process, end_with_torchrun

if TYPE_CHECKING:
    from megatron_exo.startup import Start


def main() -> None:
    """Parse the command line and train; one line and exit status 1 where the request cannot be met."""
    hint = "the checkpoints before this one are whole, make room and start again with the same command"
    interrupted = "with --save and --load, the same command goes on from the newest checkpoint; SIGTERM saves one first"
    with one_line_errors(storage_hint=hint, interrupt_hint=interrupted):
        platform.activate()
        end_children_with_this_process()
        end_with_torchrun()
        if "--dry-run" in sys.argv:
            _show_plan()
        else:
            _run()


def _run() -> None:
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_exo import console, replay, schedule
    from megatron_exo.checkpoints.failed_saves import last_one_checked
    from megatron_exo.data.enough import with_enough_samples
    from megatron_exo.data.full_validation import full_validation_datasets_provider
    from megatron_exo.data.provider import check_data_arguments, train_valid_test_datasets_provider
    from megatron_exo.data.sample_log import numbering
    from megatron_exo.files import only_one_process
    from megatron_exo.forward_step import forward_step
    from megatron_exo.inference import pipeline_keywords
    from megatron_exo.nonfinite import batch_saved_when_not_finite
    from megatron_exo.optimizer.muon import register
    from megatron_exo.optimizer.recipe import recipe_from_args
    from megatron_exo.plan import format_plan
    from megatron_exo.resume import check_save, folder_to_load
    from megatron_exo.roll_call import Place, check_all_find, check_shared, format_places, gather_places
    from megatron_exo.startup import check_storage, connect, device_name, preview, training_plan, understand

    args = preview()
    log_dir = Path(args.save) / "logs" if args.save else None
    with ExitStack() as stack:
        if args.save is not None and args.rank == 0:
            stack.enter_context(only_one_process(Path(args.save), "end that run, or pass another --save"))
        out = stack.enter_context(
            console.install(
                log_dir,
                rank=args.rank,
                world_size=args.world_size,
                seq_length=args.seq_length,
                full=args.exo_log == "full",
            )
        )
        start = understand()
        if start.args.exit_signal_handler:  # what Megatron does at SIGTERM; clusters announce preemption by SIGUSR1
            signal.signal(signal.SIGUSR1, signal.getsignal(start.args.exit_signal))
        check_data_arguments(start.args, start.tokenizer)
        check_save(start.args)
        check_storage(start.args, start.exo, start.vocab_size)
        if args.rank == 0:
            out.say(format_plan(training_plan(start)))
        _count_operations_as_planned(start)
        schedule.use_in_training()
        if start.args.optimizer == "muon" and not start.args.skip_train:
            register(recipe_from_args(start.args))
        datasets_provider: Any = train_valid_test_datasets_provider
        if start.args.full_validation:  # from here on our datasets' matter, and hidden from Megatron
            datasets_provider, start.args.full_validation = full_validation_datasets_provider, False
        datasets_provider = with_enough_samples(datasets_provider)
        if start.args.exo_log_samples:
            datasets_provider = numbering(datasets_provider)
        step = forward_step
        if start.args.replay is not None:
            datasets_provider, step = replay.prepare(start.args), replay.naming_the_module(forward_step)
        pg_collection = connect(start.args.exo_start_timeout, start.args.exo_lost_host_timeout)
        if dist.get_world_size() > 1:
            places = gather_places(Place.of_this_rank(pg_collection, device_name()))
            if start.args.rank == 0:
                out.say(format_places(places))
            if start.args.save is not None:
                check_shared(Path(start.args.save))
            if start.args.load is not None:
                found = folder_to_load(start.args)
                check_all_find(f"--load {start.args.load}", found.name if found else None)
        with (
            batch_saved_when_not_finite(start.args, Path(args.save or ".") / "not-finite"),
            last_one_checked(),
            _giving_up_told(),
        ):
            pretrain(
                pretrain_cfg_container_from_args(start.args, start.model_config),
                datasets_provider,
                ModelType.encoder_or_decoder,
                step,
                **pipeline_keywords(start.model_config.transformer, pg_collection),
            )
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def _giving_up_told() -> Iterator[None]:
    """Let a run end with an error where Megatron, unable to load a checkpoint, would end it with status 0.

    Raises:
        UserError: it has given up; of the reason it prints more than is shown.
    """
    try:
        yield
    except SystemExit as end:
        if end.code is not None:
            raise
        raise UserError(
            "Megatron has given up, which it does where it cannot load a checkpoint; the last lines in SAVE/logs, or "
            "with --exo-log full on the terminal, say why"
        ) from end


def _show_plan() -> None:
    """What :func:`_run` says first, for a run of as many ranks as ``WORLD_SIZE`` says."""
    from megatron_exo import console
    from megatron_exo.plan import format_plan
    from megatron_exo.startup import rehearse, training_plan

    with console.install(None, rank=0, world_size=1, seq_length=0) as out:
        start, lacks = rehearse()
        if start.args.rank == 0:
            out.say(format_plan(training_plan(start)))
            out.say("dry run: nothing was built or started; device and layers are those of this machine")
            for each in lacks:
                out.say(f"not on this machine: {each}")


def _count_operations_as_planned(start: Start) -> None:
    """Make Megatron's throughput (``--log-throughput``, ``--log-progress``) and running totals count as the plan does.

    Megatron's formula knows neither anchor nor mixing, and counts the padding of the vocabulary, which grows with the
    tensor-parallel size. No argument replaces it, so its name in the training loop is bound to our count here: not
    among the patches of the platform, which hold for every program, since this one belongs to the model of this run.
    """
    from megatron.training import training

    from megatron_exo.accounting import training_flops_per_token
    from megatron_exo.startup import model_sizes

    per_token = training_flops_per_token(start.exo, model_sizes(start.args, start.vocab_size))

    def num_floating_point_operations(
        args: Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> int:
        """Of one training step of ``batch_size`` sequences; the others are ``None`` unless sequences are packed."""
        return batch_size * args.seq_length * per_token

    training.num_floating_point_operations = num_floating_point_operations


if __name__ == "__main__":
    main()
