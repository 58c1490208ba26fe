"""Whether requests of a program may be joined along their rows: tried at load, with rows that differ in every input.

1. Requests of one row are drawn, or of two for a program that does not take one: numbers near 1, thousandths, and
   thousands and NaN as company; integers from the small end, in several ranges; texts. All have one shape. A dimension
   of any size has the size of the warm-up, else the first of `SIZES` that the program takes.
2. Each request runs alone, the first twice. Then all run joined, in both orders, and the first beside copies of
   itself: a difference beside copies is rounding, up to a bound.
3. Rows whose results differ between a joined run and a run alone show that requests must not be joined. A program that
   gives other results for the same input, or the same results for all inputs, proves nothing.

Every run is a piece of its own on the device thread, so that other models are served in between.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.memory.datatypes import BYTES, DATATYPES
from workers import foreign
from workers.adapters.shared.program import SEED, ProgramAdapter, Sample
from workers.device import oom
from workers.foreign import line_of
from workers.lifecycle.proof import Run, outputs_of

Arrays = Mapping[str, np.ndarray]

SIZES = (8, 32, 1, 2, 512)
"""Sizes to try for a dimension of any size, in this order; the first with which a row runs is taken."""
MOST_BELOW = (2, 8, 128)
"""Bounds of the integers, one trial each. Values above the first need not suit the program."""
FEW = 4
"""Inputs of up to so many elements a row may be sizes or counts, which stay small."""
SLOW_S, LONG_S = 0.5, 10.0
"""A program whose row takes longer than `SLOW_S` is tried with two rows. No trial begins after `LONG_S`."""
_COMPANY = (4, 5)
"""Rows whose own results are not compared: thousands, in which rounding may grow without bound, and NaN."""
_BATCHES = ((0, 1, 2, 3, 4), (5, 3, 2, 1, 0))
_PAIRS = ((0, 4), (5, 1), (1, 0))
"""Rows of each joined run; pairs for a slow program, or for one that takes few rows."""
_SCALES = (1.0, 1.0, 1e-3, 1.0, 1e3, 1.0)
_HALF_SCALES = (1.0, 1.0, 0.05, 1.0, 30.0, 1.0)
_TEXTS = (("tide", "a mill", "", "Wasserräder, 7"), ("7", "12", "0", "300"))
"""Texts of the rows, and numbers as texts for a program that reads numbers."""
_ROUNDING = {"FP64": 1e-7, "FP32": 1e-4, "FP16": 1e-2, "BF16": 5e-2}
"""Difference, as a part of the largest value of a row, that is rounding in any case."""
_NOISE, _MOST_NOISE = 8.0, 0.02
"""`_NOISE` times the difference beside copies is rounding too, up to `_MOST_NOISE` of the largest value."""
_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a trial: rows are `independent`, `dependent` on their company, or `unknown`; `words` explain."""

    kind: Literal["independent", "dependent", "unknown"]
    words: str


class _Unlike(Exception):
    """A joined run showed that rows depend on their company."""


class _Undecided(Exception):
    """A trial cannot prove anything."""


def try_rows(adapter: ProgramAdapter, run: Run) -> Finding:
    """Run the trials; `run` executes a function on the device thread. Raises errors of lack of memory."""
    try:
        return Finding("independent", _Trials(adapter, run).all())
    except _Unlike as error:
        return Finding("dependent", str(error))
    except _Undecided as error:
        return Finding("unknown", str(error))


