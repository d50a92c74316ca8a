"""A run on text, small enough for a test, with the tokenizer and the dataset that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.pretrain import main as pretrain
from tests.programs import run_program

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
MODEL += " --seq-length 128 --max-position-embeddings 128"
MODEL += " --exo-init megatron --init-method-std 0.3"  # so that every token depends on all before it
RUN = "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 3e-2 --lr-decay-style constant --eval-iters 0"
RUN += " --eval-interval 9 --save-interval 4 --num-workers 0"


@dataclass(frozen=True)
class TextRun:
    """Where its parts are."""

    checkpoints: Path
    tokenizer: Path
    data: Path
    """Prefix of twelve documents, the longest of which has more tokens than the model reads at once."""


def train_on_text(folder: Path) -> TextRun:
    """Make a tokenizer of 400 tokens, a dataset and four steps of a model on it."""
    (folder / "texts").mkdir()
    for name in sorted(topics)[:12]:
        (folder / "texts" / f"{name}.txt").write_text(topics[name])
    model = train_tokenizer([str(folder / "texts")], str(folder / "tokenizer"), vocab_size=400)
    preprocess([str(folder / "texts")], str(folder / "data"), TokenizerSpec("SentencePieceTokenizer", str(model)))
    arguments = f"{MODEL} {RUN} --tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --split 1,0,0"
    outcome = run_program(pretrain, f"{arguments} --data-path {folder / 'data'} --save {folder / 'run'}".split())
    assert outcome.status == 0, outcome.err
    return TextRun(folder / "run", Path(model), folder / "data")
