"""Each patch has a target and a reason, is needed, and does what it says."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core.optimizer
import megatron.training.training
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.training import initialize
from megatron.training.training import initialize_megatron
from torch.distributed.checkpoint import FileSystemReader, save

from megatron_exo import platform
from megatron_exo.platform.adam import FusedAdam
from megatron_exo.platform.cpu import NullStream
from megatron_exo.platform.patches import PATCHES
from tests.platform.plain_gpt import parse_arguments
from tests.ranks import run_on_ranks

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what fails where there is no GPU")

FAILING: dict[str, Callable[[], object]] = {
    "torch:tensor": lambda: torch.tensor([1], device="cuda"),
    "torch:zeros": lambda: torch.zeros(1, device="cuda"),
    "torch:ones": lambda: torch.ones(1, device="cuda"),
    "torch:empty": lambda: torch.empty(1, device="cuda"),
    "torch:empty_like": lambda: torch.empty_like(torch.arange(2), device="cuda"),
    "torch:Tensor.cuda": lambda: torch.arange(2).cuda(),
    "torch.cuda:current_device": lambda: torch.cuda.current_device(),
    "torch.cuda:set_device": lambda: torch.cuda.set_device(0),
    "torch.cuda:synchronize": lambda: torch.cuda.synchronize(),
    "torch.cuda:Stream": lambda: torch.cuda.Stream(),
    "torch.cuda:current_stream": lambda: torch.cuda.current_stream(),
    "torch.cuda:get_device_properties": lambda: torch.cuda.get_device_properties("cuda:0").major,
    "torch.cuda:device_memory_used": lambda: torch.cuda.device_memory_used(),
    "torch.cuda:memory_stats": lambda: torch.cuda.memory_stats()["allocated_bytes.all.peak"],
    "torch.cuda:get_rng_state": lambda: torch.cuda.get_rng_state(),
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": lambda: (
        megatron.core.tensor_parallel.random._get_cuda_rng_state()
    ),
}
"""Target → what Megatron does with it, and what fails without a GPU and works with the patch."""

_SHOWN_BELOW = {
    "torch:Tensor.type",
    "torch._dynamo.config:disable",
    "torch.cuda:is_available",
    "torch.cuda:stream",  # in the way only on a machine with a GPU
    "torch.cuda:set_rng_state",
    "torch.cuda:manual_seed",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue._get_async_caller",
    "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.warmup_persistent_caller",
    "torch.cuda:memory_allocated",
    "torch.cuda:memory_reserved",
    "torch.cuda:max_memory_allocated",
    "torch.cuda:max_memory_reserved",
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
    "megatron.training.training:initialize_megatron",
    "megatron.training.initialize:_initialize_distributed",
    "megatron.training.initialize:_set_random_seed",
    "megatron.training.training:set_jit_fusion_options",
    "megatron.training.training:build_pretraining_data_loader",
}


# -- the list ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_target_exists_and_every_patch_says_why(patch: platform.Patch) -> None:
    owner, name = patch.owner_and_name()
    assert hasattr(owner, name)
    assert len(patch.reason.split()) >= 4


def test_no_target_is_patched_twice() -> None:
    targets = [patch.target for patch in PATCHES]
    assert len(targets) == len(set(targets))


def test_the_need_for_every_cpu_patch_is_shown() -> None:
    assert {patch.target for patch in PATCHES if patch.when == "cpu"} == FAILING.keys() | _SHOWN_BELOW


# -- each patch is needed, and works ---------------------------------------------------------------------------


@without_gpu
@pytest.mark.parametrize("target", FAILING)
def test_without_the_patch_the_call_fails_and_with_it_it_works(target: str) -> None:
    with pytest.raises((RuntimeError, AssertionError, ImportError, KeyError)):
        FAILING[target]()
    platform.activate()
    FAILING[target]()


@pytest.mark.parametrize("name", ["tensor", "zeros", "ones", "empty", "empty_like"])
def test_tensors_made_on_cuda_are_on_the_cpu(name: str, active_platform: None) -> None:
    factory = getattr(torch, name)
    argument = torch.arange(2.0) if name == "empty_like" else [2]
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 3), torch.cuda.current_device()):
        made = factory(argument, device=device, dtype=torch.float16)
        assert (made.device.type, made.dtype) == ("cpu", torch.float16)
    for device in ("meta", torch.device("meta")):
        assert factory(argument, device=device).device.type == "meta"
    assert factory(argument, device=None).device.type == "cpu"
    assert not factory(argument, device="cpu", pin_memory=True).is_pinned()


def test_modules_and_tensors_stay_where_they_are(active_platform: None) -> None:
    tensor, module = torch.arange(3), torch.nn.Linear(2, 2)
    weight = module.weight
    assert tensor.cuda() is tensor.cuda(0) is tensor.cuda(non_blocking=True) is tensor
    assert module.cuda().weight is weight


def test_cpu_tensors_report_the_type_names_that_the_optimizers_know(active_platform: None) -> None:
    for dtype, name in ((torch.float32, "Float"), (torch.float16, "Half"), (torch.bfloat16, "BFloat16")):
        assert torch.zeros(1, dtype=dtype).type() == f"torch.cuda.{name}Tensor"
    assert torch.zeros(1, device="meta").type() == "torch.meta.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    platform.deactivate()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_no_gpu_is_seen_where_torch_infers_one_from_a_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torch.cuda.is_available()
    platform.activate()
    assert not torch.cuda.is_available()


def test_streams_can_be_entered_and_waited_for(active_platform: None) -> None:
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        torch.cuda.current_stream().wait_stream(NullStream())


@without_gpu
@pytest.mark.parametrize("name", ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"])
def test_memory_in_the_log_is_the_memory_of_the_process(name: str) -> None:
    assert getattr(torch.cuda, name)() == 0
    platform.activate()
    before = getattr(torch.cuda, name)()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    grown = getattr(torch.cuda, name)() - before
    assert before > 10 << 20
    assert grown > block.numel() // 2 or name.startswith("max")  # the peak may have been higher before


@without_gpu
def test_seeding_and_setting_the_devices_generator_reach_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws_after(action: Callable[[], object]) -> list[float]:
        torch.manual_seed(1)
        action()
        return torch.rand(3).tolist()

    state = torch.Generator().manual_seed(5).get_state()
    plain, seeded = draws_after(lambda: None), draws_after(lambda: torch.manual_seed(5))
    queued: list[Any] = []  # where torch keeps what is to be done once CUDA is there
    monkeypatch.setattr(torch.cuda, "_queued_calls", queued)
    actions: list[Callable[[], object]] = [
        lambda: torch.cuda.manual_seed(5),
        lambda: torch.cuda.set_rng_state(state),
        lambda: megatron.core.tensor_parallel.random._set_cuda_rng_state(state),
    ]
    assert all(draws_after(action) == plain for action in actions)
    platform.activate()
    assert all(draws_after(action) == seeded for action in actions)


def test_drawing_in_a_fork_is_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    original = CudaRNGStatesTracker.fork
    platform.activate()
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    with caplog.at_level(logging.WARNING):
        with tracker.fork():
            torch.rand(1)
        assert not caplog.records
        with original(tracker):
            torch.rand(1)
        assert "CPU RNG state changed" in caplog.text


def test_starting_a_data_loader_leaves_the_generator_of_dropout_alone() -> None:
    patch = next(patch for patch in PATCHES if patch.target.endswith(":build_pretraining_data_loader"))

    def moved_by(build: Callable[[list[int]], Any]) -> bool:
        before = torch.get_rng_state()
        assert [batch.tolist() for batch in build([1, 2])] == [[1], [2]]
        return not torch.equal(torch.get_rng_state(), before)

    assert moved_by(torch.utils.data.DataLoader)
    assert not moved_by(patch.replace(torch.utils.data.DataLoader))
    assert patch.replace(lambda dataset: dataset)(None) is None  # an external loader, or none on this rank


def test_functions_that_are_wrapped_already_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled: list[str] = []

    def wrap(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            compiled.append(name)
            return module.forward

        return torch.compile(lambda x: x + 1, backend=backend)

    before, during = wrap("before"), wrap("during")
    assert before(torch.ones(1)).item() == 2
    platform.activate()
    assert during(torch.ones(1)).item() == 2
    assert compiled == ["before"]


def test_compiling_on_the_cpu_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    platform.activate()
    assert not torch._dynamo.config.disable


def test_megatron_starts_without_cuda() -> None:
    platform.activate()
    with pytest.raises(AssertionError, match="args is not initialized"):
        megatron.training.training.initialize_megatron()
    with pytest.raises(AssertionError, match="Megatron requires CUDA"):
        initialize_megatron()  # as imported before


class _Intruder:
    """Creates a file when it is unpickled."""

    def __init__(self, traces: Path) -> None:
        self.traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.traces}",)


def test_the_index_of_a_checkpoint_is_read_as_data(tmp_path: Path) -> None:
    # That Megatron's checkpoints and loading are safe: tests/security/test_exploits.py
    reader, traces = FileSystemReader(tmp_path), tmp_path / "traces"
    save({"x": torch.arange(3)}, checkpoint_id=tmp_path, no_dist=True)
    read = reader.read_metadata()
    platform.activate()
    assert reader.read_metadata() == read
    assert read.storage_meta.load_id == reader.load_id
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Intruder(traces)))
    with pytest.raises(pickle.UnpicklingError, match="system, which an index does not need"):
        reader.read_metadata()
    assert not traces.exists()
    platform.deactivate()
    with pytest.raises(AttributeError):
        reader.read_metadata()
    assert traces.exists()


def test_nothing_is_loaded_but_plain_data_even_where_objects_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    file, traces = tmp_path / "object.pt", tmp_path / "traces"
    torch.save([_Intruder(traces)], file)
    platform.activate()
    with pytest.raises(pickle.UnpicklingError, match="system"):
        torch.load(file, weights_only=False)
    assert not traces.exists()
    platform.deactivate()
    torch.load(file, weights_only=False)
    assert traces.exists()


@without_gpu
@pytest.mark.parametrize("is_active", [True, False])
def test_the_queue_of_write_results_is_served_by_a_fork(is_active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    asked: list[str] = []
    real = filesystem_async.mp.get_context
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(filesystem_async.mp, "get_context", lambda how: asked.append(how) or real("fork"))
    if is_active:
        platform.activate()
    queue = filesystem_async.get_write_results_queue()
    queue.put("a result")
    assert queue.get() == "a result"
    assert asked == ["fork" if is_active else "spawn"]


@without_gpu
def test_checkpoints_are_saved_in_the_background_by_a_process_of_their_own() -> None:
    # That what is saved is what was asked for: tests/checkpoints/test_runs.py
    with pytest.raises(ZeroDivisionError):
        PersistentAsyncCaller.async_loop(0, None, None, None)
    queue = AsyncCallsQueue(persistent=True)
    assert isinstance(queue._get_async_caller(), PersistentAsyncCaller)
    platform.activate()
    assert isinstance(queue._get_async_caller(), TemporalAsyncCaller)
    AsyncCallsQueue.warmup_persistent_caller(0)
    assert PersistentAsyncCaller._persistent_process is None


def test_dataset_helpers_are_not_compiled_where_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.datasets.utils as utils

    with pytest.raises((SystemExit, FileNotFoundError)):  # make without a Makefile, or without a make
        utils.compile_helpers()
    platform.activate()
    utils.compile_helpers()
    built: list[str] = []
    patch = next(patch for patch in PATCHES if patch.target.endswith(":compile_helpers"))
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    patch.replace(lambda: built.append("make"))()
    assert built == ["make"]


def test_the_optimizer_is_ours_and_taken_for_a_fused_one() -> None:
    assert megatron.core.optimizer.USING_PYTORCH_OPTIMIZER
    platform.activate()
    assert not megatron.core.optimizer.USING_PYTORCH_OPTIMIZER
    assert megatron.core.optimizer.Adam is megatron.core.optimizer.distrib_optimizer.Adam is FusedAdam


def _start_up() -> dict[str, bool]:
    """What Megatron's start-up leaves behind, each step as it is without the patch and then as it is with it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import training
    from megatron.training.initialize import set_jit_fusion_options

    parse_arguments([])
    seen = {}
    initialize._initialize_distributed.__wrapped__(None, None, None)
    seen["groups before"] = parallel_state.model_parallel_is_initialized()
    initialize._initialize_distributed(None, None, None)
    seen["groups"] = parallel_state.model_parallel_is_initialized()
    initialize._set_random_seed.__wrapped__(1234)
    seen["tracker before"] = bool(get_cuda_rng_tracker().get_states())
    initialize._set_random_seed(1234)
    seen["tracker"] = bool(get_cuda_rng_tracker().get_states())
    try:
        set_jit_fusion_options()
        seen["warm-up before"] = True
    except RuntimeError:
        seen["warm-up before"] = False
    training.set_jit_fusion_options()
    seen["warm-up"] = True
    seen["a device is counted"] = torch.cuda.device_count() > 0
    return seen


@without_gpu
def test_process_groups_and_random_states_are_set_up_without_a_device() -> None:
    (seen,) = run_on_ranks(1, _start_up)
    assert seen == {
        "groups before": False,
        "groups": True,
        "tracker before": False,
        "tracker": True,
        "warm-up before": False,
        "warm-up": True,
        "a device is counted": False,
    }
