"""The progress of a run on standard error: lines done, share, rate, time left, and errors of lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from penstock import terminal

TELL_EVERY_S = 10.0
"""Pause between two lines of progress where nobody looks."""
REDRAW_EVERY_S = 0.1
"""The same on a terminal."""


class Shown:
    """One line that moves on a terminal, else a line every few seconds.

    The share and the time left follow from the bytes of the input, whose number of lines nobody has counted.
    """

    def __init__(
        self, name: str, nbytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` of the input in messages; `nbytes` of the input, None where its end is unknown."""
        self.name, self._nbytes, self._clock = name, nbytes, clock
        self._moves, self._open = sys.stderr.isatty(), False
        self._began = self._told = clock()
        self._rows = self._done = 0.0
        self._first = (0.0, 0.0)

    def begin(self, rows: int, nbytes: int) -> None:
        """An earlier run has done so many rows and bytes of the input."""
        self._rows, self._done = self._first = float(rows), float(nbytes)
        self._began = self._told = self._clock()
        if rows:
            print(f"penstock: {rows:,} lines are done already", file=sys.stderr)

    def answered(self, rows: int, nbytes: float) -> None:
        """So many more rows, of so many bytes of the input, have an answer."""
        self._rows += rows
        self._done += nbytes
        now = self._clock()
        if now - self._told < (REDRAW_EVERY_S if self._moves else TELL_EVERY_S):
            return
        self._told = now
        self._tell(self.text(now))

    def text(self, now: float) -> str:
        """`4,096 lines, 37 %, 120 a second, 1 min 2 s left`."""
        elapsed_s = max(now - self._began, 1e-9)
        parts = [f"{self._rows:,.0f} lines"]
        if self._nbytes:
            parts.append(f"{min(self._done / self._nbytes, 1.0):.0%}".replace("%", " %"))
        rate = (self._rows - self._first[0]) / elapsed_s
        parts.append(f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.1f} a second")
        if self._nbytes and (done := self._done - self._first[1]) > 0:
            left_s = (self._nbytes - self._done) / done * elapsed_s
            parts.append(f"{terminal.span(max(left_s, 0.0))} left")
        return ", ".join(parts)

    def error(self, line: int, message: str) -> None:
        """A line has no vector."""
        if self._open:
            terminal.redraw("")
            self._open = False
        print(f"{self.name}, line {line}: {message}", file=sys.stderr)

    def end(self) -> None:
        """Leave the last figures on a terminal."""
        if self._open:
            self._tell(self.text(self._clock()), "\n")
            self._open = False

    def _tell(self, text: str, end: str = "") -> None:
        if self._moves:
            terminal.redraw(text, end)
            self._open = True
        else:
            print(text, file=sys.stderr)
