"""``tools/evaluate.py``: the same scores of a checkpoint on every layout and of its folder, whatever the batch."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_exo.data.sidecar import Sidecar
from megatron_exo.evaluation.perplexity import score_dataset
from tests.programs import one_line, run_program
from tests.ranks import run_on_ranks
from tests.text_run import TextRun, train_on_text
from tools import convert_to_hf, evaluate

ROOT = Path(__file__).parents[1]
CONTEXT = 128
LAYOUTS = {
    "tp2 dp2": (4, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
WITHOUT_CACHE = {
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2 sp cp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    "dp3": (3, ""),
}
"""Layouts whose ranks cut sequences, and one whose replicas get unequal shares."""
COLOURS = ("red", "green", "blue", "grey")
TASKS = ["toy_choice", "toy_text", "toy_generation"]


@dataclass(frozen=True)
class Case:
    """A trained model in both forms, and tasks and data to evaluate it on."""

    run: TextRun
    exported: Path
    tasks: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("evaluated")
    run = train_on_text(folder)
    outcome = run_program(convert_to_hf.main, [run.checkpoints, folder / "exported"])
    assert outcome.status == 0, outcome.err
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks")
    return Case(run, folder / "exported", folder / "tasks")


def write_tasks(folder: Path) -> None:
    """One of each kind: a choice between texts of several lengths, the likelihood of texts, and generation."""

    def lines(name: str, records: Sequence[dict[str, Any]]) -> Path:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    generator = np.random.default_rng(3)
    questions = [
        {
            "question": f"the {COLOURS[number % 4]} class is",
            "choices": [" ".join(generator.choice(COLOURS, size=1 + option)) for option in range(4)],
            "answer": int(generator.integers(4)),
        }
        for number in range(23)
    ]
    texts = [{"text": "the class of the object is " * repeats} for repeats in (1, 3, 40)]
    starts = [{"start": "for name in " + "x, " * number, "end": " the"} for number in range(5)]
    data = {
        "choice": f"""
output_type: multiple_choice
dataset_kwargs: {{data_files: {{train: {lines("train", questions[:8])}, test: {lines("choice", questions[8:])}}}}}
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
        "text": f"""
output_type: loglikelihood_rolling
dataset_kwargs: {{data_files: {{test: {lines("text", texts)}}}}}
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
""",
        "generation": f"""
output_type: generate_until
dataset_kwargs: {{data_files: {{test: {lines("generation", starts)}}}}}
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{end}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
    }
    for name, text in data.items():
        (folder / f"{name}.yaml").write_text(
            f"task: toy_{name}\ndataset_path: json\ntest_split: test\nmetadata: {{version: 3.5}}\n{text}"
        )


def words(case: Case, model: Path, out: Path, tasks: list[str] = TASKS) -> list[str]:
    arguments = [model, "--data", case.run.data, "--out", out, "--include-path", case.tasks]
    return [*map(str, arguments), "--tasks", ",".join(tasks), "--bootstrap-iters", "100"]


def results(case: Case, model: Path, out: Path, *more: str) -> dict[str, Any]:
    outcome = run_program(evaluate.main, [*words(case, model, out), *more])
    assert outcome.status == 0, outcome.err
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def alone(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint on one rank, one request at a time."""
    return results(case, case.run.checkpoints, tmp_path_factory.mktemp("alone") / "out.json", "--batch-size", "1")


