"""Every change to another package, in one list: what, why, and whether a GPU machine needs it too.

Checked against megatron-core 0.19.2 and torch 2.14 (``tests/platform``).
"""

from __future__ import annotations

import megatron_exo.platform.cpu as cpu
from megatron_exo.platform.adam import FusedAdam
from megatron_exo.platform.registry import Patch

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "as_tensor", "empty_like",
              "zeros_like", "ones_like", "full_like")  # fmt: skip
_NO_OPS = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "set_stream", "ipc_collect")


def _always(value: object):
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
    # -- tensors: where Megatron says cuda, take the CPU -------------------------------------------------------
    *(
        Patch(f"torch:{name}", cpu.redirect_device_argument, "Megatron allocates with device='cuda' or the current device")
        for name in _FACTORIES
    ),
    Patch("torch:Tensor.to", cpu.redirect_device_argument, "tensors are moved to 'cuda'"),
    Patch("torch:Tensor.cuda", _always(lambda self, *args, **kwargs: self), "tensors and modules are moved with .cuda()"),
    Patch(
        "torch:Tensor.type",
        cpu.report_cuda_type,
        "the optimizers sort parameters by type strings such as 'torch.cuda.FloatTensor'",
    ),
    # -- torch.cuda functions -------------------------------------------------------------------------------
    Patch("torch.cuda:is_available", _always(lambda: False), "pinned: the redirections below must not look like a GPU"),
    Patch("torch.cuda:current_device", _always(cpu.current_device), "used as the device of buffers everywhere"),
    *(
        Patch(f"torch.cuda:{name}", _always(cpu.no_op), "called unconditionally; raises without a driver")
        for name in _NO_OPS
    ),
    Patch("torch.cuda:Stream", _always(cpu.NullStream), "gradient buffers and timers make streams"),
    Patch("torch.cuda:Event", _always(cpu.NullStream), "timers make events"),
    Patch("torch.cuda:current_stream", _always(cpu.NullStream), "waited on by communication code"),
    Patch("torch.cuda:stream", _always(cpu.null_context), "entered around overlapped work"),
    Patch("torch.cuda:get_device_properties", _always(cpu.device_properties), "asked for an architecture version"),
    Patch("torch.cuda:memory_stats", _always(cpu.memory_stats), "logged at intervals"),
    Patch("torch.cuda:memory_allocated", _always(cpu.resident_bytes), "logged at intervals"),
    Patch("torch.cuda:max_memory_allocated", _always(cpu.peak_resident_bytes), "logged at intervals"),
    Patch("torch.cuda:memory_reserved", _always(cpu.resident_bytes), "logged at intervals"),
    Patch("torch.cuda:max_memory_reserved", _always(cpu.peak_resident_bytes), "logged at intervals"),
    # -- random numbers ------------------------------------------------------------------------------------
    Patch("torch.cuda:get_rng_state", _always(cpu.get_rng_state), "checkpoints and recompute save the generator"),
    Patch("torch.cuda:set_rng_state", _always(cpu.set_rng_state), "checkpoints and recompute restore the generator"),
    Patch("torch.cuda:manual_seed", _always(cpu.manual_seed), "the RNG tracker seeds the device generator"),
    Patch("megatron.core.tensor_parallel.random:_get_cuda_rng_state", _always(cpu.get_rng_state), "reads the device's generator"),
    Patch("megatron.core.tensor_parallel.random:_set_cuda_rng_state", _always(cpu.set_rng_state), "writes the device's generator"),
    Patch(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        _always(cpu.fork_rng),
        "the original warns whenever the CPU generator moves, and here that is the device's generator",
    ),
    # -- optimizer -----------------------------------------------------------------------------------------
    *(
        Patch(
            f"megatron.core.optimizer{target}",
            _always(value),
            "torch's AdamW keeps its step where the distributed optimizer cannot load it; ours is shaped like FusedAdam",
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
    # -- megatron.training start-up ----------------------------------------------------------------------------
    Patch("megatron.training.training:initialize_megatron", cpu.allow_no_cuda, "asserts CUDA unless told otherwise"),
    Patch("megatron.training.initialize:_initialize_distributed", cpu.with_one_device, "sets up process groups only where a device is counted"),
    Patch("megatron.training.initialize:_set_random_seed", cpu.with_one_device, "seeds the RNG tracker only where a device is counted"),
    Patch("megatron.training.training:set_jit_fusion_options", _always(cpu.no_op), "warms CUDA kernels up"),
)
