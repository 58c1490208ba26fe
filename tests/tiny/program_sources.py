"""Sources of the tiny programs that are written in Python (`model.py`)."""

from __future__ import annotations

_HEAD = '''"""A tiny model for tests."""

import time
from pathlib import Path

import numpy as np

from penstock.model import DecoupledModel, Model, Pause


'''

STRINGS = (
    _HEAD
    + '''class AddSubStrings(Model):
    """Sum and difference of decimal numbers that are written as strings."""

    def infer(self, batch):
        first, second = (self._numbers(batch.array(name)) for name in ("INPUT0", "INPUT1"))
        return {"OUTPUT0": self._strings(first + second), "OUTPUT1": self._strings(first - second)}

    @staticmethod
    def _numbers(array):
        return np.array([int(element) for element in array.flat], np.int64).reshape(array.shape)

    @staticmethod
    def _strings(array):
        found = np.empty(array.shape, object)
        found.flat = [b"%d" % number for number in array.flat]
        return found
'''
)

IDENTITY = (
    _HEAD
    + '''class Identity(Model):
    """What came."""

    def infer(self, batch):
        return {"OUTPUT": batch.array("INPUT")}
'''
)

RANGE = (
    _HEAD
    + '''class Range(Model):
    """The numbers from 0 up to the input: the size of the output depends on a value."""

    def infer(self, batch):
        return {"OUTPUT": np.arange(int(batch.array("INPUT")[0]), dtype=np.int32)}
'''
)

ACCUMULATOR = (
    _HEAD
    + '''class Accumulator(Model):
    """The total of each sequence so far; its place in the batch is the sequence's slot."""

    def __init__(self, context):
        super().__init__(context)
        self.totals = np.zeros(max(1, context.config.max_batch_size), np.int32)

    def infer(self, batch):
        start, ready = batch.array("START").reshape(-1), batch.array("READY").reshape(-1)
        numbers = batch.array("INPUT").reshape(-1)
        for row in range(len(numbers)):
            if ready[row]:
                self.totals[row] = numbers[row] + (0 if start[row] else self.totals[row])
        return {"OUTPUT": self.totals[: len(numbers)].reshape(-1, 1).copy()}
'''
)

ACCUMULATOR_BY_ID = (
    _HEAD
    + '''class AccumulatorById(Model):
    """The total of each sequence so far, kept under its correlation id and forgotten at its end."""

    def __init__(self, context):
        super().__init__(context)
        self.totals = {}

    def infer(self, batch):
        names = ("INPUT", "START", "READY", "END", "CORRID")
        found = []
        for number, start, ready, end, name in zip(*(batch.array(n).reshape(-1) for n in names)):
            if not ready:
                found.append(0)
                continue
            key = int(name)
            self.totals[key] = int(number) + (0 if start else self.totals.get(key, 0))
            found.append(self.totals.pop(key) if end else self.totals[key])
        return {"OUTPUT": np.array(found, np.int32).reshape(-1, 1)}
'''
)

RAISING = (
    _HEAD
    + '''class Raising(Model):
    """The input, unless one of its values is negative."""

    def infer(self, batch):
        found = batch.array("INPUT")
        if (found < 0).any():
            raise RuntimeError("a secret of the model")
        return {"OUTPUT": found}
'''
)

SLOW = (
    _HEAD
    + '''class Slow(Model):
    """The input, after as many milliseconds as its largest value says.

    A request's `hold` is a file for whose end the program waits; a file with the ending `.begun` tells that it waits.
    """

    def infer(self, batch):
        found = batch.array("INPUT")
        for path in [Path(asked["hold"]) for asked in batch.parameters if "hold" in asked]:
            path.with_suffix(".begun").touch()
            while path.exists():
                time.sleep(0.01)
        time.sleep(float(found.max(initial=0)) / 1000)
        return {"OUTPUT": found}
'''
)

COUNTDOWN = (
    _HEAD
    + '''class Countdown(DecoupledModel):
    """As many responses as it is told, each with its number `width` times, after `sleep_ms` milliseconds
    of work or `pause_ms` of waiting.

    `record` is a file that gets a line for each response, and `closed` when nobody wants any more; `gate` one that has
    to be there before the response `gate_at` is made, while other requests run; `raise_at` the number of the response
    in whose place it raises.
    """

    def stream(self, batch):
        asked = batch.parameters[0]
        for number in range(int(batch.array("COUNT")[0])):
            time.sleep(asked.get("sleep_ms", 0) / 1000)
            if "pause_ms" in asked:
                yield Pause(asked["pause_ms"] / 1000)
            while number == asked.get("gate_at") and not Path(asked["gate"]).exists():
                yield Pause(0.01)
            if number == asked.get("raise_at"):
                raise RuntimeError("a secret of the model")
            self.note(asked, str(number))
            try:
                yield {"OUTPUT": np.full(int(asked.get("width", 1)), number, np.int32)}
            except GeneratorExit:
                self.note(asked, "closed")
                raise

    @staticmethod
    def note(asked, line):
        if "record" in asked:
            with open(asked["record"], "a") as file:
                file.write(line + "\\n")
'''
)