def assert_same_scores(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every item's score, not only the sums."""
    assert ours["requests_cut_to_context"] == expected["requests_cut_to_context"]
    for name, task in ours["tasks"].items():
        for mine, theirs in zip(task["items"], expected["tasks"][name]["items"], strict=True):
            assert (mine["doc_id"], mine["doc_hash"]) == (theirs["doc_id"], theirs["doc_hash"])
            assert mine["metrics"].keys() == theirs["metrics"].keys()
            if name == "toy_generation":
                assert mine["responses"] == theirs["responses"]
            else:
                assert numbers(mine["responses"]) == pytest.approx(numbers(theirs["responses"]), rel=1e-4)
        for metric, found in task["metrics"].items():
            reference = expected["tasks"][name]["metrics"][metric]
            assert found["value"] == pytest.approx(reference["value"], rel=1e-4), f"{name} {metric}"
    for prefix, score in ours["datasets"].items():
        reference = expected["datasets"][prefix]
        assert [item["tokens"] for item in score["items"]] == [item["tokens"] for item in reference["items"]]
        losses = [item["loss_sum"] for item in reference["items"]]
        assert [item["loss_sum"] for item in score["items"]] == pytest.approx(losses, rel=1e-5)


def numbers(responses: Any) -> list[float]:
    return [float(value) for value in np.array(responses, dtype=float).ravel()]


def test_a_batch_gives_what_one_request_at_a_time_gives(case: Case, tmp_path: Path, alone: dict[str, Any]) -> None:
    assert_same_scores(results(case, case.run.checkpoints, tmp_path / "out.json", "--batch-size", "7"), alone)


def test_the_exported_folder_has_the_scores_of_its_checkpoint(
    case: Case, tmp_path: Path, alone: dict[str, Any]
) -> None:
    assert_same_scores(results(case, case.exported, tmp_path / "out.json"), alone)


def _evaluate(arguments: Sequence[str]) -> None:
    evaluate.main(list(arguments))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "tp2 dp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_has_the_same_scores(case: Case, tmp_path: Path, alone: dict[str, Any], layout: str) -> None:
    ranks, arguments = LAYOUTS[layout]
    out = tmp_path / "out.json"
    line = [*words(case, case.run.checkpoints, out), *arguments.split()]
    run_on_ranks(ranks, _evaluate, line, process_group=False)
    assert_same_scores(json.loads(out.read_text()), alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(WITHOUT_CACHE))
def test_layouts_that_cannot_generate_have_the_other_scores(
    case: Case, tmp_path: Path, alone: dict[str, Any], layout: str
) -> None:
    ranks, arguments = WITHOUT_CACHE[layout]
    out = tmp_path / "out.json"
    line = [*words(case, case.run.checkpoints, out, TASKS[:2]), *arguments.split()]
    run_on_ranks(ranks, _evaluate, line, process_group=False)
    assert_same_scores(json.loads(out.read_text()), alone)


# -- against arithmetic by hand -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hand(case: Case) -> Any:
    """tokens [n + 1] → nats of the last n, by the exported model: nothing padded, one window at a time."""
    from megatron_exo.hf import ExoFormerForCausalLM

    model = ExoFormerForCausalLM.from_pretrained(case.exported).eval()

    def losses(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            scores = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        return -scores[range(len(tokens) - 1), list(tokens[1:])]

    def sum_of(tokens: Sequence[int]) -> float:
        total = 0.0
        for start in range(0, len(tokens) - 1, CONTEXT):
            end = min(start + CONTEXT + 1, len(tokens))
            total += float(losses(tokens[max(0, end - CONTEXT - 1) : end])[start + 1 - end :].sum())
        return total

    return sum_of


def test_every_token_of_a_dataset_counts_once_and_sees_its_own_document_alone(
    case: Case, alone: dict[str, Any], hand: Any
) -> None:
    score = alone["datasets"][str(case.run.data)]
    sidecar = Sidecar.load(f"{case.run.data}.json")
    assert sidecar.eod is not None
    assert (score["tokens"], score["documents"]) == (sidecar.tokens, sidecar.documents)
    dataset = IndexedDataset(str(case.run.data))
    sums = []
    for item, document in zip(score["items"], dataset, strict=True):
        tokens = [sidecar.eod, *map(int, document)]
        assert item["tokens"] == len(document)
        sums.append(hand(tokens))
    assert max(map(len, dataset)) > 2 * CONTEXT  # or nothing was cut
    assert [item["loss_sum"] for item in score["items"]] == pytest.approx(sums, rel=1e-5)
    assert score["loss"] == pytest.approx(sum(sums) / sidecar.tokens, rel=1e-6)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    # The standard error of the mean, were all documents equally long.
    ratios = np.array(sums) - score["loss"] * np.array([item["tokens"] for item in score["items"]])
    assert score["loss_stderr"] == pytest.approx(ratios.std(ddof=1) * math.sqrt(len(ratios)) / sidecar.tokens, rel=1e-6)


def test_choices_and_texts_have_their_likelihood(case: Case, alone: dict[str, Any], hand: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.exported)
    texts = [json.loads(line)["text"] for line in (case.tasks / "text.jsonl").read_text().splitlines()]
    for item, text in zip(alone["tasks"]["toy_text"]["items"], texts, strict=True):
        tokens = [tokenizer.bos_token_id or tokenizer.eos_token_id, *tokenizer.encode(text)]
        assert numbers(item["responses"]) == pytest.approx([-hand(tokens)], rel=1e-4)

    questions = [json.loads(line) for line in (case.tasks / "choice.jsonl").read_text().splitlines()]
    task = alone["tasks"]["toy_choice"]
    assert task["num_fewshot"] == 2
    assert (task["n"], task["n_of"], task["version"]) == (len(questions), len(questions), 3.5)
    right = []
    for item, question in zip(task["items"], questions, strict=True):
        likelihoods = [float(response[0]) for response in item["responses"]]
        assert len(likelihoods) == len(question["choices"])
        right.append(likelihoods.index(max(likelihoods)) == question["answer"])
        assert item["metrics"]["acc"] == float(right[-1])
    assert 0 < sum(right) < len(right)
    accuracy = task["metrics"]["acc"]
    assert accuracy["value"] == pytest.approx(np.mean(right))
    assert accuracy["stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))


def test_generation_ends_where_the_task_says(alone: dict[str, Any]) -> None:
    texts = [item["responses"][0] for item in alone["tasks"]["toy_generation"]["items"]]
    assert len(texts) == 5
    assert all("e" not in text for text in texts)
    assert len(set(texts)) > 1


def test_the_file_says_what_made_it(case: Case, alone: dict[str, Any]) -> None:
    assert alone["harness"] == {"name": "lm-evaluation-harness", "version": "0.4.13"}
    assert alone["model"]["step"] == 4
    assert alone["model"]["path"].endswith("iter_0000004")
    assert alone["versions"].keys() >= {"torch", "megatron-core", "lm-eval", "transformers", "megatron-exo"}
    assert alone["settings"] == {"batch_size": 1, "limit": None, "seed": 1234, "context": CONTEXT}


def test_a_limited_run_says_so_in_its_table(case: Case, tmp_path: Path) -> None:
    arguments = words(case, case.exported, tmp_path / "out.json", TASKS[:1])
    outcome = run_program(evaluate.main, [*arguments, "--limit", "3", "--num-fewshot", "8"])
    assert outcome.status == 0, outcome.err
    assert "3 of 15" in outcome.out
    assert "12 requests were longer than the context and were cut" in outcome.out
    assert len(json.loads((tmp_path / "out.json").read_text())["datasets"][str(case.run.data)]["items"]) == 3


# -- what is refused ------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    outcome = run_program(evaluate.main, arguments)
    assert outcome.status == 1, outcome.out
    return one_line(outcome.err.splitlines()[-1] + "\n")  # before it there may be progress


def test_wrong_requests_are_refused_in_one_line(case: Case, tmp_path: Path) -> None:
    assert "there is no task 'arc_esy'; did you mean arc_easy" in refused(case.exported, "--tasks", "arc_esy")
    offline = refused(case.exported, "--tasks", "paper")
    assert "the data of task arc_challenge cannot be loaded" in offline
    assert "python tools/evaluate.py --download arc_challenge" in offline
    many = refused(*words(case, case.exported, tmp_path / "out.json", TASKS[:1]), "--num-fewshot", "9")
    assert "cannot run toy_choice with 9 examples before each question" in many
    assert "there is no " in refused(case.exported, "--data", tmp_path / "nothing")
    assert "--bf16" in refused(case.run.checkpoints, "--data", case.run.data, "--dtype", "bfloat16")
    assert "leave it out" in refused(case.exported, "--data", case.run.data, "--tensor-model-parallel-size", "2")


def test_what_is_not_installed_is_one_line(case: Case) -> None:
    program = f"import sys; sys.modules['lm_eval'] = None; sys.path.insert(0, {str(ROOT)!r})\n"
    program += "from tools.evaluate import main; main()"
    arguments = [sys.executable, "-c", program, case.exported, "--tasks", "paper"]
    outcome = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "evaluation needs the extra eval" in one_line(outcome.stderr.splitlines()[-1] + "\n")


def test_data_of_another_tokenizer_is_refused(case: Case, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        shutil.copyfile(f"{case.run.data}{end}", tmp_path / f"other{end}")
    sidecar = json.loads(Path(f"{case.run.data}.json").read_text())
    sidecar |= {"tokenizer_sha256": "0" * 64, "tokenizer_fingerprint": "0" * 64}
    (tmp_path / "other.json").write_text(json.dumps(sidecar))
    for model in (case.run.checkpoints, case.exported):
        assert "which is another one" in refused(model, "--data", tmp_path / "other")


# -- how datasets are cut ---------------------------------------------------------------------------------------


class LabelsAsLosses:
    """Its loss of a label is the label itself, of padding a fortune, and it remembers what it was shown."""

    path, vocab_size, longest = Path("labels"), 64, 5
    replica, replicas, is_speaker = 0, None, False

    def __init__(self, eod: int | None) -> None:
        self.eod = eod
        self.rows: list[list[int]] = []

    def token_losses(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.rows += tokens.tolist()
        return torch.where(labels == 0, 1e9, labels.float())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def check_dataset_tokenizer(self, prefix: str) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Token 9 ends a document: two in the first sequence, one that is empty, one of more than a context."""
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sequence in ([1, 2, 9, 3, 9], [9], list(range(10, 22)) + [9]):
        builder.add_document(torch.tensor(sequence), [len(sequence)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("batch_size", [1, 3])
def test_documents_are_cut_at_their_ends_and_every_token_counts_once(dataset: str, batch_size: int) -> None:
    model = LabelsAsLosses(eod=9)
    score = score_dataset(model, dataset, batch_size=batch_size)
    assert score.counts.tolist() == [3, 2, 1, 13]
    assert score.losses.tolist() == [12, 12, 9, sum(range(10, 22)) + 9]
    # The last window of the long document is full, and what it has seen before does not count again.
    assert sorted(row for row in model.rows if len(row) == 5 and 0 not in row) == [
        [9, 10, 11, 12, 13],
        [14, 15, 16, 17, 18],
        [17, 18, 19, 20, 21],
    ]


def test_without_a_token_that_ends_documents_their_first_tokens_are_not_predicted(dataset: str) -> None:
    score = score_dataset(LabelsAsLosses(eod=None), dataset, batch_size=2)
    assert score.counts.tolist() == [4, 0, 12]
    assert score.losses.tolist() == [2 + 9 + 3 + 9, 0, sum(range(11, 22)) + 9]
