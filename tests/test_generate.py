"""``tools/generate.py``: greedy text is the same with and without a cache, alone and in a batch, on every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_exo.checkpoints.inspection import checkpoint_at, read_description
from megatron_exo.errors import UserError
from megatron_exo.generation import Sampling
from megatron_exo.pretrain import main as pretrain
from megatron_exo.trained_model import model_arguments
from tests.programs import Outcome, one_line, run_program
from tests.ranks import run_on_ranks
from tests.text_run import MODEL, RUN, train_on_text
from tools import convert_to_hf, generate

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
PROMPTS = ["5", "9 8 7 6 5 4 3", " ".join(map(str, range(1, 42))), "60 61 62 63"]
ALL = [word for prompt in PROMPTS for word in ("--ids", prompt)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on mock data, trained at tensor parallelism 2."""
    folder = tmp_path_factory.mktemp("mock") / "run"
    arguments = f"{MODEL} {RUN} --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --save {folder}"
    run_on_ranks(2, _train, f"{arguments} --tensor-model-parallel-size 2".split(), process_group=False)
    return folder


def _train(arguments: list[str]) -> None:
    import sys

    sys.argv = ["pretrain", *arguments]
    pretrain()


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, whose tokenizer is gone: the checkpoint carries a copy."""
    run = train_on_text(tmp_path_factory.mktemp("text"))
    run.tokenizer.unlink()
    return run.checkpoints


def generated(run: Path, out: Path, *words: str) -> list[list[int]]:
    """The new ids of every prompt."""
    outcome = run_program(generate.main, [run, "--json", out, *words])
    assert outcome.status == 0, outcome.err
    return [record["ids"] for record in json.loads(out.read_text())]


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Without a cache, each prompt alone."""
    out = tmp_path_factory.mktemp("alone") / "out.json"
    texts = [generated(run, out, "--ids", prompt, "--no-cache")[0] for prompt in PROMPTS]
    assert all(len(text) == 64 for text in texts)
    assert len({tuple(text) for text in texts}) == len(texts)
    assert all(len(set(text)) > 4 for text in texts)
    return texts


@pytest.mark.parametrize("words", ["", "--no-cache", "--prefill-chunk 3"], ids=["cache", "no cache", "chunks"])
def test_a_batch_of_prompts_of_different_lengths_gives_what_each_gives_alone(
    run: Path, tmp_path: Path, expected: list[list[int]], words: str
) -> None:
    assert generated(run, tmp_path / "out.json", *ALL, *words.split()) == expected


