"""What takes CUDA's place on a machine without it. Used only through :mod:`megatron_exo.platform.patches`."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import torch

_CPU = torch.device("cpu")

# -- tensors ------------------------------------------------------------------------------------------------


def _on_cpu(value: Any) -> Any:
    """Map a device that means CUDA to the CPU; anything else is returned as it is."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return _CPU
    return value


def redirect_device_argument(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: its ``device`` never is CUDA, and its memory is not pinned, which takes a CUDA driver."""

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return redirected


def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: the tensor itself, as for a tensor that is on the device already."""
    return self


def report_cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: asked for its name, a CPU tensor answers as the CUDA tensor it stands for."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and self.is_cpu:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


# -- torch.cuda ---------------------------------------------------------------------------------------------


def current_device() -> torch.device:
    return _CPU


def no_op(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class NullStream:
    """A stream of a device that runs everything in order: waiting is always over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None: ...


def device_properties(device: Any = None) -> SimpleNamespace:
    """The least device: architecture 0 enables no fast path."""
    return SimpleNamespace(major=0, minor=0)


def resident_bytes(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def peak_resident_bytes(device: Any = None) -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel notes the peak now and then only, so it may lag behind.
    return max(resident_bytes(), peak if sys.platform == "darwin" else peak * 1024)


def machine_bytes_used(device: Any = None) -> int:
    return psutil.virtual_memory().used


def memory_stats(device: Any = None) -> dict[str, int]:
    current, peak = resident_bytes(), peak_resident_bytes()
    return {
        "allocated_bytes.all.current": current,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": current,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
    }


# -- random numbers: the device's generator is the CPU's ----------------------------------------------------


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state.cpu())


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


@contextlib.contextmanager
def fork_rng(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """``CudaRNGStatesTracker.fork``: run the body on the named state, then go back to the state before.

    Nested forks are supported as in the original: the inner name's state is advanced, and the outer resumes.
    """
    if name not in self.states_:
        raise KeyError(f"random state {name!r} was never added; call model_parallel_cuda_manual_seed first")
    outer_name, outer_state = self._current_state_name, torch.get_rng_state()
    if outer_name != "default-rng":
        self.states_[outer_name] = outer_state
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer_state if outer_name == "default-rng" else self.states_[outer_name])
        self._current_state_name = outer_name


def draw_from_own_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_pretraining_data_loader``: the loader seeds its workers from a generator of its own."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator()
        return loader

    return build


# -- start-up ------------------------------------------------------------------------------------------------


def compile_helpers_if_missing(original: Callable[[], None]) -> Callable[[], None]:
    """Build Megatron's C++ dataset helpers only where the import of the shipped ones fails."""

    def compile_helpers() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401  (the import is the test)
        except ImportError:
            original()

    return compile_helpers


def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(original, allow_no_cuda=True)


def with_one_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.cuda.device_count()`` say 1 during the call, and only then: others take it for a GPU."""

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        device_count = torch.cuda.device_count
        torch.cuda.device_count = lambda: 1
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.device_count = device_count

    return counted
