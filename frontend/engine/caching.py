"""Embeddings that are kept, and equal items that share a result: the engines in front of the engine.

An engine here stands before the engine cuts a request into pieces or chooses where the pieces run.

`Front` counts requests on the way by model and lane, and gives equal items of one request equal results. Rows of a
batch differ in their last bits by their place in the batch: equal items would lose their order in a ranking, and the
same text would have two vectors. So the first of equal items gives its result to the others.

`CachingEngine` is a front that keeps embeddings of single items. An item that comes again needs no worker.

1. A key is a cryptographic digest of all that decides an item's result: API key, model, call, options and content.
2. Kept items are left out of the work for the engine behind this one. A request whose items are all kept runs nothing.
3. An embedding is kept with the identity of the model that computed the embedding. A look-up takes only embeddings of
   the model that is loaded now, so changed files never lead to old embeddings.
4. A request with a LoRA adapter is not looked up: the adapter's files have no identity. Items with errors are not kept.

The cache (`BoundedCache`) holds a bounded number of bytes and gives the least recently used values up first. One thread
uses the cache, that of the event loop.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation, Pace, Past
from frontend.engine.interface import Engine, Models, Payload
from frontend.engine.planning import is_long, part_of
from frontend.http.threads import off_loop_if
from frontend.records.finishing import CacheMeter, Recorder
from frontend.scope import RequestScope
from ipc.errors import InferenceFailed, InvalidInput, ResourceExhausted
from ipc.settings import Settings
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import EncodeCall, InputItem, Timing, Work

PREFIX_CHARACTERS = 64
V = TypeVar("V")
ENTRY_NBYTES = 640
"""About what a key, its place in the order and the objects around a value take beside the value's own bytes."""
LARGEST_SHARE = 8
"""A value above this part of the bound is not kept, so that one value cannot push out all others."""
_RESOLVED = frozenset(
    {
        *("profile", "instruction", "is_query", "overflow_policy", "lora", "lora_id"),
        *("output_types", "output_dtype", "dimensions", "muvera", "late_chunking"),
    }
)
"""Options that a worker does not read. Other fields of a call hold their values, or the frontend shapes the answer."""
ITEM_ERRORS = (InvalidInput, InferenceFailed, ResourceExhausted)
"""Errors that name the place of an item. A request whose items all fail raises the error of one item."""
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_UNSAYABLE = (OverflowError, RecursionError, TypeError, ValueError)


def may_repeat(items: Sequence[InputItem]) -> bool:
    """Whether some items may be equal: False at once where all begin differently, however long they are."""
    # PERF: every request asks. Only the beginning of a long text is hashed.
    return len({None if item.text is None else item.text[:PREFIX_CHARACTERS] for item in items}) < len(items)


async def unify(answer: Answer, items: Sequence[InputItem], *, large: bool) -> None:
    """Give equal items equal results, in private copies that end the lease; in a thread for a `large` request."""
    try:
        firsts = await off_loop_if(large, firsts_of, items, {error.index for error in answer.errors})
        if firsts is not None:
            await off_loop_if(large, answer.repeat, firsts)
            answer.release()
    except BaseException:
        answer.release()
        raise


def firsts_of(items: Sequence[InputItem], failed: Collection[int]) -> list[int] | None:
    """For each item the place of the first equal item; None if all items differ.

    `failed` are the places of items without a result. Items with metadata count as different.
    """
    seen: dict[Hashable, int] = {}
    firsts = [
        at if at in failed or item.metadata else seen.setdefault(_key(item), at)
        for at, item in enumerate(items)
    ]
    return None if firsts == list(range(len(items))) else firsts


def _key(item: InputItem) -> Hashable:
    return item.first, item.text, tuple(item.ids or ()), tuple(item.images), tuple(item.spans)


