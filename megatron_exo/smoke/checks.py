"""One case of the smoke test, from building the model to timing it.

Imports Megatron: only after :func:`megatron_exo.platform.activate`, or on CPUs its small functions get compiled.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor

from megatron_exo import platform
from megatron_exo.errors import one_line
from megatron_exo.model.documents import DocumentMask
from megatron_exo.shards import load_whole_state, named_shards
from megatron_exo.smoke.cases import RESUMED_STEPS, SIZES, STAGES, STEPS, Bounds, Case, Deviation, Result
from megatron_exo.smoke.compare import largest_difference, largest_relative_error, number_of_changed, relative_error
from megatron_exo.standalone import StandaloneModel, start_parallel_state, transformer_config
from megatron_exo.variants import get_variant

_NUM_BATCHES = 4
_WARMUP_STEPS, _TIMED_STEPS = 3, 10


def environment() -> dict[str, str]:
    """Name → value of what a result depends on: the device, and the versions of what runs on it."""
    facts = {
        "device": torch.cuda.get_device_name() if platform.is_gpu() else f"CPU ({torch.get_num_threads()} threads)"
    }
    for package in ("torch", "megatron-core", "transformer-engine"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["CUDA"] = str(torch.version.cuda) if platform.is_gpu() else "not used"
    return facts


def record_reference(case: Case, path: Path) -> None:
    """Run ``case`` as far as it is compared, and write what other runs of it are compared with."""
    model = _model(case, seed=1)
    tokens, labels = _batches(case)
    reference: dict[str, Any] = {"logits": model.logits(tokens[0])}
    reference["loss"] = _loss(model, tokens[0], labels[0], forward_only=True)
    _loss(model, tokens[0], labels[0])
    reference["gradients"] = model.whole("main_grad")
    reference["masked"] = _with_documents_masked(model, tokens[0], labels[0])
    reference["losses"] = _train(model, case, range(STEPS))
    torch.save(reference, path)


def run_case(case: Case, reference: Path, bounds: Bounds) -> Result:
    """Every stage of ``case`` against what :func:`record_reference` wrote; an exception ends it and is reported."""
    result = Result(case)
    if platform.is_gpu():
        torch.cuda.reset_peak_memory_stats()
    try:
        for stage, deviations in zip(STAGES, _stages(case, reference, bounds, result), strict=True):
            result.stages[stage] = deviations
    except Exception as error:
        result.error = one_line(error)
        result.traceback = traceback.format_exc()
    gc.collect()
    return result


def _stages(case: Case, reference_path: Path, bounds: Bounds, result: Result) -> Iterator[list[Deviation]]:
    """Run one stage of ``STAGES`` at each step of the iteration."""
    reference = torch.load(reference_path, weights_only=True, mmap=True)
    tokens, labels = _batches(case)
    model = _model(case, seed=1)
    yield []

    loss = _loss(model, tokens[0], labels[0], forward_only=True)
    yield [
        largest_difference("loss", [loss], [reference["loss"]], bounds.loss),
        relative_error("logits", _present(model.logits(tokens[0])), reference["logits"], bounds.logits),
    ]

    _loss(model, tokens[0], labels[0])
    gradients = _present(model.whole("main_grad"))
    masked = _with_documents_masked(model, tokens[0], labels[0])
    yield [
        largest_relative_error("gradient", gradients, reference["gradients"], bounds.gradient),
        largest_relative_error("gradient with documents masked", masked, reference["masked"], bounds.gradient),
    ]
    del gradients, masked

    losses = _train(model, case, range(STEPS))
    yield [largest_difference("loss while training", losses, reference["losses"], bounds.training)]

    later = range(STEPS, STEPS + RESUMED_STEPS)
    with tempfile.TemporaryDirectory(dir=reference_path.parent) as folder:
        model.save(Path(folder))
        saved = _present(model.whole("data"))
        uninterrupted = _train(model, case, later)
        del model
        model = _model(case, seed=2)
        model.load(Path(folder))
    changed = number_of_changed("parameters changed by save and load", _present(model.whole("data")), saved)
    yield [changed, largest_difference("loss after resume", _train(model, case, later), uninterrupted, bounds.resume)]
    del saved

    size = SIZES[case.size]
    result.seconds_per_step = _seconds_per_step(model, case)
    result.tokens_per_second = size.timed_batch_size * size.model.seq_length / result.seconds_per_step
    result.peak_memory_bytes = torch.cuda.max_memory_allocated() if platform.is_gpu() else None
    yield []


def _model(case: Case, seed: int) -> StandaloneModel:
    """A model with random weights of ``seed`` and an optimizer, on the device."""
    start_parallel_state()
    sizes = SIZES[case.size].model
    config = transformer_config(
        get_variant(case.variant).exo,
        sizes,
        torch.bfloat16 if case.dtype == "bf16" else torch.float32,
        transformer_impl=case.backend,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = StandaloneModel(config, sizes, ddp=ddp)
    shapes = {name: tuple(parameter.shape) for name, parameter in named_shards(model.chunks)}
    load_whole_state(model.chunks, random_weights(shapes, seed), pipeline_size=1)
    model.add_optimizer(optimizer="adam", lr=SIZES[case.size].learning_rate, clip_grad=1.0)
    return model


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Float32 weights that depend on name, shape and seed alone, and that bfloat16 holds exactly.

    A new model would not do: its gains are all one, its λ all equal, the dynamic mixing is off, and much that can go
    wrong goes unseen.
    """
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))
        if name.endswith(("norm.weight", "_norm")):
            weight = 1 + 0.2 * noise
        elif "lambda" in name:
            weight = 0.5 + 0.2 * noise
        else:
            weight = noise * shape[-1] ** -0.5
        weights[name] = weight.bfloat16().float()
    return weights


