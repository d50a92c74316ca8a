"""A demo corpus of real English prose from what every machine that runs Python has.

Python's documentation topics, the docstrings and comments of the standard library and of installed packages,
package descriptions and text files: enough to try training with, without a network. Nothing is imported or run.
"""

from __future__ import annotations

import email.parser
import email.policy
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from megatron_exo.data.progress import Progress
from megatron_exo.data.prose import paragraphs, python_prose
from megatron_exo.errors import UserError

KINDS = ("topic", "python", "description", "text")
SPLITS = ("train", "validation")

_TEXT_SUFFIXES = (".md", ".rst", ".txt")
_NOT_PROSE = ("license", "licence", "copying", "notice", "authors", "third", "cmakelists", "requirements", "changelog")
_MAX_FILE_BYTES = 2_000_000
_FILES_PER_TASK = 64


class CorpusError(UserError):
    """A corpus that cannot be built: why, and what to change."""


@dataclass(frozen=True, order=True)
class Source:
    """One document to be: a documentation topic (with its text) or a file (to be read later)."""

    name: str
    """Stable and free of the machine's paths: ``python/topics/for`` or ``packages/torch/nn/modules/linear.py``."""
    kind: str
    path: str = ""
    text: str = ""


@dataclass
class CorpusSummary:
    """Counts per kind and per split. ``str()`` is a small table."""

    documents: Counter[str] = field(default_factory=Counter)
    paragraphs: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    """Paragraphs left out because another document has them."""
    capped: bool = False
    """Whether the size limit was reached before the sources were used up."""

    def add(self, name: str, texts: list[str], text_bytes: int) -> None:
        self.documents[name] += 1
        self.paragraphs[name] += len(texts)
        self.text_bytes[name] += text_bytes

    def __str__(self) -> str:
        rows = [f"{'':<12}{'documents':>10}{'paragraphs':>12}{'MB':>8}"]
        for name in (*KINDS, *SPLITS):
            megabytes = self.text_bytes[name] / 1e6
            rows.append(f"{name:<12}{self.documents[name]:>10,}{self.paragraphs[name]:>12,}{megabytes:>8.2f}")
        rows.append(f"{self.duplicates:,} repeated paragraphs left out" + ("; size limit reached" * self.capped))
        return "\n".join(rows)


def installed_sources() -> list[Source]:
    """What this Python installation and its packages offer."""
    from pydoc_data.topics import topics

    paths = sysconfig.get_paths()
    sources = [Source(f"python/topics/{name}", "topic", text=text) for name, text in topics.items()]
    sources += file_sources(Path(paths["stdlib"]), "python")
    for folder in sorted({paths["purelib"], paths["platlib"]}):
        sources += file_sources(Path(folder), "packages")
    return sources


def file_sources(root: Path, name: str) -> list[Source]:
    """The Python files, package descriptions and text files under a folder, named relative to it.

    Packages nested in it (``site-packages``), licences and lists are left out.
    """
    sources = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [item for item in subfolders if item not in ("site-packages", "__pycache__", "licenses")]
        metadata_folder = folder.endswith((".dist-info", ".egg-info"))
        for file in files:
            suffix = os.path.splitext(file)[1].lower()
            if metadata_folder:
                kind = "description" if file in ("METADATA", "PKG-INFO") else None
            elif suffix == ".py":
                kind = "python"
            else:
                kind = "text" if suffix in _TEXT_SUFFIXES and not file.lower().startswith(_NOT_PROSE) else None
            if kind:
                path = Path(folder, file)
                sources.append(Source(f"{name}/{path.relative_to(root).as_posix()}", kind, str(path)))
    return sources


def build_corpus(
    sources: Iterable[Source],
    output_dir: Path,
    *,
    validation_fraction: float = 0.01,
    max_bytes: int = 24_000_000,
    seed: int = 1234,
    workers: int = 1,
) -> CorpusSummary:
    """Write ``train.jsonl`` and ``validation.jsonl`` with one ``{"text", "source"}`` object per document.

    Documents come in an order shuffled by ``seed`` until ``max_bytes`` of text are reached. A paragraph is kept
    in the first document that has it, so the splits share none. The split of a document follows from its name and
    the seed alone, whatever else is in the corpus.

    Raises:
        CorpusError: if either split would be empty.
    """
    ordered = sorted(sources, key=lambda source: (_number(seed, "order", source.name), source))
    summary = CorpusSummary()
    seen: set[bytes] = set()
    progress = Progress("gather", len(ordered))
    output_dir.mkdir(parents=True, exist_ok=True)
    partial = {split: output_dir / f"{split}.jsonl.partial-{os.getpid()}" for split in SPLITS}
    try:
        with ExitStack() as stack:
            files = {split: stack.enter_context(open(partial[split], "w", encoding="utf-8")) for split in SPLITS}
            total = 0
            for number, (source, found) in enumerate(_gather(ordered, workers)):
                texts = _new_paragraphs(found, seen)
                summary.duplicates += len(found) - len(texts)
                if not texts:
                    continue
                text = "\n\n".join(texts)
                size = len(text.encode())
                if total + size > max_bytes:
                    summary.capped = True
                    break
                total += size
                split = SPLITS[_number(seed, "split", source.name) < validation_fraction]
                print(json.dumps({"text": text, "source": source.name}, ensure_ascii=False), file=files[split])
                summary.add(source.kind, texts, size)
                summary.add(split, texts, size)
                progress.update(sum(map(summary.documents.__getitem__, SPLITS)), total, number + 1)
        progress.finish(sum(map(summary.documents.__getitem__, SPLITS)), total)
        for split in SPLITS:
            if summary.documents[split] == 0:
                raise CorpusError(
                    f"no document falls in the {split} split (validation fraction {validation_fraction}, "
                    f"{len(ordered)} sources); change the fraction, the size limit or the seed"
                )
        for split in SPLITS:
            os.replace(partial[split], output_dir / f"{split}.jsonl")
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return summary


def _number(seed: int, purpose: str, name: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _new_paragraphs(found: list[str], seen: set[bytes]) -> list[str]:
    """Those whose words were not seen before; case, punctuation and the values of numbers make no difference."""
    new = []
    for text in found:
        words = "".join("0" if char.isdigit() else char for char in text.lower() if char.isalnum())
        key = hashlib.blake2b(words.encode(), digest_size=16).digest()
        if key not in seen:
            seen.add(key)
            new.append(text)
    return new


def _gather(sources: list[Source], workers: int) -> Iterator[tuple[Source, list[str]]]:
    """The prose of each source, in order."""
    tasks = [sources[begin : begin + _FILES_PER_TASK] for begin in range(0, len(sources), _FILES_PER_TASK)]
    if workers <= 1:
        for task in tasks:
            yield from zip(task, _prose_of(task), strict=True)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        for task, found in zip(tasks, pool.map(_prose_of, tasks), strict=True):
            yield from zip(task, found, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _prose_of(sources: list[Source]) -> list[list[str]]:
    return [[paragraph for text in _texts(source) for paragraph in paragraphs(text)] for source in sources]


def _texts(source: Source) -> Iterator[str]:
    if source.kind == "topic":
        yield source.text
        return
    if os.path.getsize(source.path) > _MAX_FILE_BYTES:  # tables and generated code
        return
    try:
        content = Path(source.path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, PermissionError):
        return
    if source.kind == "python":
        yield from python_prose(content)
    elif source.kind == "description":
        message = email.parser.Parser(policy=email.policy.compat32).parsestr(content)
        yield str(message.get_payload() or message.get("Description") or "")
    else:
        yield content
