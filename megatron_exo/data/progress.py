"""A progress line on standard error: how much, how fast, how long still."""

from __future__ import annotations

import sys
import time


class Progress:
    """Reports documents, megabytes of text, their rates and, where the total is known, the time left.

    On a terminal one line is rewritten every half second; elsewhere (a log) a line is added every ten seconds.

    Args:
        label: the first word of the line.
        total: the value of ``done`` at which the work is complete, in any unit; ``None`` if unknown.
        begun_at: the value of ``done`` at the start, where an earlier start has done a part.
    """

    def __init__(self, label: str, total: float | None = None, begun_at: float = 0.0) -> None:
        self.label = label
        self.total = total
        self.begun_at = begun_at
        self._terminal = sys.stderr.isatty()
        self._interval = 0.5 if self._terminal else 10.0
        self._start = self._last = time.monotonic()

    def update(self, documents: int, text_bytes: int, done: float = 0.0) -> None:
        """Print if the interval has passed; ``done`` is in the unit of ``total``."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._print(documents, text_bytes, done, end="" if self._terminal else "\n")

    def finish(self, documents: int, text_bytes: int) -> None:
        """Print the final counts and rates."""
        self._print(documents, text_bytes, done=None, end="\n")

    def _print(self, documents: int, text_bytes: int, done: float | None, end: str) -> None:
        seconds = max(time.monotonic() - self._start, 1e-3)
        megabytes = text_bytes / 1e6
        line = (
            f"{self.label}: {documents:,} documents, {megabytes:,.1f} MB, "
            f"{documents / seconds:,.0f} documents/s, {megabytes / seconds:.1f} MB/s"
        )
        if done is None:
            line += f", took {_clock(seconds)}"
        elif self.total and done > self.begun_at:
            left = max(self.total - done, 0.0) / (done - self.begun_at) * seconds
            line += f", {min(done / self.total, 1.0):.0%}, {_clock(left)} left"
        # The carriage return and the padding overwrite the previous, possibly longer, line of a terminal.
        print(f"\r{line:<110}" if self._terminal else line, end=end, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
