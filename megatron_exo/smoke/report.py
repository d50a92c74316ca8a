"""The table of a smoke test: on a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from megatron_exo.smoke.cases import STAGES, Result

COLUMNS = ("case", *STAGES[:-1], "nearest to its bound", "s/step", "tokens/s", "peak GB")
_WIDTHS = (44, 5, 7, 8, 8, 11, 62, 8, 9, 7)


def cells(result: Result) -> tuple[str, ...]:
    """One row, for ``COLUMNS``."""
    worst, seconds, tokens, memory = "-", "-", "-", "-"
    if (deviation := result.worst()) is not None:
        worst = str(deviation)
    if result.seconds_per_step is not None and result.tokens_per_second is not None:
        seconds, tokens = f"{result.seconds_per_step:.4f}", f"{result.tokens_per_second:,.0f}"
    elif result.verdict("timing") == "FAIL":
        seconds = "FAIL"
    if result.peak_memory_bytes is not None:
        memory = f"{result.peak_memory_bytes / 1e9:.2f}"
    return (str(result.case), *(result.verdict(stage) for stage in STAGES[:-1]), worst, seconds, tokens, memory)


def text_row(row: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(row, _WIDTHS, strict=True)).rstrip()


def failures(result: Result) -> Iterator[str]:
    """One line for the error and for every deviation beyond its bound."""
    for deviation in result.deviations():
        if not deviation.passed:
            yield f"FAIL {result.case}: {deviation}"
    if result.error:
        yield f"FAIL {result.case}: {result.error}"


def summary(results: Sequence[Result]) -> str:
    passed = sum(result.passed for result in results)
    return f"{passed} of {len(results)} cases passed"


def markdown(facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """A section for ``docs/hardware.md``: what it ran on, the table, what failed.

    Args:
        facts: name → value, printed in order; ``device`` is the heading.
    """
    table = [COLUMNS, ["---"] * len(COLUMNS), *(cells(result) for result in results)]
    parts = [
        f"### {facts['device']}",
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "device"),
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        "\n".join(f"- {line}" for result in results for line in failures(result)),
        f"{summary(results)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(facts: Mapping[str, str], results: Sequence[Result], log: str) -> str:
    """Everything that was measured; ``log`` is what the processes printed."""
    rows = [
        dataclasses.asdict(result)
        | {"passed": result.passed, "verdicts": {stage: result.verdict(stage) for stage in STAGES}}
        for result in results
    ]
    return json.dumps({"environment": dict(facts), "cases": rows, "log": log}, indent=1) + "\n"
