"""The answer of an engine (`Answer`, `AnswerStream`), and output dtypes of its vectors (`quantize`).

An `Answer` has tensors, rows, errors of items, timing, and the right to read them:

    with await engine.run(scope, work) as answer:
        ... render copies of answer.tensors()
        resp.stream = body_of(answer.hand_over(), ...)      # only where the body goes on reading afterwards

Leaving the context checks that the worker has not revoked the memory, and ends the lease. A body writer takes over the
answer (`hand_over`), checks after each copy, and ends the lease itself.

`quantize` brings vectors to an output dtype, row by row on the CPU, exactly as the SIE contract says:

float32   as produced
float16   cast
int8      s = max|x|; round_half_even(x / s * 127), all steps in float32; a zero row stays zero
uint8     (x - min) / (max - min) * 255, rounded half to even; a constant row gives zero
binary    bit = x > 0, packed most significant bit first, padded with zeros to whole bytes
ubinary   the same bytes as binary, reported as binary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, Self

import msgspec
import numpy as np

from ipc.errors import InferenceFailed
from ipc.memory import tensors
from ipc.wire.messages import BatchTimes, ItemError, Result, TensorInfo, Timing, Trace

EMPTY = memoryview(b"")
OUTPUT_DTYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


class Lease(Protocol):
    """The right to read memory that another process may take back."""

    def check(self) -> None:
        """Raise `LeaseRevoked` when the memory was taken back."""

    def release(self) -> None:
        """End the right. Called once."""


class Answer:
    """The answer to a request, or one part of a streamed answer."""

    def __init__(
        self,
        result: Result,
        data: memoryview,
        loose: memoryview = EMPTY,
        *,
        lease: Lease | None = None,
        worker: str = "",
        uuid: str = "cpu",
    ) -> None:
        """`result.tensors` lie in `data`, `result.loose` in `loose`. Without a lease both are this process's own.

        `worker` names the worker that answered, `uuid` its device (`cpu` for none).
        """
        self._result, self._data, self._loose, self._lease = result, data, loose, lease
        self._is_own = lease is None
        self._copies: dict[str, np.ndarray] | None = None
        self._handed_over = False
        self.worker, self.uuid = worker, uuid

    @property
    def tokens(self) -> list[int]:
        """Tokens used per item, special tokens included."""
        return self._result.tokens

    @property
    def truncated(self) -> list[int]:
        """Indices of items that were cut to the model's length."""
        return self._result.truncated

    @property
    def errors(self) -> list[ItemError]:
        """Items that failed on their own."""
        return self._result.errors

    @property
    def timing(self) -> Timing:
        """Phases at the worker."""
        return self._result.timing

    @property
    def trace(self) -> Trace | None:
        """Instants of the worker's clock, for the engine alone. The scope of a traced request gets offsets."""
        return self._result.trace

    @property
    def identity(self) -> str:
        """Stands for all that decides the numbers of the model that computed; empty where nobody can tell."""
        return self._result.identity

    @property
    def infos(self) -> list[TensorInfo]:
        """The outputs of an infer call, in the order they were asked for."""
        return self._result.infos

    @property
    def leased(self) -> bool:
        """Whether the tensors lie in memory of a worker, under a lease."""
        return self._lease is not None

    def tensors(self) -> dict[str, np.ndarray]:
        """Read-only views by name; valid while the lease is held. Private copies after `repeat`."""
        if self._copies is not None:
            return self._copies
        views = {ref.name: tensors.view(self._data, ref) for ref in self._result.tensors}
        if self._result.loose:
            views |= {ref.name: tensors.view(self._loose, ref) for ref in self._result.loose}
        if self._is_own:
            # PERF: the engine of a cluster has asked for the views before the protocol asks again.
            self._copies = views
        return views

    def raw(self, name: str) -> memoryview:
        """Raw bytes of one output of an infer call, read-only; valid while the lease is held.

        Raises `KeyError` for one that was written to a region of the client.
        """
        for ref in self._result.tensors:
            if ref.name == name:
                return tensors.raw(self._data, ref)
        raise KeyError(name)

    def parts(self) -> tuple[Result, memoryview, memoryview]:
        """(result, bytes of its tensors, bytes of its loose tensors), for an engine that sends an answer on.

        The bytes are valid while the lease is held: `check` after a copy.
        """
        return self._result, self._data, self._loose

    def rows(self, name: str) -> list[int]:
        """Rows of each item in a tensor that has more or fewer than one row per item."""
        return self._result.rows[name]

    def spans(self, name: str) -> list[slice]:
        """Where the rows of each item lie in a tensor that has more or fewer than one row per item."""
        return [slice(*span) for span in pairwise(accumulate(self.rows(name), initial=0))]

    def repeat(self, firsts: Sequence[int]) -> None:
        """Give each item the rows of item `firsts[index]`, in private copies. The caller ends the lease then.

        Any thread may call this. Raises `LeaseRevoked` if the worker has taken the memory back.
        """
        copies = {}
        for name, values in self.tensors().items():
            counts = self._result.rows.get(name)
            if counts is None:
                copies[name] = values[list(firsts)]
            else:
                starts = [0, *accumulate(counts)]
                copies[name] = np.concatenate([values[starts[at] : starts[at] + counts[at]] for at in firsts])
        self.check()
        self._copies = copies
        rows = {name: [counts[at] for at in firsts] for name, counts in self._result.rows.items()}
        self._result = msgspec.structs.replace(self._result, rows=rows)

    @property
    def ragged(self) -> dict[str, list[int]]:
        """`rows` by name of the tensor."""
        return self._result.rows

    def copies(self) -> list[dict[str, np.ndarray]]:
        """For each item private copies of its rows, [rows, ...] by name. Any thread may call this.

        Raises `LeaseRevoked` if the worker has taken the memory back.
        """
        by_item: list[dict[str, np.ndarray]] = [{} for _ in self.tokens]
        for name, values in self.tensors().items():
            starts = [0, *accumulate(self.ragged.get(name) or [1] * len(by_item))]
            for own, (start, stop) in zip(by_item, pairwise(starts), strict=True):
                own[name] = values[start:stop].copy()
        self.check()
        return by_item

    @classmethod
    def joined(
        cls,
        items: Sequence[dict[str, np.ndarray]],
        ragged: Collection[str],
        tokens: list[int],
        truncated: list[int],
        timing: Timing,
        uuid: str,
    ) -> Self:
        """An answer in private memory: rows of each item as `copies` gives them, one row each but in `ragged`.

        `timing` and `uuid` are those of the work that computed some of the items, or empty.
        """
        rows = {name: [len(own[name]) for own in items] for name in ragged}
        copies = {name: np.concatenate([own[name] for own in items]) for name in items[0]}
        return cls.of(Result(0, None, [], tokens, truncated, [], timing, rows=rows), copies, uuid=uuid)

    @classmethod
    def of(
        cls, result: Result, copies: dict[str, np.ndarray], *, worker: str = "", uuid: str = "cpu"
    ) -> Self:
        """An answer whose tensors are the arrays of this process in `copies`, by name; `result` names none."""
        answer = cls(result, EMPTY, worker=worker, uuid=uuid)
        answer._copies = copies
        return answer

    def check(self) -> None:
        """Raise `LeaseRevoked` when the memory was taken back. Call after every copy."""
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """End the lease; safe to call twice."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def close(self) -> None:
        """Check that the memory was not taken back, and end the lease; safe to call twice. Raises `LeaseRevoked`."""
        try:
            self.check()
        finally:
            self.release()

    def forget(self) -> None:
        """End the lease, and hold no bytes any more: whoever still has the answer may not read them."""
        self.release()
        self._data = self._loose = EMPTY
        self._copies = None

    def hand_over(self) -> Self:
        """The answer outlives its context: the writer of the body checks and releases from now on."""
        self._handed_over = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._handed_over:
            return
        if kind is None:
            self.close()
        else:
            self.release()


def shifted(trace: Trace, by_ns: int) -> Trace:
    """The trace with all times later by so much; a phase that did not happen stays 0."""

    def later(at_ns: int) -> int:
        return at_ns and at_ns + by_ns

    def of_batch(batch: BatchTimes) -> BatchTimes:
        return msgspec.structs.replace(
            batch,
            began_ns=later(batch.began_ns),
            computed_ns=later(batch.computed_ns),
            copied_ns=later(batch.copied_ns),
        )

    times = (later(trace.prepare_began_ns), later(trace.prepare_ended_ns), later(trace.queued_ns))
    return Trace(*times, [of_batch(batch) for batch in trace.batches])


class AnswerStream(ABC):
    """An answer in parts: an async iterator of one reader, and a context manager whose exit ends unfinished work.

    A part is valid until the next one is asked for. The iteration ends without a word, or with one error.
    """

    result: Answer | None = None
    """The end of the answer (its timing, without tensors), once the iteration has ended without an error."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Answer:
        """The next part. The part before is given back. Raises the error of the request, once."""

    @abstractmethod
    def when_answered(self, then: Callable[[], object]) -> None:
        """Call `then` once the worker has done its work or was lost; not when the stream is closed before."""

    @abstractmethod
    def close(self) -> None:
        """End the work unless the work has ended, and give back all received parts. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CopyBudget:
    """Bytes that this frontend may hold as private copies for slow readers."""

    def __init__(self, nbytes: int) -> None:
        self.free_nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` if they are free."""
        if nbytes > self.free_nbytes:
            return False
        self.free_nbytes -= nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        self.free_nbytes += nbytes


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in their output dtype; `scale` and `offset` have one float32 per row where the dtype has them."""

    values: np.ndarray
    dtype: str
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None


def quantize(rows: np.ndarray, dtype: str) -> Quantized:
    """float32 [n, d] rows to `dtype` (one of `OUTPUT_DTYPES`); binary gives uint8 [n, ceil(d / 8)]."""
    if dtype == "float32":
        return Quantized(rows, "float32")
    if dtype == "float16":
        return Quantized(to_half(rows), "float16")
    if dtype == "int8":
        return _int8(rows)
    if dtype == "uint8":
        return _uint8(rows)
    return Quantized(np.packbits(rows > 0, axis=-1), "binary")


def to_half(values: np.ndarray) -> np.ndarray:
    """float16 of float32 values. Raises `InferenceFailed` for a value beyond the range of float16."""
    with np.errstate(over="ignore"):
        halved = values.astype(np.float16)
    if not np.isfinite(halved).all():
        raise InferenceFailed("a value of the model is beyond the range of output_dtype float16")
    return halved


def _int8(rows: np.ndarray) -> Quantized:
    scale = np.abs(rows).max(axis=-1, initial=0, keepdims=True).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)
    values = np.rint(rows / divisor * np.float32(127)).astype(np.int8)
    return Quantized(values, "int8", scale[..., 0])


def _uint8(rows: np.ndarray) -> Quantized:
    low = rows.min(axis=-1, keepdims=True)
    span = (rows.max(axis=-1, keepdims=True) - low).astype(np.float32)
    divisor = np.where(span == 0, np.float32(1), span)
    values = np.rint((rows - low) / divisor * np.float32(255)).astype(np.uint8)
    return Quantized(values, "uint8", span[..., 0], low[..., 0])


def shorten(rows: np.ndarray, dimensions: int) -> np.ndarray:
    """The first `dimensions` values of each row; rows of unit length are scaled to unit length again (Matryoshka)."""
    if dimensions == rows.shape[-1]:
        return rows
    unit = np.abs(np.linalg.norm(rows, axis=-1, keepdims=True) - 1) < 1e-3
    cut = rows[..., :dimensions]
    norm = np.linalg.norm(cut, axis=-1, keepdims=True)
    return np.where(unit & (norm > 0), cut / np.where(norm == 0, 1, norm), cut).astype(np.float32)