class Front(Engine):
    """An engine in front of `engine`."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self.blocks, self.reads_regions = engine.blocks, engine.reads_regions

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`. Equal items of one request get equal results."""
        with self._recorder.in_flight(work.model, work.lane):
            answer = await self._engine.run(scope, work, payload)
        items = work.call.items
        if len(items) > 1 and may_repeat(items):
            await unify(answer, items, large=is_long(work))
        return answer

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        """Run planned work that is answered in parts; see `Engine.stream`."""
        with self._recorder.in_flight(work.model, work.lane):
            async with self._engine.stream(scope, work, payload) as parts:
                yield parts

    def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run planned work with a `GenerateCall`; see `Engine.generate`."""
        text = self._engine.generate(scope, work, pace, past)
        return _CountedText(self._recorder.in_flight(work.model, work.lane), text)

    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason."""
        return self._engine.ready()

    async def is_kept_alive(self) -> bool:
        """Whether a dead worker would be started again."""
        return await self._engine.is_kept_alive()


class _CountedText(AbstractAsyncContextManager[Generation]):
    """A text that is counted from its beginning to its end.

    PERF: each text has one, and a generator as a context costs three times as much.
    """

    def __init__(
        self, counted: AbstractContextManager[None], text: AbstractAsyncContextManager[Generation]
    ) -> None:
        self._counted, self._text = counted, text

    async def __aenter__(self) -> Generation:
        self._counted.__enter__()
        try:
            return await self._text.__aenter__()
        except BaseException as raised:
            self._counted.__exit__(type(raised), raised, raised.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            is_over = await self._text.__aexit__(kind, error, trace)
        except BaseException as raised:
            self._counted.__exit__(type(raised), raised, raised.__traceback__)
            raise
        self._counted.__exit__(kind, error, trace)
        return is_over


class _Entry(NamedTuple, Generic[V]):
    """A value, the bytes of the whole entry, and where they are counted."""

    value: V
    nbytes: int
    meter: CacheMeter


class BoundedCache(Generic[V]):
    """At most `limit_nbytes` of values together, as their owners count them."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._entries: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """The value, which is now the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: bytes, value: V, nbytes: int, meter: CacheMeter) -> None:
        """Keep a value of `nbytes` in place of an earlier one with that key, and give up others for room."""
        if key in self._entries:
            self._let_go(self._entries.pop(key))
        nbytes += ENTRY_NBYTES
        if nbytes > self._limit_nbytes // LARGEST_SHARE:
            return
        self._entries[key] = _Entry(value, nbytes, meter)
        self.nbytes += nbytes
        meter.nbytes.inc(nbytes)
        while self.nbytes > self._limit_nbytes:
            _, oldest = self._entries.popitem(last=False)
            self._let_go(oldest)
            oldest.meter.evictions.inc()

    def _let_go(self, entry: _Entry[V]) -> None:
        self.nbytes -= entry.nbytes
        entry.meter.nbytes.inc(-entry.nbytes)


