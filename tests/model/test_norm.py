"""The local backend's norms are torch's RMSNorm, and their gains get whole gradients on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_exo.model.backend import get_backend
from megatron_exo.model.norm import RMSNorm, head_gain, per_head_rms_norm
from tests.layouts import Layout, start_parallel_state
from tests.ranks import run_on_ranks

SEQUENCE, HEADS, HEAD_DIM, EPS = 8, 4, 6, 1e-5


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torchs_module(dtype: torch.dtype) -> None:
    ours = RMSNorm(_config(params_dtype=dtype), hidden_size=16, eps=EPS)
    theirs = torch.nn.RMSNorm(16, eps=EPS, dtype=dtype)
    gain = torch.randn(16, dtype=dtype)
    gradients = []
    for norm in (ours, theirs):
        norm.weight.data.copy_(gain)
        x = torch.linspace(-3, 5, 5 * 16, dtype=dtype).view(5, 16).requires_grad_()
        y = norm(x)
        (y * y.detach()).sum().backward()
        gradients.append((y.detach(), x.grad, norm.weight.grad))
    for our, their in zip(*gradients, strict=True):
        assert our.dtype == dtype
        assert torch.equal(our, their)


def test_a_new_norm_has_gains_of_one_in_the_parameters_precision() -> None:
    weight = RMSNorm(_config(params_dtype=torch.bfloat16), hidden_size=5).weight
    assert weight.dtype == torch.bfloat16
    assert weight.tolist() == [1.0] * 5


class _Norms(MegatronModule):
    """A norm of the hidden states, and one of heads that are spread over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.hidden_norm = RMSNorm(config, HEADS * HEAD_DIM, eps=EPS)
        self.head_gain = head_gain(HEAD_DIM, config)

    def forward(self, hidden_states: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        return self.hidden_norm(hidden_states), per_head_rms_norm(heads, self.head_gain, EPS, self.pg_collection)


def _inputs() -> tuple[Tensor, Tensor]:
    """Hidden states [s, b, h] and heads [s, b, n, d]."""
    generator = torch.Generator().manual_seed(3)
    shapes = (SEQUENCE, 2, HEADS * HEAD_DIM), (SEQUENCE, 2, HEADS, HEAD_DIM)
    hidden_states, heads = (torch.randn(shape, generator=generator) for shape in shapes)
    return hidden_states, heads


def _gain_gradients(tp: int, sequence_parallel: bool, marked: bool = True) -> dict[str, Tensor]:
    start_parallel_state(Layout(tp=tp))
    config = _config(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    norms = _Norms(config, ProcessGroupCollection.use_mpu_process_groups())
    norms.hidden_norm.weight.sequence_parallel &= marked
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), norms)
    rank = parallel_state.get_tensor_model_parallel_rank()
    hidden_states, heads = _inputs()
    if sequence_parallel:
        hidden_states = hidden_states.chunk(tp, dim=0)[rank]
    heads = heads.chunk(tp, dim=2)[rank]
    normed = model(hidden_states, heads)
    sum((y * y.detach().cos()).sum() for y in normed).backward()  # a cotangent that depends on the values alone
    finalize_model_grads([model])
    return {name: parameter.main_grad for name, parameter in norms.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gain_gradients_at_tensor_parallel_2_are_those_of_one_rank(sequence_parallel: bool) -> None:
    (whole,) = run_on_ranks(1, _gain_gradients, 1, False)
    for rank in run_on_ranks(2, _gain_gradients, 2, sequence_parallel):
        for name, gradient in whole.items():
            assert gradient.abs().min() > 1e-3, name  # there is something to compare
            torch.testing.assert_close(rank[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_the_gradient_would_be_a_part_of_it_without_the_mark_on_the_gain() -> None:
    (whole,) = run_on_ranks(1, _gain_gradients, 1, False)
    parts = run_on_ranks(2, _gain_gradients, 2, True, False)
    name = "hidden_norm.weight"
    assert not torch.allclose(parts[0][name], whole[name], rtol=1e-2)
    torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name], rtol=1e-5, atol=1e-5)


def test_the_local_backend_normalises_everything_with_it() -> None:
    backend = get_backend("local")
    assert backend.layer_norm(rms_norm=True) is backend.layer_norm(rms_norm=True, for_qk=True) is RMSNorm
    assert not backend.fuse_layernorm_and_linear()


@pytest.mark.parametrize(
    "request_", [{}, {"rms_norm": False, "for_qk": True}, {"rms_norm": True, "has_residual": True}]
)
def test_the_local_backend_refuses_other_norms(request_: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="RMSNorm alone"):
        get_backend("local").layer_norm(**request_)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'inference_optimized' is not supported; use local or transformer_engine"):
        get_backend("inference_optimized")