class _Trials:
    """All trials of one program."""

    def __init__(self, adapter: ProgramAdapter, run: Run) -> None:
        self._adapter, self._run, self._until = adapter, run, time.monotonic() + LONG_S
        self._config = adapter.config

    def all(self) -> str:
        """The inputs with which rows were shown to be independent. Raises `_Unlike` and `_Undecided`."""
        drawing, is_slow = self._fitting()
        most = self._config.max_batch_size // drawing.rows
        if most < 2:
            raise _Undecided(
                f"two requests are more than max_batch_size {self._config.max_batch_size}, {drawing}"
            )
        batches = _PAIRS if is_slow or most < len(_BATCHES[0]) else _BATCHES
        varied = False
        for number, bound in enumerate(MOST_BELOW if drawing.has_integers else MOST_BELOW[:1]):
            if number and time.monotonic() > self._until:
                break
            try:
                varied = self._compare(drawing, bound, batches) or varied
            except _Undecided:
                if not number:
                    raise
                # The program does not take integers of this size.
                break
        if not varied:
            raise _Undecided(f"the program gave the same for all inputs that were tried, {drawing}")
        return str(drawing)

    def _fitting(self) -> tuple[_Drawing, bool]:
        """Inputs that the program takes, and whether a run takes long."""
        first: _Undecided | None = None
        for drawing in _drawings(self._adapter):
            began = time.monotonic()
            try:
                outputs = self._outputs([drawing.row(0, MOST_BELOW[0])])
            except _Undecided as error:
                first = first or error
                if time.monotonic() > self._until:
                    break
                continue
            took_s = time.monotonic() - began
            again = self._outputs([drawing.row(0, MOST_BELOW[0])])
            if wrong := self._different(outputs, again, {}):
                raise _Undecided(f"the same input gives another {wrong} each time, {drawing}")
            return drawing, took_s > SLOW_S
        raise first or _Undecided("there is no input to try")

    def _compare(self, drawing: _Drawing, bound: int, batches: Sequence[Sequence[int]]) -> bool:
        """Run rows alone and joined; returns whether results tell the rows apart. Raises `_Unlike` and `_Undecided`."""
        numbers = sorted({at for batch in batches for at in batch})
        rows = {at: drawing.row(at, bound) for at in numbers}
        alone = {at: self._outputs([rows[at]]) for at in numbers if at not in _COMPANY}
        company = {at for at in numbers if at in _COMPANY and drawing.has_floats and self._runs(rows[at])}
        copies = self._joined([rows[0]] * len(batches[0]), drawing)
        noise = _noise(alone[0], _part(copies, len(batches[0]) - 1, drawing.rows))
        for batch in batches:
            order = [at for at in batch if at in alone or at in company]
            joined = self._joined([rows[at] for at in order], drawing)
            for place, at in enumerate(order):
                part = _part(joined, place, drawing.rows)
                if at in alone and (wrong := self._different(alone[at], part, noise)):
                    raise _Unlike(f"{wrong} of a row changes in the company of other rows, {drawing}")
        return _varies(list(alone.values()))

    def _runs(self, row: Sample) -> bool:
        """Whether the program takes a row of company."""
        try:
            return bool(self._outputs([row]))
        except _Undecided:
            return False

    def _joined(self, rows: Sequence[Sample], drawing: _Drawing) -> Arrays:
        try:
            return self._outputs(rows)
        except _Undecided as error:
            raise _Unlike(f"rows run alone and not together: {error}, {drawing}") from error

    def _outputs(self, rows: Sequence[Sample]) -> Arrays:
        """The outputs of a batch with a request for each sample. Raises `_Undecided` with the error of the program."""
        try:
            outputs: Arrays = self._run(lambda: foreign.ask(outputs_of, self._adapter, rows))
        except Exception as error:
            if oom.is_out_of_memory(error) or oom.context_is_broken(error):
                raise
            raise _Undecided(f"{type(error).__name__}: {line_of(error)}") from error
        return outputs

    def _different(self, right: Arrays, other: Arrays, noise: Mapping[str, float]) -> str:
        """The first output that differs by more than rounding, in words; "" if there is none."""
        for output in self._config.outputs:
            a, b = right[output.name], other[output.name]
            if not _alike(output.datatype, a, b, noise.get(output.name, 0.0)):
                return f"output {output.name[:64]!a}"
        return ""


def _alike(datatype: str, right: np.ndarray, other: np.ndarray, noise: float) -> bool:
    """Whether two results are equal, floats up to rounding: NaN equals NaN, and an infinity itself."""
    if right.shape != other.shape:
        return False
    if datatype not in _ROUNDING:
        return bool(np.array_equal(right, other))
    a, b = _floats(datatype, right), _floats(datatype, other)
    finite = np.isfinite(a)
    if not np.array_equal(np.isfinite(b), finite) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return False
    if not finite.any():
        return True
    largest = np.abs(a[finite]).max()
    bound = max(_ROUNDING[datatype] * largest, min(_NOISE * noise, _MOST_NOISE) * largest) + _TINY
    return bool(np.abs(a[finite] - b[finite]).max() <= bound)


def _noise(alone: Arrays, beside_copies: Arrays) -> dict[str, float]:
    """By how much each output of a row changes beside copies of the row, as a part of its largest value."""
    noise = {}
    for name, right in alone.items():
        other = beside_copies[name]
        if right.dtype.kind == "f" and right.shape == other.shape:
            a, b = (each.astype(np.float64) for each in (right, other))
            change = np.abs(np.nan_to_num(a - b, posinf=0, neginf=0)).max(initial=0.0)
            largest = np.abs(np.nan_to_num(a, posinf=0, neginf=0)).max(initial=0.0)
            noise[name] = float(change / largest) if largest else 0.0
    return noise


