"""RMSNorm of layers, and the per-head norm of anchors."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_exo.model.norm import RMSNorm, per_head_rms_norm
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer, start_parallel_state, transformer_config
from tests.plain_reference import PlainSizes, random_state
from tests.ranks import run_on_ranks


def test_it_is_torchs_rms_norm() -> None:
    norm = RMSNorm(transformer_config(VARIANTS["base"].exo, PlainSizes(), Layout()), hidden_size=32, eps=1e-6)
    torch.manual_seed(0)
    norm.weight.data.normal_()
    theirs = torch.nn.RMSNorm(32, eps=1e-6)
    theirs.weight.data.copy_(norm.weight.data)
    x = torch.randn(4, 3, 32)
    assert torch.equal(norm(x), theirs(x))


def _gain_gradient() -> Tensor:
    """d loss / d gain of the per-head norm, with the heads sharded over the ranks."""
    layout = Layout(tp=torch.distributed.get_world_size())
    start_parallel_state(layout)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(5, 2, 4, 8, generator=generator).chunk(layout.tp, 2)[groups.tp.rank()] for _ in range(2))
    gain = torch.linspace(0.5, 1.5, 8).requires_grad_()
    (per_head_rms_norm(x, gain, 1e-6, groups) * weights).sum().backward()
    return gain.grad


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_a_shared_gain_is_the_sum_over_the_heads_of_all_ranks(ranks: int) -> None:
    (single,) = run_on_ranks(1, _gain_gradient)
    for gradient in run_on_ranks(ranks, _gain_gradient):
        assert torch.allclose(gradient, single, rtol=1e-5, atol=1e-6)


def _norm_gradient_without_its_flag() -> float:
    """The input norm's gradient of one layer at TP 2 with sequence parallelism, the flag of its gain removed."""
    exo, sizes = VARIANTS["gated"].exo, PlainSizes()
    trainer = Trainer(exo, sizes, Layout(tp=2, sp=True), random_state(exo, sizes))
    name, norm = "decoder.layers.0.input_layernorm.weight", None
    for chunk in trainer.chunks:
        norm = dict(chunk.module.named_parameters())[name]
    norm.sequence_parallel = False
    assert trainer.config.finalize_model_grads_func is finalize_model_grads
    tokens = torch.arange(18).view(2, 9)
    trainer.forward_backward(tokens[:, :-1], tokens[:, 1:])
    return float(norm.main_grad.norm())


def _norm_gradient(layout: Layout) -> float:
    exo, sizes = VARIANTS["gated"].exo, PlainSizes()
    trainer = Trainer(exo, sizes, layout, random_state(exo, sizes))
    tokens = torch.arange(18).view(2, 9)
    trainer.forward_backward(tokens[:, :-1], tokens[:, 1:])
    gradients = trainer.whole("main_grad")
    return float(gradients["decoder.layers.0.input_layernorm.weight"].norm()) if gradients else float("nan")


def test_with_sequence_parallelism_the_flag_of_its_gain_is_what_makes_its_gradient_whole() -> None:
    (single,) = run_on_ranks(1, _norm_gradient, Layout())
    assert run_on_ranks(2, _norm_gradient, Layout(tp=2, sp=True))[0] == pytest.approx(single, rel=1e-4)
    assert run_on_ranks(2, _norm_gradient_without_its_flag)[0] != pytest.approx(single, rel=1e-2)
