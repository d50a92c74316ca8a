"""Reads the lines that Megatron prints about training and evaluation, and turns them into records.

Formats: ``training_log`` and ``evaluate_and_print_results`` of ``megatron/training/training.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ITERATION_LINE = re.compile(r"\s*\[[^]]*\]\s+iteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
_EVALUATION_LINE = re.compile(
    r"\s*validation(?:-(?P<name>.+?))? loss at iteration (?P<iteration>\d+)"
    r"(?: on (?P<on>validation|test) set)?\s*\|(?P<fields>.*)"
)


@dataclass(frozen=True)
class Interval:
    """The iterations that one of Megatron's iteration lines sums up."""

    iteration: int
    """The last of them."""
    train_iters: int
    iterations: int
    """How many they are, the skipped ones included."""
    seconds: float
    losses: Mapping[str, float]
    """Name → mean over the iterations that were not skipped. Megatron leaves out means that are NaN."""
    skipped: int
    nan: int
    fields: Mapping[str, float]
    """Everything in the line, by Megatron's names; for the last iteration unless it is one of the above."""

    def without(self, earlier: Interval) -> Interval:
        """The iterations of this interval that are not in ``earlier``, with which it begins."""
        advanced, before = self.iterations - self.skipped, earlier.iterations - earlier.skipped
        losses = {}
        for name, mean in self.losses.items():
            if advanced > before and (before == 0 or name in earlier.losses):
                known = earlier.losses[name] * before if before else 0.0
                losses[name] = (mean * advanced - known) / (advanced - before)
        return Interval(
            iteration=self.iteration,
            train_iters=self.train_iters,
            iterations=self.iterations - earlier.iterations,
            seconds=self.seconds - earlier.seconds,
            losses=losses,
            skipped=self.skipped - earlier.skipped,
            nan=self.nan - earlier.nan,
            fields=self.fields,
        )


class IntervalReader:
    """Reads the iteration lines of one process in order.

    Megatron prints a line after the first iteration without resetting its sums, so its second line covers that
    iteration again, with its loss, its time and its counts; the reader takes it out.
    """

    def __init__(self) -> None:
        self._first: Interval | None = None
        self._last_iteration: int | None = None

    def read(self, line: str) -> Interval | None:
        """The iterations since the previous line, or ``None`` for a line of another kind."""
        match = _ITERATION_LINE.match(line)
        if match is None:
            return None
        iteration, fields = int(match[1]), _fields(match[3])
        if self._last_iteration is None or iteration <= self._last_iteration:
            is_start, count = True, 1
        elif self._first is not None:
            is_start, count = False, iteration - self._first.iteration + 1
        else:
            is_start, count = False, iteration - self._last_iteration
        skipped = int(fields.get("number of skipped iterations", 0))
        # Losses stand between these two fields, under the names of our own loss function.
        names = list(fields)
        losses = names[_index(names, "global batch size") + 1 : _index(names, "loss scale")]
        interval = Interval(
            iteration=iteration,
            train_iters=int(match[2]),
            iterations=count,
            seconds=count * fields.get("elapsed time per iteration (ms)", math.nan) / 1000,
            losses={name: fields[name] for name in losses if skipped < count},  # else the zero of an empty sum
            skipped=skipped,
            nan=int(fields.get("number of nan iterations", 0)),
            fields=fields,
        )
        own = interval if is_start or self._first is None else interval.without(self._first)
        self._first = interval if is_start else None
        self._last_iteration = iteration
        return own


def train_record(interval: Interval, seq_length: int) -> dict[str, Any]:
    """The line of ``metrics.jsonl`` for an interval; losses are means over it, the other values its last."""
    fields = interval.fields
    batch_size = fields.get("global batch size", math.nan)
    seconds = interval.seconds / interval.iterations
    consumed = fields.get("consumed samples", math.nan)
    record = {
        "kind": "train",
        "iteration": interval.iteration,
        "lm_loss": math.nan,
        **{name.replace(" ", "_"): value for name, value in interval.losses.items()},
        "learning_rate": fields.get("learning rate", math.nan),
        "grad_norm": fields.get("grad norm", math.nan),
        "seconds_per_iteration": seconds,
        "tokens_per_second": batch_size * seq_length / seconds if seconds > 0 else math.nan,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * seq_length,
        "skipped_iterations": interval.skipped,
        "nan_iterations": interval.nan,
    }
    return {name: _finite(value) for name, value in record.items()}


def evaluation_record(line: str) -> dict[str, Any] | None:
    """The line of ``metrics.jsonl`` for one of Megatron's validation or test lines, ``None`` for another line.

    ``kind`` is ``validation`` or ``test``; ``set`` is there if validation sets have names or numbers.
    """
    match = _EVALUATION_LINE.match(line)
    if match is None:
        return None
    record: dict[str, Any] = {"kind": match["on"] or "validation", "iteration": int(match["iteration"])}
    if match["name"] is not None:
        record["set"] = match["name"]
    record["lm_loss"] = None
    for name, value in _fields(match["fields"]).items():
        if name.endswith(" value"):
            record[name.removesuffix(" value").replace(" ", "_")] = _finite(value)
    return record


def _fields(text: str) -> dict[str, float]:
    """``name: number |`` … → name → number, in order; what is not a number is left out."""
    fields: dict[str, float] = {}
    for part in text.split("|"):
        name, _, value = part.rpartition(":")
        try:
            fields[name.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            continue
    return fields


def _index(names: list[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity. Megatron prints seven digits; more would be noise of our arithmetic."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