def _floats(datatype: str, array: np.ndarray) -> np.ndarray:
    if datatype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def _varies(alone: Sequence[Arrays]) -> bool:
    """Whether at least one output tells the rows apart."""
    first = alone[0]
    return any(
        first[name].shape != other[name].shape or not _same(first[name], other[name])
        for other in alone[1:]
        for name in first
    )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def _part(joined: Arrays, place: int, rows: int) -> Arrays:
    """The outputs of the request at a place, each of so many rows."""
    return {name: array[place * rows : (place + 1) * rows] for name, array in joined.items()}


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Inputs with their shapes without rows, which texts are drawn, and the rows of each request."""

    inputs: tuple[TensorConfig, ...]
    shapes: Mapping[str, tuple[int, ...]]
    texts: Sequence[str]
    rows: int = 1

    def __str__(self) -> str:
        shown = [f"{name[:64]!a} {list(shape)}" for name, shape in itertools.islice(self.shapes.items(), 8)]
        return f"tried with {self.rows} row{'s' * (self.rows > 1)} a request of " + ", ".join(shown)

    @property
    def has_integers(self) -> bool:
        """Whether an input holds integers."""
        return any(each.datatype.strip("U").startswith("INT") for each in self.inputs)

    @property
    def has_floats(self) -> bool:
        """Whether an input holds floats."""
        return any(each.datatype in _ROUNDING for each in self.inputs)

    def row(self, at: int, bound: int) -> Sample:
        """Request `at` with integers below `bound`: always the same for the same arguments."""
        source = np.random.default_rng((SEED, at, bound))
        return {each.name: self._values(each, source, at, bound) for each in self.inputs}

    def _values(self, tensor: TensorConfig, source: np.random.Generator, at: int, bound: int) -> np.ndarray:
        shape, array = (self.rows, *self.shapes[tensor.name]), DATATYPES[tensor.datatype].array
        if tensor.datatype == BYTES:
            texts = np.empty(shape, object)
            picks = source.integers(0, len(self.texts), texts.size)
            texts.reshape(-1)[:] = [self.texts[(at + pick) % len(self.texts)].encode() for pick in picks]
            return texts
        if tensor.datatype == "BOOL":
            return source.integers(0, 2, shape).astype(bool)
        if tensor.datatype not in _ROUNDING:
            most = bound if np.prod(shape[1:]) > FEW else min(bound, MOST_BELOW[1])
            # NOTE: rows of one value only, as scales of a whole tensor follow the variety of a row.
            low, high = {1: (most - 1, most), 2: (0, max(2, most // 2)), 3: (0, 1)}.get(at, (0, most))
            return source.integers(low, high, shape).astype(array)
        scale = (_HALF_SCALES if tensor.datatype == "FP16" else _SCALES)[at]
        floats = (source.random(shape) if at == 0 else source.standard_normal(shape)) * scale
        if at == _COMPANY[1]:
            floats[...] = np.nan
        if tensor.datatype == "BF16":
            return (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return floats.astype(array)


def _drawings(adapter: ProgramAdapter) -> Iterator[_Drawing]:
    """Inputs to try, those of a warm-up first, until the program takes one."""
    config = adapter.config
    required = tuple(each for each in config.inputs if not each.optional)
    chosen = [config.inputs] + [required] * (required != config.inputs and bool(required))
    texts = _TEXTS if any(each.datatype == BYTES for each in config.inputs) else _TEXTS[:1]
    for rows, inputs, words, shapes in itertools.product((1, 2), chosen, texts, _shapes(adapter, config)):
        yield _Drawing(inputs, {each.name: shapes[each.name] for each in inputs}, words, rows)


def _shapes(adapter: ProgramAdapter, config: ModelConfig) -> list[dict[str, tuple[int, ...]]]:
    shapes = []
    if config.warmups:
        warm = {name: array.shape[1:] for name, array in adapter.samples()[0].items()}
        if len(warm) == len(config.inputs):
            shapes.append(warm)
    free = any(dim < 0 for each in config.inputs for dim in each.dims)
    for size in SIZES if free else SIZES[:1]:
        shapes.append(
            {each.name: tuple(size if dim < 0 else dim for dim in each.dims) for each in config.inputs}
        )
    return shapes
