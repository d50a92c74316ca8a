"""Loss curves out of ``metrics.jsonl``, as pictures and as one line of text."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_exo.console import METRICS_FILE
from megatron_exo.errors import UserError

AXES = ("tokens", "iterations")
_TOKEN_UNITS = ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)"))
_LARGEST_COUNT = 1 << 63
"""Of iterations and tokens; what is beyond is no count, and cannot be drawn."""
_IN_PICTURE = 4
"""So many runs have their legend in the picture."""
_BARS = "▁▂▃▄▅▆▇█"


class CurveError(UserError):
    """A run or an option that gives no curve: what, why, and what to do."""


@dataclass
class Run:
    """The records of one run, in order of iterations."""

    name: str
    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What was skipped while reading."""

    def add(self, record: dict[str, Any]) -> None:
        """Take the next record of the file.

        A run that was resumed from an earlier checkpoint goes back in iterations: what it had recorded from there on
        is no longer part of the curve.
        """
        iteration = record["iteration"]
        if record["kind"] == "train":
            while self.train and self.train[-1]["iteration"] >= iteration:
                self.train.pop()
            self.evaluations = [kept for kept in self.evaluations if kept["iteration"] < iteration]
            self.train.append(record)
        else:
            self.evaluations = [kept for kept in self.evaluations if _evaluation_key(kept) != _evaluation_key(record)]
            self.evaluations.append(record)
            self.evaluations.sort(key=lambda kept: kept["iteration"])

    def validation_sets(self) -> dict[str | None, list[dict[str, Any]]]:
        """Name of the validation set (``None`` if there is but one) → its records."""
        sets: dict[str | None, list[dict[str, Any]]] = {}
        for record in self.evaluations:
            if record["kind"] == "validation":
                sets.setdefault(record.get("set"), []).append(record)
        return sets

    def position(self, record: dict[str, Any], x: str) -> float:
        """Where a record stands on the axis ``x``.

        Evaluations record no tokens, so theirs are interpolated between training records, and beyond the last one
        extrapolated.

        Raises:
            CurveError: for tokens, if no training record has them.
        """
        iteration = record["iteration"]
        if x == "iterations":
            return iteration
        if record.get("consumed_tokens") is not None:
            return record["consumed_tokens"]
        known = [(0, 0)] + [
            (r["iteration"], r["consumed_tokens"]) for r in self.train if r["iteration"] and r.get("consumed_tokens")
        ]
        if len(known) == 1:
            raise CurveError(f"{self.name} has no record of its training tokens; use --x iterations")
        after = min(bisect.bisect_left(known, (iteration, 0)), len(known) - 1) or 1
        (left, tokens_left), (right, tokens_right) = known[after - 1], known[after]
        return tokens_left + (tokens_right - tokens_left) * (iteration - left) / (right - left)