def _batches(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels, int64 [batches, b, s] each."""
    size, generator = SIZES[case.size], torch.Generator().manual_seed(3)
    shape = (_NUM_BATCHES, size.batch_size, size.model.seq_length + 1)
    ids = torch.randint(0, size.model.vocab_size, shape, generator=generator)
    return ids[..., :-1], ids[..., 1:]


def _loss(model: StandaloneModel, tokens: Tensor, labels: Tensor, *, forward_only: bool = False) -> float:
    losses = model.forward_backward(tokens, labels, micro_batch_size=len(tokens), forward_only=forward_only)
    return _present(losses)["lm loss"]


def _with_documents_masked(model: StandaloneModel, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradients where each row is four documents, of one token and of others."""
    length, separator = tokens.shape[1], 0
    tokens = tokens.clamp(min=separator + 1)
    tokens[:, [length // 7, length // 3, length // 3 + 1]] = separator
    model.document_mask = DocumentMask(separator)
    _loss(model, tokens, labels)
    model.document_mask = None
    return _present(model.whole("main_grad"))


def _train(model: StandaloneModel, case: Case, steps: range) -> list[float]:
    """Take the steps of these numbers; the loss before each."""
    tokens, labels = _batches(case)
    losses = []
    for step in steps:
        losses.append(_loss(model, tokens[step % _NUM_BATCHES], labels[step % _NUM_BATCHES]))
        model.step(SIZES[case.size].learning_rate)
    return losses


def _seconds_per_step(model: StandaloneModel, case: Case) -> float:
    size = SIZES[case.size]
    ids = torch.randint(0, size.model.vocab_size, (size.timed_batch_size, size.model.seq_length))
    started = 0.0
    for step in range(_WARMUP_STEPS + _TIMED_STEPS):
        if step == _WARMUP_STEPS:
            started = time.perf_counter()
        _loss(model, ids, ids)
        model.step(size.learning_rate)
    # Reading the loss and the gradient norm has waited for the device; the last update is all that may be under way.
    if platform.is_gpu():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / _TIMED_STEPS


def _present[T](value: T | None) -> T:
    """One rank is first and last stage: it has every result."""
    assert value is not None
    return value
