"""FusedAdam computes what torch's Adam computes and keeps what the distributed optimizer can load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.platform.adam import FusedAdam

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 5), (11,), (1,), (2, 3, 4)]


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """The second group has other settings."""
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0, "lr": 1e-2}]


def _set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Gradients of many sizes; the second parameter has none at every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)
        parameter.grad = None if number == 1 and step % 3 == 2 else gradient


def _train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        _set_gradients(parameters, step)
        optimizer.step()


@pytest.mark.parametrize("torch_class", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("fused", [True, False])
def test_ten_steps_are_torchs(torch_class: type[torch.optim.Optimizer], fused: bool) -> None:
    ours, theirs = _parameters(), _parameters()
    # Where a parameter has no gradient, torch does not count its step and FusedAdam does: give each its gradients.
    for step in range(10):
        for parameters in (ours, theirs):
            _set_gradients(parameters, 3 * step)
        if step == 0:
            mine = FusedAdam(_groups(ours), adam_w_mode=torch_class is torch.optim.AdamW, **SETTINGS)
            other = torch_class(_groups(theirs), fused=fused, **SETTINGS)
        mine.step()
        other.step()
    # The unfused arithmetic rounds in another order; the fused kernel is the same one.
    tolerance = 0.0 if fused else 1e-6
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0.0, atol=tolerance)


def test_the_step_is_an_integer_of_the_group_and_each_parameter_has_two_moments() -> None:
    parameters = _parameters()
    optimizer = FusedAdam(_groups(parameters), **SETTINGS)
    _train(optimizer, parameters, range(3))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(isinstance(group["step"], int) for group in optimizer.param_groups)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert set(state) == {"exp_avg", "exp_avg_sq"}
        assert all(value.shape == parameter.shape and value.dtype == torch.float32 for value in state.values())


def test_a_group_counts_steps_in_which_none_of_its_parameters_has_a_gradient() -> None:
    parameters = _parameters()
    optimizer = FusedAdam(_groups(parameters), **SETTINGS)
    _set_gradients(parameters, 0)
    for parameter in parameters[2:]:
        parameter.grad = None
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    changed = [not torch.equal(now, then) for now, then in zip(parameters, before, strict=True)]
    assert changed == [True, True, False, False]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_going_on_from_a_state_dict_is_as_if_never_stopped(adam_w_mode: bool) -> None:
    def result(stop_after: int | None) -> list[Tensor]:
        parameters = _parameters()
        optimizer = FusedAdam(_groups(parameters), adam_w_mode=adam_w_mode, **SETTINGS)
        _train(optimizer, parameters, range(stop_after or 8))
        if stop_after:
            parameters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            resumed = FusedAdam(_groups(parameters), adam_w_mode=adam_w_mode, **SETTINGS)
            resumed.load_state_dict(optimizer.state_dict())
            _train(resumed, parameters, range(stop_after, 8))
        return [parameter.detach() for parameter in parameters]

    for whole, resumed in zip(result(None), result(3), strict=True):
        assert torch.equal(whole, resumed)


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))


def test_capture_in_a_cuda_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA graph"):
        FusedAdam(_parameters(), capturable=True)
