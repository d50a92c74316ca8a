from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_exo.data import corpus
from megatron_exo.data.corpus import CorpusError, Source, build_corpus, file_sources
from megatron_exo.data.prose import is_prose, paragraphs, python_prose

SHARED = "This sentence is the same in every one of the modules of the tree."

MODULE = '''"""The module number {number} explains what it does to the reader.

{shared}

Parameters
----------
x : int
    The number that will be added to the result of the function.

>>> from nowhere import f
"""
raise SystemExit("this module must never be run")
# A comment block that goes on for two lines and ends
# with a full stop, as comments of number {number} should.
value = "# This is a string that only looks like a comment of the module."  # A remark after code is left out of it.
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for number in range(60):
        path = root / f"package/module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        word = ["one", "two", "three", "four", "five", "six", "seven"][number % 7]
        path.write_text(MODULE.format(number=word, shared=SHARED))
    (root / "package/guide.md").write_text(
        "# Guide\n\nYou can **install** it with [the tool](http://x) of your choice.\n"
    )
    (root / "package/LICENSE.txt").write_text("This is the text of the licence that we do not want to have here.\n")
    metadata = root / "package-1.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: package\nVersion: 1.0\n\nThis package is about the things that it describes to you.\n")
    nested = root / "site-packages/other.py"
    nested.parent.mkdir()
    nested.write_text('"""This belongs to another package and should not be found from here."""\n')
    return root


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbered_sources(count: int) -> list[Source]:
    digits = ["red", "green", "blue", "small", "large", "old", "new", "long", "short", "fast"]
    sources = []
    for number in range(count):
        words = " ".join(digits[int(digit)] for digit in str(number))
        text = f"This is the {words} paragraph that everybody should read before the others."
        sources.append(Source(f"topics/{number}", "topic", text=text))
    return sources


def test_docstrings_comments_descriptions_and_guides_are_gathered_without_running_anything(
    tree: Path, tmp_path: Path
) -> None:
    build_corpus(file_sources(tree, "tree"), tmp_path / "out", validation_fraction=0.2)
    found = {
        record["source"]: record["text"]
        for name in ("train", "validation")
        for record in records(tmp_path / f"out/{name}.jsonl")
    }
    texts = "\n\n".join(found.values())
    assert texts.count(SHARED) == 1
    assert (
        "A comment block that goes on for two lines and ends with a full stop, as comments of number one should."
        in texts
    )
    assert "The number that will be added to the result of the function." in texts
    assert found["tree/package/guide.md"] == "You can install it with the tool of your choice."
    assert found["tree/package-1.0.dist-info/METADATA"] == "This package is about the things that it describes to you."
    for unwanted in ("licence", "another package", "import f", "only looks like", "remark after", "Parameters"):
        assert unwanted not in texts


def test_the_splits_share_no_paragraph_and_no_document(tmp_path: Path) -> None:
    sources = numbered_sources(300)
    sources += [
        Source(f"copies/{source.name}", "topic", text=source.text.upper().replace("THIS", "This", 1))
        for source in sources
    ]
    summary = build_corpus(sources, tmp_path, validation_fraction=0.3)
    train, validation = records(tmp_path / "train.jsonl"), records(tmp_path / "validation.jsonl")
    held_out = {text.lower() for record in validation for text in record["text"].split("\n\n")}
    assert held_out.isdisjoint(text.lower() for record in train for text in record["text"].split("\n\n"))
    assert len(train) + len(validation) == 300 == summary.duplicates
    assert 50 < len(validation) < 130


def test_the_split_of_a_document_does_not_depend_on_the_others(tmp_path: Path) -> None:
    def held_out(sources: list[Source], name: str) -> set[str]:
        build_corpus(sources, tmp_path / name, validation_fraction=0.3)
        return {record["source"] for record in records(tmp_path / name / "validation.jsonl")}

    everything = numbered_sources(200)
    half = everything[::-2]
    assert held_out(half, "half") == held_out(everything, "all") & {source.name for source in half}


def test_the_corpus_does_not_depend_on_workers_or_the_order_of_files(tree: Path, tmp_path: Path) -> None:
    sources = file_sources(tree, "tree")
    build_corpus(sources, tmp_path / "one", validation_fraction=0.3)
    build_corpus(sources[::-1], tmp_path / "two", validation_fraction=0.3, workers=2)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_size_limit_holds_and_is_reported(tmp_path: Path) -> None:
    summary = build_corpus(numbered_sources(300), tmp_path, validation_fraction=0.3, max_bytes=3000)
    written = sum(
        len(record["text"].encode()) for name in corpus.SPLITS for record in records(tmp_path / f"{name}.jsonl")
    )
    assert 2800 < written <= 3000
    assert "size limit reached" in str(summary)


def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no document falls in the validation split"):
        build_corpus(numbered_sources(5), tmp_path, validation_fraction=1e-9)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_leaves_the_corpus_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_corpus(numbered_sources(100), tmp_path, validation_fraction=0.3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(sources: list[Source]) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(corpus, "_prose_of", fail)
    with pytest.raises(RuntimeError, match="killed"):
        build_corpus(numbered_sources(100), tmp_path, validation_fraction=0.3, seed=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog, and it is not the first time.",
        "Returns the value of the field.",
        "if the name is not found in the cache, the file is read again.",
    ],
)
def test_sentences_are_prose(text: str) -> None:
    assert is_prose(text)


@pytest.mark.parametrize(
    "text",
    [
        "Table of Contents",
        "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota.",
        "x = {key: value for key in the_list if key != 0 and value == [1, 2]}.",
        "The sum is 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 and so on.",
        "Copyright is held by the authors of this software, and all rights are reserved.",
        "The software is provided as is, without warranty of any kind to you.",
        "Dies ist ein deutscher Satz, der nicht in das englische Korpus gelangen soll.",
        "",
    ],
)
def test_headings_tables_code_licences_and_other_languages_are_not_prose(text: str) -> None:
    assert not is_prose(text)


def test_markup_is_removed_and_lines_are_joined() -> None:
    text = """\
Use :func:`~os.path.join` to put the parts
together, and see `the guide <https://example.org>`_ for *more* of it.

.. code-block:: python

- The first item of this list runs
  over two lines of the text.
- The second item of the list is shorter.

```
This is code that is written in the form of a sentence.
```
"""
    assert list(paragraphs(text)) == [
        "Use os.path.join to put the parts together, and see the guide for more of it.",
        "The first item of this list runs over two lines of the text.",
        "The second item of the list is shorter.",
    ]


def test_a_hash_sign_inside_a_string_is_no_comment() -> None:
    source = 'a = """\n# not a comment\n"""\nb = "\\"# neither"\n# a comment\n#   of two lines\n\n    # and another\n'
    assert list(python_prose(source)) == ["a comment\n  of two lines", "and another"]


def test_broken_source_code_is_read_as_far_as_it_makes_sense() -> None:
    assert list(python_prose('def f(:\n    r"""A \\d docstring."""\n    """open')) == ["A \\d docstring."]