def test_a_prompt_that_is_read_in_chunks_gives_the_same(run: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    words = ["--ids", PROMPTS[2], "--prefill-chunk", "7"]
    assert generated(run, tmp_path / "out.json", *words) == [expected[2]]


def _generate(words: Sequence[str]) -> None:
    generate.main(list(words))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "tp2 pp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_gives_the_same(run: Path, tmp_path: Path, expected: list[list[int]], layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    out = tmp_path / "out.json"
    run_on_ranks(ranks, _generate, [str(run), *ALL, "--json", str(out), *words.split()], process_group=False)
    assert [record["ids"] for record in json.loads(out.read_text())] == expected


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    outcome = run_program(convert_to_hf.main, [run, folder])
    assert outcome.status == 0, outcome.err
    return folder


@pytest.mark.parametrize("words", ["", "--no-cache", "--prefill-chunk 7"], ids=["cache", "no cache", "chunks"])
def test_the_exported_folder_gives_the_same(
    exported: Path, tmp_path: Path, expected: list[list[int]], words: str
) -> None:
    assert generated(exported, tmp_path / "out.json", *ALL, *words.split()) == expected
    assert generated(exported, tmp_path / "out.json", "--ids", PROMPTS[1], *words.split()) == [expected[1]]


def test_the_exported_text_is_the_same_and_printed_as_it_grows(text_run: Path, tmp_path: Path) -> None:
    outcome = run_program(convert_to_hf.main, [text_run, tmp_path / "model"])
    assert outcome.status == 0, outcome.err
    texts = []
    for model in (text_run, tmp_path / "model"):
        outcome = run_program(generate.main, [model, "--prompt", "The following", "--max-new-tokens", "20"])
        assert outcome.status == 0, outcome.err
        texts.append(outcome.out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("The following\n")


def test_text_is_printed_as_it_grows_with_the_tokenizer_that_the_checkpoint_carries(
    text_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = [text_run, "--prompt", "The following", "--max-new-tokens", "20", "--json", out]
    outcome = run_program(generate.main, words)
    assert outcome.status == 0, outcome.err
    (record,) = json.loads(out.read_text())
    assert outcome.out == f"The following{record['text']}\n"
    assert 0 < len(record["ids"]) <= 20


def test_sampled_text_depends_on_the_seed_and_not_on_the_batch(run: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out.json", ["--temperature", "1.5", "--max-new-tokens", "16"]
    batch = generated(run, out, *ALL, *words, "--seed", "3")
    assert generated(run, out, "--ids", PROMPTS[1], *words, "--seed", "3") == [batch[1]]
    assert generated(run, out, "--ids", PROMPTS[1], *words, "--seed", "4") != [batch[1]]


def _draws(sampling: Sampling, logits: list[float], count: int = 400) -> set[int]:
    rows = torch.tensor(logits).expand(count, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return set(sampling.choose(rows, generators).tolist())


def test_the_choice_is_among_the_tokens_that_are_asked_for() -> None:
    logits = [0.0, 2.0, 1.0, -1.0]  # probabilities 0.09, 0.64, 0.24, 0.03
    assert _draws(Sampling(), logits) == {1}
    assert _draws(Sampling(temperature=1.0), logits) == {0, 1, 2, 3}
    assert _draws(Sampling(temperature=1.0, top_k=2), logits) == {1, 2}
    assert _draws(Sampling(temperature=1.0, top_p=0.7), logits) == {1, 2}
    assert _draws(Sampling(temperature=1.0, top_p=0.6), logits) == {1}
    assert _draws(Sampling(temperature=1.0, top_p=1e-6), logits) == {1}
    assert _draws(Sampling(temperature=0.01), logits) == {1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0 is out of range; pass 1 or more"),
        ({"temperature": -1.0}, "--temperature -1.0 is out of range"),
        ({"top_k": -1}, "--top-k -1 is out of range"),
        ({"top_p": 0.0}, "--top-p 0.0 is out of range; pass above 0, up to 1"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Sampling(**values)  # type: ignore[arg-type]


def _refusal(*words: object) -> str:
    outcome: Outcome = run_program(generate.main, words)
    assert outcome.status == 1
    return one_line(outcome.err)


def test_a_model_that_would_be_built_as_another_is_refused(run: Path) -> None:
    folder = checkpoint_at(run)
    described = read_description(folder)
    assert "--tokenizer-type" in model_arguments(folder, described)
    described["model"]["rotary_interleaved"] = True
    with pytest.raises(
        UserError, match="trained with rotary_interleaved=True; outside of training, only False is supp"
    ):
        model_arguments(folder, described)


def test_what_cannot_be_continued_is_said_in_one_line(run: Path, text_run: Path, tmp_path: Path) -> None:
    assert _refusal(run, "--prompt", "text") == (
        f"{run} was trained on mock data, without a tokenizer; pass --ids '1 2 3' in place of text"
    )
    assert "prompt 1 has token 64, the vocabulary has 64; check the tokenizer" in _refusal(run, "--ids", "1 64")
    assert "prompt 2 has 100 tokens, and with --max-new-tokens 64 it is longer than the 128" in _refusal(
        run, "--ids", "1", "--ids", "1 " * 100
    )
    assert "--ids takes numbers with spaces between them" in _refusal(run, "--ids", "1 b")
    assert "cannot be read" in _refusal(run, "--prompts", tmp_path / "none")
    assert "is no folder; give that of a run" in _refusal(tmp_path / "nowhere", "--ids", "1")
