"""The numbers that people compare between runs are the same on every layout, in whole runs of the training program.

Consumed tokens, learning rate, loss, gradient norm, parameter count, operations, validation loss: where one of them
moved with the layout, two runs on different machines would be two experiments.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_exo.accounting import parameters, training_flops_per_token
from megatron_exo.plan import human
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS
from tests.plain_reference import PlainExoFormer, PlainSizes
from tests.programs import MODEL
from tests.ranks import run_on_ranks

TOLERANCE = 2e-6
"""Relative. Float32 sums in another order; what was seen is 2e-7. Wrong counts show by far more, as tested below."""

EXO = VARIANTS["dynamic-e-exoformer"].exo.replace(granularity="scalar", post_norm="vg")
"""Every kind of parameter that tensor-parallel ranks have copies of: scalar λ, gains, the MLP of dynamic mixing."""
SIZES = ModelSizes(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=64,
    vocab_size=64,
    seq_length=32,
)
ITERATIONS, BATCH = 3, 8

COMMON = f"""{MODEL} --tokenizer-type NullTokenizer --vocab-size 64 --num-workers 0
    --exo-variant dynamic-e-exoformer --exo-granularity scalar --exo-post-norm vg
    --exo-init megatron --init-method-std 0.5
    --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {ITERATIONS} --lr 1e-3
    --log-interval 1 --eval-interval 2 --save-interval 100"""

TP, PP, DP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"
SINGLE = "1 rank"
LAYOUTS: dict[str, tuple[int, str]] = {
    SINGLE: (1, ""),
    "tp2": (2, f"{TP} --eval-micro-batch-size 1"),
    "tp2 sp": (2, f"{TP} --sequence-parallel"),
    "pp2": (2, f"{PP} --eval-global-batch-size 4"),
    "pp2, anchors made anew": (2, f"{PP} --exo-wire source"),
    "dp2": (2, f"{DP} --micro-batch-size 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 pp2 vpp2 sp": (4, f"{TP} --sequence-parallel {PP} --num-virtual-stages-per-pipeline-rank 2"),
    "tp2 dp2": (4, f"{TP} {DP}"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
}
"""Name → ranks and arguments; the sizes of micro-batches and of evaluation batches must make no difference either."""
EACH = [pytest.param(name, marks=pytest.mark.slow) if LAYOUTS[name][0] > 2 else name for name in LAYOUTS]
OTHERS = EACH[1:]

WHOLE, REST = 10, 13
"""The validation set is this many sequences and predictions in one more: 11 samples, no multiple of any batch."""
PREDICTIONS = WHOLE * SIZES.seq_length + REST
TEST_WHOLE = 5


@dataclass(frozen=True)
class Run:
    """What one run of the program left behind."""

    folder: Path

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def logged(self, *names: str) -> list[list[float]]:
        """Fields of ``metrics.jsonl``, one row for each training iteration."""
        rows = [[record[name] for name in names] for record in self.records if record["kind"] == "train"]
        assert len(rows) == ITERATIONS
        return rows

    def evaluations(self, kind: str) -> list[float]:
        return [record["lm_loss"] for record in self.records if record["kind"] == kind]

    def scalars(self, tag: str) -> list[float]:
        """What Megatron wrote for TensorBoard, with more digits than it prints; one value per iteration."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "tensorboard"))
        events.Reload()
        return [event.value for event in events.Scalars(tag)]

    def plan(self, label: str) -> str:
        """The text beside a label of the plan, in one line."""
        log = (self.folder / "logs" / "rank-0.log").read_text()
        match = re.search(rf"^{label} +(.+\n(?: +.+\n)*)", log, flags=re.MULTILINE)
        assert match is not None, log[:2000]
        return " ".join(match[1].split())

    @property
    def checkpoint(self) -> str:
        return str(self.folder / f"iter_{ITERATIONS:07d}")


def pretrain(arguments: Sequence[str]) -> None:
    """The program, on every rank."""
    import sys

    from megatron_exo.pretrain import main

    sys.argv = ["pretrain", *arguments]
    main()


