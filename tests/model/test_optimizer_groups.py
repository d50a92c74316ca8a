"""Which optimizer treatment each parameter gets."""

from __future__ import annotations

import pytest
from megatron.core.optimizer import emerging_optimizers

from megatron_exo.shards import named_shards
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer
from tests.plain_reference import PlainSizes, random_state
from tests.ranks import run_on_ranks


def _treatment(name: str) -> dict[str, tuple[float, bool]]:
    """Parameter → its weight-decay multiplier, and whether a matrix optimizer would leave it alone."""
    exo, sizes = VARIANTS[name].exo, PlainSizes()
    trainer = Trainer(exo, sizes, Layout(), random_state(exo, sizes), optimizer="adam", lr=1e-3, weight_decay=0.1)
    decay = {id(p): group["wd_mult"] for group in trainer.optimizer.param_groups for p in group["params"]}
    return {
        name: (decay[id(p)], emerging_optimizers._is_nonlinear_or_embedding(p))
        for name, p in named_shards(trainer.chunks)
        if p.requires_grad
    }


@pytest.mark.parametrize("name", ["dynamic-e-exoformer", "s-nuresformer", "gated-qk-bias", "gated-embedding-residual"])
def test_coefficients_and_gains_are_not_decayed_and_not_given_to_matrix_optimizers(name: str) -> None:
    (treatment,) = run_on_ranks(1, _treatment, name)
    vectors = {n for n in treatment if any(word in n for word in ("lambda_", "_norm", "norm.", "bias", "residual"))}
    assert vectors
    for parameter in vectors:
        assert treatment[parameter] == (0.0, True), parameter
    matrices = (
        {n for n in treatment if n.endswith("weight")}
        - vectors
        - {"embedding.word_embeddings.weight", "output_layer.weight"}
    )
    assert matrices
    for parameter in matrices:
        assert treatment[parameter] == (1.0, False), parameter