def read_run(path: Path) -> Run:
    """Read a run folder, its ``logs`` folder, or a ``metrics.jsonl``.

    Lines that are not records (a crash may leave half a line) are skipped, with a notice.

    Raises:
        CurveError: if there is no such file or no record in it.
    """
    candidates = [path] if path.is_file() else [path / METRICS_FILE, path / "logs" / METRICS_FILE]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise CurveError(f"{path} has no {METRICS_FILE}; give a folder that a training run saved to")
    folder = file.parent.resolve()
    run = Run(folder.parent.name if folder.name == "logs" else folder.name)
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        record = _parse(line)
        if record is not None:
            run.add(record)
        elif line.strip():
            run.notices.append(f"{file}, line {number} is not a record (cut off by a crash?); skipped")
    if not run.train and not run.evaluations:
        raise CurveError(f"{file} has no records yet; wait for the first log interval of the run")
    return run


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as at most ``width`` bars, each the mean of its share of them; values that are NaN leave gaps."""
    count = min(width, len(values))
    if count == 0:
        return ""
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    finite = [[value for value in share if math.isfinite(value)] for share in shares]
    means = [math.fsum(share) / len(share) if share else None for share in finite]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * count
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if mean is None else _BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def summary(run: Run) -> str:
    """One line: the sparkline of the training loss, its first and last value, and the last validation losses."""
    losses = [_loss(record) for record in run.train]
    finite = [loss for loss in losses if math.isfinite(loss)]
    parts = [f"loss {finite[0]:.4f} → {finite[-1]:.4f} at iteration {run.train[-1]['iteration']}"] if finite else []
    for name, records in run.validation_sets().items():
        parts.append(f"validation{f' ({name})' if name else ''} {_loss(records[-1]):.4f}")
    return f"{sparkline(losses)}  {run.name}: {', '.join(parts) or 'no finite loss'}"


def draw(
    runs: Sequence[Run], output: Path, *, x: str = "tokens", references: Mapping[str, float] | None = None
) -> None:
    """Draw training loss (thin) and validation loss (with markers) of all runs into one picture.

    Runs whose names differ only by a number at their end, such as a seed, have one colour. The legend of many runs is
    beside the picture, and names their training curves only where there is no other.

    Args:
        output: the picture; its ending says the format. Its folder is made if need be.
        x: ``tokens`` or ``iterations``.
        references: name → loss, each drawn as a horizontal line.

    Raises:
        CurveError: for tokens, if a run recorded none; for an ending that is no format of a picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_beside = len(runs) > _IN_PICTURE
    figure = Figure(figsize=(11 if is_beside else 8, 5), layout="constrained")
    if output.suffix.lstrip(".") not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise CurveError(f"{output} does not end in a picture's format; use for example .png or .pdf")
    axes = figure.add_subplot()
    furthest = max(run.position(record, x) for run in runs for record in run.train + run.evaluations)
    unit, unit_name = next((unit for unit in _TOKEN_UNITS if x == "tokens" and furthest >= unit[0]), (1.0, ""))

    def plot(run: Run, records: list[dict[str, Any]], **style: Any) -> None:
        axes.plot([run.position(r, x) / unit for r in records], [_loss(r) for r in records], **style)

    families = list(dict.fromkeys(_family(run) for run in runs))
    for run in runs:
        color, sets = f"C{families.index(_family(run))}", run.validation_sets()
        label = "_" if is_beside and sets else f"{run.name}, training"  # which no legend shows
        plot(run, run.train, color=color, alpha=0.45 if sets else 1.0, linewidth=1.2, label=label)
        for (name, records), dashes in zip(sets.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False):
            label = f"{run.name}, validation{f' ({name})' if name else ''}: {_loss(records[-1]):.3f}"
            plot(run, records, color=color, linestyle=dashes, linewidth=1.6, marker="o", markersize=3.5, label=label)
    for name, value in (references or {}).items():
        axes.axhline(value, color="0.35", linestyle=(0, (4, 3)), linewidth=1)
        where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        text = f"{name} {value:.3f}"
        axes.annotate(text, (1, value), (-2, 3), ha="right", va="bottom", color="0.35", fontsize=9, **where)
    axes.set_xlabel(f"training {x}{unit_name}")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if is_beside:
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    else:
        axes.legend(frameon=False, fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def _family(run: Run) -> str:
    return re.sub(r"[-_]\d+$", "", run.name)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    numbers = (record.get("iteration"), record.get("consumed_tokens") or 0)
    is_record = (
        isinstance(record.get("kind"), str)
        and isinstance(record.get("set"), str | None)
        and all(type(number) is int and 0 <= number < _LARGEST_COUNT for number in numbers)
    )
    return record if is_record else None


def _loss(record: dict[str, Any]) -> float:
    """The language-model loss, NaN where there was none."""
    loss = record.get("lm_loss")
    if isinstance(loss, float) or (type(loss) is int and abs(loss) < _LARGEST_COUNT):
        return float(loss)
    return math.nan


def _evaluation_key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record.get("set"), record["iteration"]
