"""What a person sees of a training run, and what is kept of it.

Megatron prints and logs on every rank. :func:`install` puts a filter there: everything goes to a log file, the terminal
gets the plan, one short line per log interval, validation losses, checkpoints and errors, and the numbers in those
lines go to ``metrics.jsonl``. The filter reads Megatron's own lines, so it needs no hook in Megatron.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from megatron_exo.training_lines import Interval, IntervalReader, evaluation_record, train_record

METRICS_FILE = "metrics.jsonl"

_SHOWN_LINES = [
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"successfully saved checkpoint from iteration +(\d+) to (.+?)(?: \[ t .*)?$", "saved checkpoint {} to {}"),
        (  # of --finetune and --pretrained-checkpoint
            r"successfully loaded checkpoint from (.+?)(?: \[ t .*)? at iteration 0$",
            "loaded the weights of {0}, and nothing else: training begins with them",
        ),
        (
            r"successfully loaded checkpoint from (.+?)(?: \[ t .*)? at iteration ([1-9]\d*)$",
            "loaded checkpoint {1} from {0}",
        ),
        (r"will not load any checkpoints and will start from random$", "no checkpoint to load: random weights"),
        (r"^>> ('--exit-on-missing-checkpoint' set)", "{}: exiting"),
        (r"^\[(exiting program .+?)\.?\] datetime", "{}"),
        (r"^\[after (training is done)\] datetime", "{}"),
        (r"^(ERROR.*)", "{}"),
    )
]
"""Lines of Megatron that are shown beside its numbers, and how."""


class Console(io.TextIOBase):
    """Standard output of one rank; see :func:`install`."""

    def __init__(self, terminal: TextIO, log_dir: Path | None, rank: int, world_size: int, seq_length: int, full: bool):
        self._terminal = terminal
        self._log_dir = log_dir
        self._log_name = f"rank-{rank:0{len(str(world_size - 1))}d}.log"
        self._files: dict[str, IO[str]] = {}
        self._complained: set[str] = set()
        self._seq_length = seq_length
        self._full = full
        self._intervals = IntervalReader()
        self._lock = threading.RLock()
        self._partial = ""
        self._finished = False

    def write(self, text: str) -> int:
        with self._lock:
            if self._full or self._finished:
                self._terminal.write(text)
            if not self._finished:
                *lines, self._partial = (self._partial + text).split("\n")
                for line in lines:
                    self._take(line)
        return len(text)

    def say(self, text: str) -> None:
        """Show ``text`` and keep it in the log, whatever it is."""
        self.keep(text, shown=True)

    def keep(self, text: str, *, shown: bool) -> None:
        """Put ``text`` into the log, and on the terminal if it is to be shown."""
        with self._lock:
            self._append(self._log_name, text)
            if shown or self._full:
                print(text, file=self._terminal, flush=True)

    def finish(self) -> None:
        """Write out what is left and close the files; whoever still holds this stream writes to the terminal."""
        with self._lock:
            if self._partial:
                self._take(self._partial)
            self._partial, self._finished = "", True
            for name, file in self._files.items():
                try:
                    file.close()
                except OSError as error:
                    self._complain(name, error)
            self._files, self._log_dir = {}, None

    def flush(self) -> None:
        if not self._terminal.closed:
            self._terminal.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._terminal.encoding

    def _take(self, line: str) -> None:
        """Log one line of somebody else's, record its numbers, show it if a person needs it."""
        self._append(self._log_name, line)
        shown = None
        if (interval := self._intervals.read(line)) is not None:
            record = train_record(interval, self._seq_length)
            self._append(METRICS_FILE, json.dumps(record))
            shown = _train_text(record, interval)
        elif (evaluation := evaluation_record(line)) is not None:
            self._append(METRICS_FILE, json.dumps(evaluation))
            shown = _evaluation_text(evaluation)
        else:
            for pattern, text in _SHOWN_LINES:
                if match := pattern.search(line.rstrip()):
                    shown = text.format(*match.groups())
        if shown is not None and not self._full:
            print(shown, file=self._terminal, flush=True)

    def _append(self, name: str, line: str) -> None:
        if self._log_dir is None:
            return
        if name not in self._files:
            self._files[name] = _open_for_append(self._log_dir / name)
        try:
            self._files[name].write(line + "\n")
            self._complained.discard(name)
        except OSError as error:  # no reason to end a run; what is not written yet is tried again with the next line
            self._complain(name, error)

    def _complain(self, name: str, error: OSError) -> None:
        if name not in self._complained and self._log_dir is not None:
            self._complained.add(name)
            print(f"{self._log_dir / name} cannot be written: {error.strerror}", file=self._terminal, flush=True)


class _LoggingHandler(logging.Handler):
    """Python's logging and warnings, into the log of the console; errors are shown."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.keep(self.format(record), shown=record.levelno >= logging.ERROR)


@contextmanager
def install(
    log_dir: Path | None, *, rank: int, world_size: int, seq_length: int, full: bool = False
) -> Iterator[Console]:
    """Filter what this rank prints, logs and warns of inside the block; other use of standard error is left alone.

    Args:
        log_dir: where ``rank-N.log`` (everything, from every rank that prints) and ``metrics.jsonl`` (from the rank
            that Megatron lets print losses, the last) are appended to; ``None`` keeps nothing.
        rank: this process among ``world_size``.
        seq_length: tokens per sample.
        full: show everything; it is logged and recorded just the same.

    Raises:
        OSError: on the first line that is printed, if ``log_dir`` cannot be written.
    """
    terminal = sys.stdout
    console = Console(terminal, log_dir, rank, world_size, seq_length, full)
    root, handler = logging.getLogger(), _LoggingHandler(console)
    to_terminal = [
        other
        for other in root.handlers
        if isinstance(other, logging.StreamHandler) and other.stream in (sys.stdout, sys.stderr)
    ]
    sys.stdout = console
    for other in to_terminal:
        root.removeHandler(other)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield console
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        for other in to_terminal:
            root.addHandler(other)
        sys.stdout = terminal
        console.finish()


def say(text: str) -> None:
    """Print ``text`` for a person to read: the console always shows it."""
    if isinstance(sys.stdout, Console):
        sys.stdout.say(text)
    else:
        print(text, flush=True)


def _train_text(record: Mapping[str, Any], interval: Interval) -> str:
    total = str(interval.train_iters)
    parts = [f"iteration {interval.iteration:>{len(total)}}/{total}", f"loss {_number(record['lm_loss'], '.4f')}"]
    for name, label, form in (("learning_rate", "lr", ".2e"), ("grad_norm", "grad norm", ".3f")):
        if record[name] is not None:
            parts.append(f"{label} {record[name]:{form}}")
    if record["tokens_per_second"] is not None:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        left = round((interval.train_iters - interval.iteration) * record["seconds_per_iteration"])
        parts.append(f"ETA {left // 3600:02d}:{left // 60 % 60:02d}:{left % 60:02d}")
    parts += [f"{record[f'{what}_iterations']} {what}" for what in ("skipped", "nan") if record[f"{what}_iterations"]]
    return "  ".join(parts)


def _evaluation_text(record: Mapping[str, Any]) -> str:
    name = f" ({record['set']})" if "set" in record else ""
    loss = record["lm_loss"]
    perplexity = f", perplexity {math.exp(loss):.2f}" if loss is not None and loss < 20 else ""
    return f"{record['kind']}{name} at iteration {record['iteration']}: loss {_number(loss, '.4f')}{perplexity}"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else f"{value:{form}}"


def _open_for_append(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # a crash left half a line
    return path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
