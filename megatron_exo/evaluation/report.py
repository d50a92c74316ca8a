"""The scores of a model as a file for programs and a table for people."""

from __future__ import annotations

import json
import os
import platform as machine
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megatron_exo

_PACKAGES = ("torch", "megatron-core", "transformers", "lm-eval", "datasets", "tokenizers")


def versions() -> dict[str, str]:
    """Of everything that has a part in the numbers."""
    found = {"python": machine.python_version(), "megatron-exo": megatron_exo.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_results(results: Mapping[str, Any], path: Path) -> None:
    """As JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            json.dump(results, file, indent=1, ensure_ascii=False, default=str)
            file.write("\n")
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def table(results: Mapping[str, Any]) -> str:
    """Tasks with every metric, and datasets."""
    parts = []
    if tasks := results.get("tasks"):
        rows: list[tuple[str, ...]] = [("task", "version", "shots", "n", "metric", "value", "stderr")]
        rows += [row for name, task in tasks.items() for row in _task_rows(name, task)]
        parts.append(_aligned(rows))
        parts += [f"mean of {metric} over {len(tasks)} tasks: {mean:.4f}" for metric, mean in results["means"].items()]
        if results["requests_cut_to_context"]:
            parts.append(f"{results['requests_cut_to_context']} requests were longer than the context and were cut")
    if datasets := results.get("datasets"):
        head = ("dataset", "documents", "tokens", "loss", "stderr", "perplexity")
        parts.append(_aligned([head, *(_dataset_row(prefix, score) for prefix, score in datasets.items())]))
    return "\n".join(parts)


def _task_rows(name: str, task: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for metric, found in task["metrics"].items():
        number = f"{task['n']}" if task["n"] == task["n_of"] else f"{task['n']} of {task['n_of']}"
        shots = str(task["num_fewshot"])
        yield name, str(task["version"]), shots, number, metric, _number(found["value"]), _number(found["stderr"])


def _dataset_row(prefix: str, score: Mapping[str, Any]) -> tuple[str, ...]:
    counts = f"{score['documents']:,}", f"{score['tokens']:,}"
    return prefix, *counts, _number(score["loss"]), _number(score["loss_stderr"]), f"{score['perplexity']:.4f}"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
