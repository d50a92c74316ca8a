"""Every change to another package, in one list: what, why, and whether a GPU machine needs it too.

Checked against megatron-core 0.19.2 and torch 2.14 (``tests/platform``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import megatron_exo.checkpoints.failed_saves as failed_saves
import megatron_exo.checkpoints.hooks as checkpoints
import megatron_exo.platform.command_line as command_line
import megatron_exo.platform.cpu as cpu
import megatron_exo.platform.loading as loading
import megatron_exo.platform.optimizer_names as optimizer_names
import megatron_exo.platform.optimizer_rates as optimizer_rates
import megatron_exo.platform.reshardable as reshardable
import megatron_exo.platform.storage as storage
from megatron_exo.platform.adam import FusedAdam
from megatron_exo.platform.registry import Patch

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


def _always(value: Any) -> Callable[[Any], Any]:
    """A replacement that ignores the original."""
    return lambda original: value


PATCHES: tuple[Patch, ...] = (
    # -- needed everywhere -----------------------------------------------------------------------------------
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        cpu.compile_helpers_if_missing,
        "the wheel ships the compiled dataset helpers but no Makefile; `make` fails and start-up exits",
        when="always",
    ),
    Patch(
        f"{_WRITER}.write_preloaded_data",
        lambda original: storage.raise_storage_errors(checkpoints.digested(original)),
        "that a disk is full is lost on the way, and the user reads of a worker's RuntimeError; and what a file should "
        "hold is known best by who has just written it",
        when="always",
    ),
    Patch(
        "torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
        loading.read_index_as_data,
        "a checkpoint's index is unpickled, and could run code where nothing of ours has looked at it before",
        when="always",
    ),
    *(
        Patch(target, replace, "an error that one rank meets alone in a save leaves the others waiting", when="always")
        for target, replace in (
            (f"{_WRITER}.write_preloaded_data_multithread", failed_saves.errors_as_results),
            (f"{_WRITER}.finish", failed_saves.noted),
            ("megatron.training.checkpointing:ensure_directory_exists", failed_saves.noted),
        )
    ),
    *(
        Patch(f"megatron.training.{name}", failed_saves.survived, "a full disk ends the run", when="always")
        for name in ("training:save_checkpoint", "training:maybe_finalize_async_save")
    ),
    Patch(
        "megatron.core.dist_checkpointing:save",
        checkpoints.emptied_first,
        "a save over an older checkpoint looks whole while it is half of each",
        when="always",
    ),
    Patch(
        "megatron.core.dist_checkpointing.serialization:save_config",
        checkpoints.manifest_last,
        "a checkpoint does not say what it is of, nor what its files should hold",
        when="always",
    ),
    Patch(
        "megatron.training.checkpointing:maybe_msc",
        checkpoints.WithTracker,
        "the tracker is truncated and written anew, and a crash in between loses every checkpoint; and nothing removes "
        "old ones but those of every N-th iteration",
        when="always",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        reshardable.index_without_padding,
        "with more than one gradient bucket, main parameters and moments are saved shifted, and resumed runs go wrong",
        when="always",
    ),
    Patch(
        "megatron.core.dist_checkpointing:load_content_metadata",
        optimizer_names.as_fully_reshardable,
        "a checkpoint of an ordinary optimizer cannot be loaded into the distributed optimizer",
        when="always",
    ),
    Patch(
        "megatron.core.dist_checkpointing:load",
        lambda original: optimizer_rates.of_this_run(optimizer_names.by_the_names_there_are(original)),
        "main weights have another name in a checkpoint of another kind of optimizer; and a run cannot go on with "
        "another learning rate",
        when="always",
    ),
    Patch(
        "megatron.training.ft_integration:setup",
        command_line.fault_tolerance_where_asked_for,
        "the command line is parsed once more, without this program's options and values",
        when="always",
    ),
    # -- torch.compile -----------------------------------------------------------------------------------------
    Patch(
        "torch._dynamo.config:disable",
        lambda original: os.environ.get("TORCHDYNAMO_DISABLE") != "0",
        "compiling each of Megatron's small functions for the CPU costs minutes and gains nothing; the variable alone "
        "does not reach functions that are wrapped already",
    ),
    # -- tensors: where Megatron says cuda, take the CPU -------------------------------------------------------
    *(
        Patch(f"torch:{name}", cpu.redirect_device_argument, "Megatron allocates with device='cuda'")
        for name in _FACTORIES
    ),
    Patch("torch:Tensor.cuda", _always(cpu.stay), "tensors and modules are moved with .cuda()"),
    Patch(
        "torch:Tensor.type",
        cpu.report_cuda_type,
        "the optimizers sort parameters by type strings such as 'torch.cuda.FloatTensor'",
    ),
    # -- torch.cuda ------------------------------------------------------------------------------------------
    Patch(
        "torch.cuda:is_available",
        _always(lambda: False),
        "a GPU may be there that is not to be used, and torch may infer one from the device count (see below)",
    ),
    Patch("torch.cuda:current_device", _always(cpu.current_device), "the device of most of Megatron's buffers"),
    Patch("torch.cuda:set_device", _always(cpu.no_op), "called at start-up; raises without a driver"),
    Patch("torch.cuda:synchronize", _always(cpu.no_op), "called by timers and checkpoints; raises without a driver"),
    Patch("torch.cuda:Stream", _always(cpu.NullStream), "models are wrapped on a stream of their own"),
    Patch("torch.cuda:current_stream", _always(cpu.NullStream), "gradient buffers wait on it"),
    Patch("torch.cuda:stream", _always(cpu.null_context), "asks those streams for their device where there is a GPU"),
    Patch(
        "torch.cuda:get_device_properties",
        _always(cpu.device_properties),
        "argument validation asks for the architecture's version",
    ),
    Patch("torch.cuda:device_memory_used", _always(cpu.machine_bytes_used), "logged; raises without a driver"),
    Patch("torch.cuda:memory_stats", _always(cpu.memory_stats), "empty without CUDA, where the log looks up its keys"),
    *(
        Patch(f"torch.cuda:{name}", _always(value), "logged; all zero without CUDA")
        for name, value in (
            ("memory_allocated", cpu.resident_bytes),
            ("memory_reserved", cpu.resident_bytes),
            ("max_memory_allocated", cpu.peak_resident_bytes),
            ("max_memory_reserved", cpu.peak_resident_bytes),
        )
    ),
    # -- random numbers ----------------------------------------------------------------------------------------
    Patch("torch.cuda:get_rng_state", _always(cpu.get_rng_state), "checkpoints save the device's generator"),
    Patch("torch.cuda:set_rng_state", _always(cpu.set_rng_state), "checkpoints restore the device's generator"),
    Patch("torch.cuda:manual_seed", _always(cpu.manual_seed), "the RNG tracker seeds the device's generator"),
    Patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        _always(cpu.get_rng_state),
        "the RNG tracker and recompute read the device's generator",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _always(cpu.set_rng_state),
        "the RNG tracker and recompute write the device's generator; without CUDA the original does so never",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        _always(cpu.fork_rng),
        "the original warns whenever the CPU generator moves, and here that is the device's generator",
    ),
    Patch(
        "megatron.training.training:build_pretraining_data_loader",
        cpu.draw_from_own_generator,
        "data loaders draw a seed at their start, here from dropout's generator, and a resumed run would miss it",
    ),
    # -- optimizer ---------------------------------------------------------------------------------------------
    *(
        Patch(
            f"megatron.core.optimizer{target}",
            _always(value),
            "torch's AdamW keeps its step where the distributed optimizer cannot load it; ours is like FusedAdam",
            when="without-fused-adam",
        )
        for target, value in (
            (":Adam", FusedAdam),
            (":USING_PYTORCH_OPTIMIZER", False),
            (".distrib_optimizer:Adam", FusedAdam),
            (".distrib_optimizer:HAVE_APEX_OR_TE", True),
            (".distrib_optimizer:USING_TE_OPTIMIZER", True),
        )
    ),
    # -- checkpoints ------------------------------------------------------------------------------------------
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        storage.results_queue_of_a_fork,
        "a queue of one process is served by another, spawned, which takes the first save of a run seconds and stays "
        "behind where the run is killed",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue._get_async_caller",
        _always(storage.writer_process_of_its_own),
        "the persistent worker divides by the number of CUDA devices, and would read tensors that training goes on "
        "changing: sent to another process, CPU tensors are shared. A process forked at each save has its own copy",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.warmup_persistent_caller",
        _always(cpu.no_op),
        "starts that worker with the program, where it ends at once",
    ),
    # -- megatron.training start-up ----------------------------------------------------------------------------
    Patch("megatron.training.training:initialize_megatron", cpu.allow_no_cuda, "asserts CUDA unless told otherwise"),
    Patch(
        "megatron.training.initialize:_initialize_distributed",
        cpu.with_one_device,
        "sets up process groups only where a device is counted",
    ),
    Patch(
        "megatron.training.initialize:_set_random_seed",
        cpu.with_one_device,
        "seeds the RNG tracker only where a device is counted",
    ),
    Patch(
        "megatron.training.training:set_jit_fusion_options",
        _always(cpu.no_op),
        "warms CUDA kernels up, on activations of full size",
    ),
)