class Row(NamedTuple):
    """The result of one item, in private memory.

    `arrays` are rows by output, [rows, ...]; `ragged` names the outputs with more or fewer rows than one. `identity`
    names the model that computed, `tokens` counts the item.
    """

    identity: str
    arrays: dict[str, np.ndarray]
    ragged: tuple[str, ...]
    tokens: int
    truncated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and about the bytes of their objects."""
        return sum([values.nbytes + 128 for values in self.arrays.values()])


def keys_of(owner: str, model: str, call: EncodeCall) -> list[bytes] | None:
    """A digest for each item; None for values that no message can hold, which the engine will refuse."""
    options = {name: value for name, value in call.options.items() if name not in _RESOLVED}
    plain = msgspec.structs.replace(
        call, items=[], outputs=sorted(call.outputs), options=options, names=IN_PARAMS
    )
    try:
        base = hashlib.blake2b(_encoder.encode((owner, model, plain)), digest_size=32)
        keys = []
        for item in call.items:
            digest = base.copy()
            digest.update(_encoder.encode(item))
            keys.append(digest.digest())
    except _UNSAYABLE:
        return None
    return keys


def rows_of(answer: Answer) -> list[Row | None]:
    """The result of each item, None for an item with an error. Raises `LeaseRevoked`."""
    failed, cut = {error.index for error in answer.errors}, set(answer.truncated)
    ragged = tuple(answer.ragged)
    return [
        None if at in failed else Row(answer.identity, arrays, ragged, answer.tokens[at], at in cut)
        for at, arrays in enumerate(answer.copies())
    ]


class Computed(NamedTuple):
    """The results of a request, none of them None, and the times and the device of the work that computed some."""

    rows: Sequence[Row | None]
    timing: Timing = Timing()
    uuid: str = ""


def joined(found: Computed) -> Answer:
    """The answer to a request with these results."""
    rows = [row for row in found.rows if row is not None]
    truncated = [at for at, row in enumerate(rows) if row.truncated]
    arrays = [row.arrays for row in rows]
    tokens = [row.tokens for row in rows]
    return Answer.joined(arrays, rows[0].ragged, tokens, truncated, found.timing, found.uuid)


class CachingEngine(Front):
    """Keeps embeddings in front of `engine`. Answers in parts and generated text are not kept."""

    def __init__(self, engine: Engine, models: Models, settings: Settings, recorder: Recorder) -> None:
        super().__init__(engine, recorder)
        self._models, self._settings = models, settings
        self.kept: BoundedCache[Row] = BoundedCache(settings.cache.embeddings_bytes)

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; see `Engine.run`. An encode call is run for the items that are not kept."""
        call = work.call
        if not isinstance(call, EncodeCall) or call.lora:
            return await super().run(scope, work, payload)
        large = is_long(work)
        owner = "" if self._settings.cache.shared else scope.grant.caller
        keys = await off_loop_if(large, keys_of, owner, work.model, call)
        if keys is None:
            return await super().run(scope, work, payload)
        meter, identity = self._recorder.cache(work.model), self._models.identity(work.model)
        rows = [_of(identity, row) for row in map(self.kept.get, keys)]
        missing = [at for at, row in enumerate(rows) if row is None]
        scope.cache_hits = len(rows) - len(missing)
        meter.hits.inc(scope.cache_hits)
        meter.misses.inc(len(missing))
        if scope.cache_hits:
            computed: Computed | None = Computed(rows)
            if missing:
                computed = await self._completed(scope, work, keys, rows, missing, meter)
            if computed is not None:
                return await off_loop_if(large, joined, computed)
            scope.cache_hits = 0
        return await self._computed(scope, work, keys, meter)

    async def _computed(
        self, scope: RequestScope, work: Work, keys: Sequence[bytes], meter: CacheMeter
    ) -> Answer:
        """The answer of the engine to all items, which are kept."""
        answer = await super().run(scope, work)
        try:
            self._keep(keys, await off_loop_if(work.lane == "bulk", rows_of, answer), meter)
        except BaseException:
            answer.release()
            raise
        return answer

    async def _completed(
        self,
        scope: RequestScope,
        work: Work,
        keys: Sequence[bytes],
        found: Sequence[Row | None],
        missing: Sequence[int],
        meter: CacheMeter,
    ) -> Computed | None:
        """All rows: the engine computes the missing rows. None if the whole request has to run.

        An item with an error needs the whole request, since a message names the place of its item. So does a model that
        was replaced meanwhile.
        """
        part = part_of(work, missing, self._settings)
        try:
            with await super().run(scope, part) as answer:
                if answer.errors:
                    return None
                fresh = await off_loop_if(part.lane == "bulk", rows_of, answer)
                timing, uuid = answer.timing, answer.uuid
        except ITEM_ERRORS:
            return None
        self._keep([keys[at] for at in missing], fresh, meter)
        rows = list(found)
        for at, row in zip(missing, fresh, strict=True):
            rows[at] = row
        identities = {row.identity for row in rows if row is not None}
        return Computed(rows, timing, uuid) if len(identities) == 1 else None

    def _keep(self, keys: Sequence[bytes], rows: Sequence[Row | None], meter: CacheMeter) -> None:
        for key, row in zip(keys, rows, strict=True):
            if row is not None and row.identity:
                self.kept.put(key, row, row.nbytes, meter)


def _of(identity: str, row: Row | None) -> Row | None:
    """`row`, or None if another model than `identity` computed the row."""
    return row if row is not None and identity and row.identity == identity else None
