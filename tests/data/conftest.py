"""Small real tokenizers and datasets, made once per session."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec

TEXTS = [topics[name] for name in sorted(topics)[:12]]
"""Real English, about 100 kB."""


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("input") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def sentencepiece_spec(tmp_path_factory: pytest.TempPathFactory, jsonl: Path) -> TokenizerSpec:
    path = train_tokenizer([str(jsonl)], str(tmp_path_factory.mktemp("sentencepiece") / "small"), vocab_size=500)
    return TokenizerSpec("SentencePieceTokenizer", str(path))


@pytest.fixture(scope="session")
def gpt2_spec(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> TokenizerSpec:
    """A byte-level BPE in the two files of GPT-2, with a vocabulary of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer.model.save(str(folder))
    return TokenizerSpec("GPT2BPETokenizer", str(folder))


@pytest.fixture(scope="session")
def hugging_face_spec(tmp_path_factory: pytest.TempPathFactory, gpt2_spec: TokenizerSpec) -> TokenizerSpec:
    """The same tokenizer as ``gpt2_spec``, as a Hugging Face folder."""
    tokenizers = pytest.importorskip("tokenizers")
    source = Path(gpt2_spec.model)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt"))
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("huggingface")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return TokenizerSpec("HuggingFaceTokenizer", str(folder))


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes documents (lists of ids) with Megatron's own builder and returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def make(documents: Sequence[Sequence[int]], dtype: type = np.uint16, name: str = "set") -> Path:
        prefix = tmp_path / name
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for ids in documents:
            builder.add_document(np.array(ids, dtype=dtype), [len(ids)])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return make
