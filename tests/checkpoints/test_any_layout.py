"""What one layout of ranks saves, any other loads, and saves again as the same tensors: weights and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_exo.checkpoints.inspection import compare
from megatron_exo.pretrain import main
from tests.programs import MOCK_DATA, MODEL
from tests.ranks import run_on_ranks

RUN = "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-2 --lr-decay-style constant --eval-iters 0"
RUN += " --eval-interval 99 --num-workers 0 --save-interval 99 --group-query-attention --num-query-groups 2"
RUN += " --make-vocab-size-divisible-by 16"  # so that the padding is the same everywhere
LAYOUTS = {
    "1": (1, ""),
    "dp2": (2, ""),
    "dp2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "dp4 distributed optimizer": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2 sp dp2 distributed optimizer": (
        4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    ),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "pp2 uneven, source on the wire": (
        2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --exo-wire source"
    ),
    "pp2 vpp2 dp2 distributed optimizer": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer",
    ),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2 distributed optimizer": (2, "--context-parallel-size 2 --use-distributed-optimizer"),
}  # fmt: skip
VARIANTS = {
    "dynamic e-exoformer": "--exo-variant dynamic-e-exoformer",
    # The first layer's parameters are unlike the others'.
    "internal anchor, bf16": "--exo-variant s-nuresformer --bf16",
    # Momenta of the parameter's shape, second moments that are smaller, and Adam's state for the rest.
    "muon, bf16": "--exo-variant dynamic-e-exoformer --bf16 --optimizer muon",
    "muon per head": "--exo-variant e-exoformer-vg --optimizer muon --exo-muon-split per-head",
    "tied, h1": "--exo-variant e-exoformer --exo-anchor h1 --tie-embeddings-and-output-weights",
}

MAIN_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def _pretrain(arguments: list[str]) -> None:
    import sys

    sys.argv = ["pretrain", *arguments]
    main()


def save(layout: str, variant: str, folder: Path, load: Path | None) -> Path:
    """Train three iterations, or load what another layout has saved after them, and save."""
    ranks, words = LAYOUTS[layout]
    arguments = f"{MODEL} {MOCK_DATA} {RUN} {VARIANTS[variant]} {words} --save {folder}"
    run_on_ranks(ranks, _pretrain, f"{arguments} --load {load or folder}".split(), process_group=False)
    return folder / "iter_0000003"


def chain(layouts: list[str], variant: str, tmp_path: Path) -> None:
    """Pass a checkpoint on from layout to layout: equal tensors at every one of them are so between any two.

    The main weights, which the two kinds of optimizers name differently, are compared where the kind comes again.
    """
    first = before = save(layouts[0], variant, tmp_path / "0", None)
    first_of_kind = {"--use-distributed-optimizer" in LAYOUTS[layouts[0]][1]: first}
    for number, layout in enumerate(layouts[1:], start=1):
        after = save(layout, variant, tmp_path / str(number), before.parent)
        kind = "--use-distributed-optimizer" in LAYOUTS[layout][1]
        difference = compare(first_of_kind.get(kind, first), after)
        assert (difference.values, difference.reshaped, difference.objects) == ([], {}, []), f"{layout}: {difference}"
        assert difference.equal > 150  # weights, main weights, moments
        alone = [*difference.only_first, *difference.only_second]
        named_otherwise = ("rng_state/",) if kind in first_of_kind else ("rng_state/", *MAIN_WEIGHTS)
        assert all(name.startswith(named_otherwise) for name in alone), alone
        first_of_kind.setdefault(kind, after)
        before = after


@pytest.mark.slow
def test_a_checkpoint_is_the_same_through_tensor_pipeline_and_data_parallelism(tmp_path: Path) -> None:
    chain(["1", "dp2 distributed optimizer", "tp2 pp2", "dp2 distributed optimizer"], "dynamic e-exoformer", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "layouts"),
    [
        (
            "internal anchor, bf16",
            ["1", "tp2 sp dp2 distributed optimizer", "pp2 uneven", "dp4 distributed optimizer", "pp2", "dp2", "1"],
        ),
        ("dynamic e-exoformer", ["pp2 uneven, source on the wire", "dp4 distributed optimizer", "tp2", "pp4", "dp2"]),
        (
            "muon, bf16",
            ["1", "tp2 sp dp2 distributed optimizer", "pp2 uneven", "dp2 distributed optimizer", "tp2 pp2", "1"],
        ),
        ("muon per head", ["tp2", "pp2 uneven, source on the wire", "1"]),
        ("tied, h1", ["tp2 pp2", "cp2 distributed optimizer", "pp2 uneven", "pp2 vpp2 dp2 distributed optimizer", "1"]),
    ],
    ids=["internal anchor, bf16", "dynamic", "muon", "muon per head", "tied, h1"],
)
def test_a_checkpoint_is_the_same_through_every_layout(tmp_path: Path, variant: str, layouts: list[str]) -> None:
    chain(layouts, variant, tmp_path)
