"""A clock that a test turns by hand, in place of the `time` module of what it tests."""

from __future__ import annotations

from types import ModuleType

import pytest


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return int(self.now * 1e9)

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """Unix seconds."""
        return self.now

    @classmethod
    def of(cls, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """The clock of a module from now on."""
        made = cls()
        monkeypatch.setattr(module, "time", made)
        return made
