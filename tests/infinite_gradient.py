"""Training in which the second rank finds a gradient that is infinite, in iteration 3. To be run by torchrun."""

from __future__ import annotations

from typing import Any

from megatron_exo import platform, pretrain


def main() -> None:
    platform.activate()
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.training import get_args

    original = _ParamAndGradBucketGroup.check_grads

    def check_grads(self: Any, *args: Any, **kwargs: Any) -> None:
        if get_args().rank == 1 and get_args().curr_iteration == 2:
            self.buckets[0].grad_data[0] = float("inf")
        original(self, *args, **kwargs)

    _ParamAndGradBucketGroup.check_grads = check_grads  # type: ignore[method-assign]
    pretrain.main()


if __name__ == "__main__":
    main()