def pretrain_counting_padding(arguments: Sequence[str]) -> None:
    """With a fault: the last evaluation batch is filled up with samples that count."""
    from megatron_exo.data.full_validation import PaddedPasses

    def sample(self: PaddedPasses, index: int) -> dict[str, Tensor]:
        return self.dataset[index % self.samples_per_pass % len(self.dataset)]  # type: ignore[arg-type]

    PaddedPasses.__getitem__ = sample  # type: ignore[method-assign]
    pretrain(arguments)


def stream(seed: int, length: int) -> Tensor:
    """Tokens of one document."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, SIZES.vocab_size, length))


VALIDATION, TEST = stream(2, PREDICTIONS + 1), stream(3, TEST_WHOLE * SIZES.seq_length + 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets ``train``, ``validation`` and ``test``; the latter two are one document each."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("data")
    train = [stream(seed, length) for seed, length in ((10, 500), (11, 300), (12, 800))]
    for name, documents in (("train", train), ("validation", [VALIDATION]), ("test", [TEST])):
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder / name}.idx")
    return folder


Start = Callable[..., Run]
RunOn = Callable[[str], Run]


@pytest.fixture(scope="module")
def start(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Runs the program once for the same arguments."""

    @cache
    def start(ranks: int, words: str, program: Callable[[Sequence[str]], None] = pretrain) -> Run:
        folder = tmp_path_factory.mktemp("run")
        arguments = f"{COMMON} --train-data-path {data / 'train'} --valid-data-path {data / 'validation'}"
        arguments += f" --test-data-path {data / 'test'} --data-cache-path {data / 'cache'}"
        arguments += f" --save {folder} --tensorboard-dir {folder / 'tensorboard'} {words}"
        run_on_ranks(ranks, program, arguments.split(), process_group=False)
        return Run(folder)

    return start


@pytest.fixture(scope="module")
def run_on(start: Start) -> RunOn:
    """The run on one of :data:`LAYOUTS`, with whole validation sets."""
    return lambda name: start(LAYOUTS[name][0], f"--full-validation {LAYOUTS[name][1]}")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", EACH)
def test_consumed_samples_and_tokens_are_those_of_the_global_batch(run_on: RunOn, layout: str) -> None:
    expected = [[n * BATCH, n * BATCH * SIZES.seq_length] for n in range(1, ITERATIONS + 1)]
    assert run_on(layout).logged("consumed_samples", "consumed_tokens") == expected


@pytest.mark.parametrize("layout", OTHERS)
def test_the_learning_rate_is_that_of_one_process(run_on: RunOn, layout: str) -> None:
    rates = run_on(layout).logged("learning_rate")
    assert rates == run_on(SINGLE).logged("learning_rate")
    assert len({rate for (rate,) in rates}) == ITERATIONS  # it changes, so a schedule in other units would show


@pytest.mark.parametrize("layout", OTHERS)
def test_losses_are_those_of_one_process(run_on: RunOn, layout: str) -> None:
    for tag in ("lm loss", "z loss"):
        expected = run_on(SINGLE).scalars(tag)
        assert len(expected) == ITERATIONS
        assert run_on(layout).scalars(tag) == pytest.approx(expected, rel=TOLERANCE), tag
    assert run_on(layout).logged("lm_loss") == [
        pytest.approx(row, rel=TOLERANCE) for row in run_on(SINGLE).logged("lm_loss")
    ]


@pytest.mark.parametrize("layout", OTHERS)
def test_the_gradient_norm_is_that_of_one_process(run_on: RunOn, layout: str) -> None:
    expected = run_on(SINGLE).scalars("grad-norm")
    assert len(expected) == ITERATIONS
    assert run_on(layout).scalars("grad-norm") == pytest.approx(expected, rel=TOLERANCE)


TIE = "--tie-embeddings-and-output-weights"
TIED = {SINGLE: (1, ""), "pp2": (2, PP), "dp2": (2, f"{DP} --micro-batch-size 1")}


@pytest.fixture(scope="module")
def run_tied_on(start: Start) -> RunOn:
    """The run of a model with tied embeddings on one of :data:`TIED`, with evaluation on drawn samples."""
    return lambda name: start(TIED[name][0], f"{TIE} --eval-iters 2 {TIED[name][1]}")


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_losses_and_gradient_norms_of_tied_embeddings_are_those_of_one_process(run_tied_on: RunOn, layout: str) -> None:
    # At pp2 the first stage and the last hold the matrix, each with the whole gradient.
    assert "tied embeddings" in run_tied_on(layout).plan("model")
    for tag in ("lm loss", "grad-norm"):
        assert run_tied_on(layout).scalars(tag) == pytest.approx(run_tied_on(SINGLE).scalars(tag), rel=TOLERANCE), tag


