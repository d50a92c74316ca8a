"""Adam as Megatron's distributed optimizer expects it, over torch's own fused kernel.

Transformer Engine's and Apex's ``FusedAdam`` keep the step count in the parameter group and only the two moments
per parameter; the distributed optimizer's checkpoints are built on that. ``torch.optim.AdamW`` keeps a step per
parameter and cannot be loaded there (megatron-core 0.19.2, ``distrib_optimizer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with FusedAdam's state layout; the arithmetic is ``torch.optim.adam`` with its fused kernel.

    Args:
        params: parameters or parameter groups, float32, on one device.
        adam_w_mode: decoupled weight decay (AdamW) if true, L2 regularisation otherwise.
        capturable: accepted for FusedAdam's signature; only ``False`` is supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError(
                "FusedAdam over torch cannot be captured in a CUDA graph; turn the optimizer's CUDA graph off"
            )
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            # torch's kernel counts in the tensors that it is given, so it gets fresh ones of the steps before.
            steps = torch.full((len(params),), float(group["step"] - 1), dtype=torch.float32, device=params[0].device)
            adam(
                params,
                [p.grad for p in params if p.grad is not None],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )
        return loss