DOCUMENTS = "--exo-documents masked --full-validation"
"""The separator is one of 64 tokens that are drawn at random: rows of 32 have none, one or several documents."""
MASKED = {
    SINGLE: (1, ""),
    "pp2 vpp2": (2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
    "tp2 pp2 vpp2 sp": LAYOUTS["tp2 pp2 vpp2 sp"],
    "pp2 cp2": (4, f"{PP} --context-parallel-size 2"),
}
"""Of four virtual stages, two get neither tokens nor labels, but attend like the others."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if MASKED[name][0] > 2 else []) for name in MASKED][1:]
)
def test_with_documents_masked_losses_and_gradient_norms_are_those_of_one_process(
    start: Start, run_on: RunOn, layout: str
) -> None:
    run, single = (start(MASKED[name][0], f"{DOCUMENTS} {MASKED[name][1]}") for name in (layout, SINGLE))
    for tag in ("lm loss", "grad-norm"):
        assert run.scalars(tag) == pytest.approx(single.scalars(tag), rel=TOLERANCE), tag
        assert run.scalars(tag) != pytest.approx(run_on(SINGLE).scalars(tag), rel=100 * TOLERANCE), tag
    assert run.evaluations("validation") == pytest.approx(single.evaluations("validation"), rel=TOLERANCE)


# -- the model ---------------------------------------------------------------------------------------------------------

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def is_parameter(name: str) -> bool:
    """Whether a name in a checkpoint is a parameter's."""
    return not name.startswith("optimizer.") and name.endswith(("weight", "bias", "_norm", "1", "2"))


@pytest.mark.parametrize("layout", EACH)
def test_plan_and_checkpoint_have_the_parameters_that_accounting_counts(run_on: RunOn, layout: str) -> None:
    from megatron.core import dist_checkpointing

    run, count = run_on(layout), sum(parameters(EXO, SIZES).values())
    assert run.plan("parameters") == run_on(SINGLE).plan("parameters")
    assert run.plan("parameters").startswith(f"{human(count)}, padding left out: ")
    saved = dist_checkpointing.load_tensors_metadata(run.checkpoint)
    shapes = {name: tensor.global_shape for name, tensor in saved.items() if is_parameter(name)}
    shapes |= dict.fromkeys(VOCABULARY, (SIZES.vocab_size, SIZES.hidden_size))
    assert sum(math.prod(shape) for shape in shapes.values()) == count


@pytest.mark.parametrize("layout", EACH)
def test_plan_and_megatrons_running_total_have_the_operations_that_accounting_counts(
    run_on: RunOn, layout: str
) -> None:
    from megatron.core import dist_checkpointing

    run, per_token = run_on(layout), training_flops_per_token(EXO, SIZES)
    total = ITERATIONS * BATCH * SIZES.seq_length * per_token
    assert run.plan("compute") == run_on(SINGLE).plan("compute")
    assert run.plan("compute").startswith(f"{per_token / 1e9:.3g} GFLOP per token")
    assert run.plan("compute").endswith(f"{total:.2e} FLOP in all")
    # The function behind it is the one that --log-throughput divides by the time.
    assert dist_checkpointing.load_common_state_dict(run.checkpoint)["num_floating_point_operations_so_far"] == total


# -- validation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """What the plain model computes of the single process's last checkpoint, one sequence at a time, in float64."""

    validation: float
    whole_sequences: float
    """The validation loss without the last, partial sequence."""
    test: float
    shares: dict[str, float]
    """Kind of replicated parameters → their part of the squared gradient norm of the validation loss."""


REPLICATED = ("mixing.lambda_", "_post_norm", "anchor.", "q_layernorm", "input_layernorm", "dynamic_mixing.fc")


def compute_by_hand(checkpoint: str, separator: int | None = None) -> ByHand:
    """With a ``separator``, of sequences that are cut into the documents that begin there."""
    from megatron.core import dist_checkpointing

    state = {}
    for name, tensor in dist_checkpointing.load_plain_tensors(checkpoint).items():
        if is_parameter(name):
            name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
            name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
            state[name] = tensor[: SIZES.vocab_size] if name in VOCABULARY else tensor
    model = PlainExoFormer(EXO, PlainSizes(num_layers=SIZES.num_layers))
    model.load_state_dict(state)
    model.double()

    def mean_loss(tokens: Tensor, predictions: int) -> Tensor:
        losses = []
        for begin in range(0, predictions, SIZES.seq_length):
            end = min(begin + SIZES.seq_length, predictions)
            begins = [place for place in range(begin + 1, end) if tokens[place] == separator]
            for first, last in pairwise([begin, *begins, end]):
                logits = model(tokens[None, first:last])[0]
                losses.append(cross_entropy(logits, tokens[first + 1 : last + 1], reduction="sum"))
        return torch.stack(losses).sum() / predictions

    validation = mean_loss(VALIDATION, PREDICTIONS)
    validation.backward()
    squares = {name: parameter.grad.square().sum().item() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    shares = {
        kind: sum(square for name, square in squares.items() if kind in name and "linear" not in name)
        / sum(squares.values())
        for kind in REPLICATED
    }
    return ByHand(
        validation.item(),
        mean_loss(VALIDATION, WHOLE * SIZES.seq_length).item(),
        mean_loss(TEST, TEST_WHOLE * SIZES.seq_length).item(),
        shares,
    )


@pytest.fixture(scope="module")
def by_hand(run_on: RunOn) -> ByHand:
    (computed,) = run_on_ranks(1, compute_by_hand, run_on(SINGLE).checkpoint)
    return computed


@pytest.mark.parametrize("layout", EACH)
def test_the_validation_loss_is_the_mean_over_every_token_of_the_set(
    run_on: RunOn, by_hand: ByHand, layout: str
) -> None:
    within, last = run_on(layout).evaluations("validation")
    assert last == pytest.approx(by_hand.validation, rel=TOLERANCE)
    assert within == pytest.approx(run_on(SINGLE).evaluations("validation")[0], rel=TOLERANCE)


@pytest.mark.parametrize("layout", EACH)
def test_the_test_loss_is_the_mean_over_every_whole_sequence_of_the_set(
    run_on: RunOn, by_hand: ByHand, layout: str
) -> None:
    # Five sequences: as many iterations as the validation set takes, with more padding.
    assert run_on(layout).evaluations("test") == [pytest.approx(by_hand.test, rel=TOLERANCE)]


def test_with_documents_masked_the_validation_loss_is_that_of_every_document_alone(start: Start) -> None:
    run = start(1, f"{DOCUMENTS} {MASKED[SINGLE][1]}")
    end_of_text = SIZES.vocab_size - 1  # NullTokenizer's
    (expected,) = run_on_ranks(1, compute_by_hand, run.checkpoint, end_of_text)
    assert run.evaluations("validation")[-1] == pytest.approx(expected.validation, rel=TOLERANCE)
    assert run.evaluations("test") == [pytest.approx(expected.test, rel=TOLERANCE)]


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_without_whole_sets_every_layout_draws_the_same_samples(run_tied_on: RunOn, layout: str) -> None:
    for kind in ("validation", "test"):
        expected = run_tied_on(SINGLE).evaluations(kind)
        assert run_tied_on(layout).evaluations(kind) == pytest.approx(expected, rel=TOLERANCE), kind


# -- what these tests see ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REPLICATED)
def test_a_kind_of_replicated_parameters_counted_twice_would_show_in_the_gradient_norm(
    by_hand: ByHand, kind: str
) -> None:
    assert math.sqrt(1 + by_hand.shares[kind]) - 1 > 10 * TOLERANCE


def test_padding_that_counts_would_show_in_the_validation_loss(start: Start, by_hand: ByHand) -> None:
    with_fault = start(1, "--full-validation", pretrain_counting_padding)
    assert abs(with_fault.evaluations("validation")[-1] / by_hand.validation - 1) > 100 * TOLERANCE


def test_a_sequence_that_is_left_out_would_show_in_the_validation_loss(by_hand: ByHand) -> None:
    assert abs(by_hand.whole_sequences / by_hand.validation - 1) > 100 * TOLERANCE
