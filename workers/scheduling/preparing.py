"""Threads that make items ready for the device while it runs the batch before.

Tokenizing is Rust outside the interpreter lock. A large request is prepared in chunks, so that its first items run
while its last items are still text. A request whose result has a size that only prepared items tell waits for the last
item. A single text may be longer than any chunk: of several threads one leaves such texts to the others.

1. `PreparingLine` gives queries before bulk work, which gets a turn now and then however many queries come.
2. Jobs whose next text is long, or that need a grammar or pictures of a conversation, stand apart: they get every
   second turn of bulk work, and none on the thread that is kept for short jobs. When the turn of long jobs comes to
   that thread, the next other thread takes the turn.
3. `chunk_end` says how much of a request is prepared in one go: items, pictures, characters to tokenize.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ipc.errors import InputTooLong, InvalidInput
from ipc.settings import Settings
from ipc.wire.messages import Call, ExtractCall, GenerateCall, InputItem, ItemError, ScoreCall, TokenizeCall
from workers import foreign
from workers.adapters.base import Adapter, Excess, ItemFailure, ItemRefused, Prepared
from workers.device.stepping import Running, vital_thread
from workers.operations import operation_of
from workers.scheduling.context import Context
from workers.scheduling.job import Job, Piece
from workers.scheduling.job_table import JobTable
from workers.scheduling.outputs import write_results

log = logging.getLogger(__name__)

BULK_EVERY = 8
"""While queries and bulk work both wait, one turn in so many goes to bulk work."""
CHUNK_ITEMS = 32
CHUNK_IMAGES = 4
"""Pictures of a chunk. A large one takes seconds, and a cancelled request is prepared to the end of its chunk."""
CHUNK_CHARACTERS = 1 << 16
"""Characters of a chunk, which take some 50 ms. A longer text is one chunk, for a thread that takes long jobs."""
LONE_CHARACTERS = 4096


def place_of_endpoint(settings: Settings) -> int:
    """The place of the endpoint's thread in the flight record, behind those of the preparing threads."""
    return settings.worker.prepare_threads


class Preparer:
    """A small pool of preparing threads in front of the queue."""

    def __init__(self, context: Context, find_room: Callable[[Job], None]) -> None:
        """`find_room` gets, in a preparing thread, each job that is ready and has no output space yet."""
        self._queue, self._table, self._arena = context.queue, context.jobs, context.arena
        self._most_chunked = context.settings.limits.max_chunked_tokens
        self._find_room = find_room
        self._line, threads = PreparingLine(), context.settings.worker.prepare_threads
        self._lone_place = place_of_endpoint(context.settings)
        self._quick_place = 0 if threads > 1 else None
        self._threads = [vital_thread(f"prepare-{n}", partial(self._run, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Put a job at the end of its lane; a preparing thread takes the job from there."""
        self._line.put(job, is_long(job.work.call, job.prepared_items))

    def close(self) -> None:
        """Stop the threads at the end of their present chunks."""
        self._line.close()

    def _run(self, place: int) -> None:
        while (job := self._line.get(quick=place == self._quick_place)) is not None:
            if self._prepare(job, place):
                # The rest of a large job lines up again, so that it holds nobody up for longer than a chunk.
                self.put(job)
            # NOTE: an idle thread must not keep the last job's model in memory.
            del job

    def prepare_now(self, job: Job) -> None:
        """Prepare a small job in the calling thread."""
        while self._prepare(job, self._lone_place):
            pass

    def _prepare(self, job: Job, place: int) -> bool:
        """Prepare the next chunk; a failure ends the job. Returns whether there is more to do."""
        if not self._table.claim(job):
            return False
        self._arena.record_preparing(place, job.tag, job.id)
        try:
            more = self._chunk(job)
        except BaseException as raised:
            fail_unready(self._table, job, raised)
            more = False
        # NOTE: not in a `finally`: an error that escapes ends the process, and the record has to name the suspect then.
        self._arena.record_preparing(place, 0, 0)
        self._table.unclaim(job)
        return more

    def _chunk(self, job: Job) -> bool:
        began = time.monotonic_ns()
        start, total = job.prepared_items, len(job.prepared)
        stop = total if total - start == 1 else chunk_end(job.work.call, start)
        operation = operation_of(job.work.call)
        with Running(None, [Piece(job, index, job.prepared[index]) for index in range(start, stop)]):
            items = operation.prepare(job.adapter, job.work.call, start, stop, job.payload)
        if operation.on_device:
            items = _readable(job.adapter, items)
        failures = _store(job, start, items)
        if job.work.call.overflow == "chunk":
            self._bound(job, start, stop)
        job.prepared_items = stop
        ended = time.monotonic_ns()
        job.prepare_ns += ended - began
        if job.trace is not None:
            job.trace.prepared(began, ended)
        if stop == total and (cost := sum([item.cost for item in job.prepared])) != job.cost:
            self._table.correct(job, cost)
        if failures:
            self._table.complete(job, len(failures), failures)
        if not operation.on_device:
            self._answer(job, start, stop)
            return stop < total
        if job.output is not None:
            self._queue.put(job, start, stop)
        elif stop == total:
            self._find_room(job)
        return stop < total

    def _answer(self, job: Job, start: int, stop: int) -> None:
        """Items of a call that needs no device are done once they are prepared."""
        pieces = [Piece(job, index, job.prepared[index]) for index in range(start, stop)]
        operation = operation_of(job.work.call)
        write_results(pieces, operation.run(job.adapter, job.prepared[start:stop], job.work.call))
        self._table.complete(job, len(pieces), [])

    def _bound(self, job: Job, start: int, stop: int) -> None:
        """Raise `InputTooLong` for an item of more tokens than `limits.max_chunked_tokens`."""
        for index in range(start, stop):
            tokens = job.prepared[index].cost
            if tokens > self._most_chunked:
                limit = f"limits.max_chunked_tokens is {self._most_chunked}"
                raise InputTooLong(f"{_field(job, index)}: {tokens} tokens, {limit}", model=job.model)


def fail_unready(table: JobTable, job: Job, raised: BaseException) -> None:
    """End a job with the error that was raised while the job was prepared."""
    if isinstance(raised, ItemRefused):
        table.fail(job, _named(job, raised))
        return
    place = f"preparing failed for request {job.work.request_id}"
    text = "the input could not be prepared for this model"
    refuses = operation_of(job.work.call).refuses
    table.fail(job, foreign.answer_of(raised, place, text, may_refuse=refuses))


def _field(job: Job, index: int) -> str:
    """The item, or its text, in the words of the route."""
    names = job.work.call.names
    return (names.item if job.work.call.items[index].text is None else names.text).format(index)


def _readable(adapter: Adapter, items: Sequence[Prepared | ItemFailure]) -> Sequence[Prepared | ItemFailure]:
    """The items, with the failure of those that hold a token for which the model has no embedding."""
    vocabulary = adapter.known_ids
    if vocabulary is None or vocabulary.all_known:
        return items
    refusals = [
        vocabulary.refusal(adapter.ids_of(item.payload)) if isinstance(item, Prepared) else None
        for item in items
    ]
    return [
        item if refusal is None else ItemFailure("INVALID_INPUT", refusal)
        for item, refusal in zip(items, refusals, strict=True)
    ]


def _store(job: Job, start: int, items: Sequence[Prepared | ItemFailure]) -> list[ItemError]:
    """Put prepared items into their places; returns the errors of those that failed alone.

    Raises `InputTooLong` for an item that was cut although the caller asked for an error.
    """
    failures = []
    for index, item in enumerate(items, start):
        if isinstance(item, Prepared) and item.truncated and job.work.call.overflow == "error":
            raise _too_long(job, index, item.excess)
        if isinstance(item, Prepared):
            # NOTE: numbers of libraries, such as those of numpy, cannot be told to a frontend.
            item.cost, item.rows = operator.index(item.cost), operator.index(item.rows)
        else:
            place = job.work.call.names.item.format(index)
            failures.append(ItemError(index, str(item.code), f"{place}: {item.message}"))
            item = Prepared(None, 0, rows=0)
        job.prepared[index] = item
    return failures


def _named(job: Job, refusal: ItemRefused) -> InvalidInput:
    """The error of an item, or of the query beside the items, that cannot be used."""
    names = job.work.call.names
    place = next((index for index, item in enumerate(job.work.call.items) if item is refusal.item), None)
    return InvalidInput(f"{names.query if place is None else names.item.format(place)}: {refusal}")


def _too_long(job: Job, index: int, excess: Excess | None) -> InputTooLong:
    """The error of an item that may not be cut, or of the query before it."""
    field = _field(job, index)
    if excess is None:
        longest = job.adapter.max_sequence_length
        return InputTooLong(f"{field}: longer than the {longest} tokens of {job.model}", model=job.model)
    if excess.in_query:
        field = job.work.call.names.query.format(index)
    beside = f" {excess.beside}" if excess.beside else ""
    return InputTooLong(
        f"{field}: {excess.tokens} tokens{beside}, the limit of {job.model} is {excess.limit}",
        model=job.model,
    )


class PreparingLine:
    """A queue with three lanes for several threads."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Job]] = {"interactive": deque(), "bulk": deque(), "long": deque()}
        self._changed = threading.Condition()
        self._turns = 0
        self._long_next = False
        self._owed = False
        """Whether the turn of a long job came to a thread that takes none."""
        self._closed = False

    def put(self, job: Job, is_long: bool = False) -> None:
        """Add `job` at the end of its lane. `is_long`: the next chunk of the job takes long to prepare."""
        with self._changed:
            self._lanes["long" if is_long else job.work.lane].append(job)
            # NOTE: with one thread woken, the woken thread might be the thread that takes no long jobs.
            self._changed.notify_all() if is_long else self._changed.notify()

    def get(self, quick: bool = False) -> Job | None:
        """Wait for the next job; with `quick` for a job that is not long. None when the line is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting(quick))
            interactive, others = self._lanes["interactive"], self._others(quick)
            # NOTE: the turns of all threads count, and a job that this thread may not take waits all the same.
            bulk, long = self._lanes["bulk"], self._lanes["long"]
            self._turns = self._turns + 1 if interactive and (bulk or long) else 0
            if others and (not interactive or self._turns >= BULK_EVERY or (self._owed and others is long)):
                self._turns = 0
                self._owed = bool(interactive and long and self._long_next) and others is bulk
                self._long_next = others is bulk
                return others.popleft()
            return interactive.popleft() if interactive else None

    def close(self) -> None:
        """`get` gives out what is there and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _waiting(self, quick: bool) -> bool:
        return bool(self._lanes["interactive"] or self._others(quick))

    def _others(self, quick: bool) -> deque[Job]:
        """The lane beside the queries whose turn has come."""
        bulk, long = self._lanes["bulk"], self._lanes["long"]
        return long if long and not quick and (self._long_next or not bulk) else bulk


def chunk_end(call: Call, start: int) -> int:
    """Where the chunk of the items of `call` that begins at `start` ends; it has at least one item."""
    beside = _characters_beside(call)
    stop, images, characters = start, 0, 0
    for item in call.items[start : start + CHUNK_ITEMS]:
        images += bool(item.images)
        characters += _characters(item) + beside
        if stop > start and (images > CHUNK_IMAGES or characters > CHUNK_CHARACTERS):
            break
        stop += 1
    return stop


def is_long(call: Call, start: int) -> bool:
    """Whether the chunk of items from `start` may take long: its text exceeds a chunk, or `_takes_seconds`."""
    if isinstance(call, GenerateCall) and _takes_seconds(call):
        return True
    characters = _characters_beside(call) + _characters(call.items[start])
    if isinstance(call, ScoreCall):
        characters += _characters(call.query)
    return characters > CHUNK_CHARACTERS


def is_short(call: Call) -> bool:
    """Whether the whole request is prepared in well under a millisecond."""
    if any(item.images for item in call.items) or (isinstance(call, ScoreCall) and call.query.images):
        return False
    if isinstance(call, GenerateCall) and _takes_seconds(call):
        return False
    beside = _characters_beside(call)
    if isinstance(call, ScoreCall):
        beside += _characters(call.query)
    return sum(map(_characters, call.items)) + beside * len(call.items) <= LONE_CHARACTERS


def _takes_seconds(call: GenerateCall) -> bool:
    """Whether pictures have to be decoded, or a grammar may have to be compiled."""
    return bool(call.images) or call.grammar is not None or (call.tools is not None and call.tools.restricts)


def _characters_beside(call: Call) -> int:
    """Characters that families tokenize with every single item: instruction, labels, fields, templates in options.

    Of a call for generated text these are all characters of its prompt.
    """
    if isinstance(call, TokenizeCall):
        return 0 if call.prompt is None else _characters_beside(call.prompt)
    if isinstance(call, GenerateCall):
        texts = [call.text, call.messages, call.variables, call.tools and call.tools.functions]
        return _within(texts) + 4 * len(call.ids or ())
    count = len(call.instruction or "") + _within(call.options)
    if isinstance(call, ExtractCall):
        count += sum(map(len, call.labels)) + len(call.labels) + _within(call.output_schema)
    return count


def _characters(item: InputItem) -> int:
    return len(item.first or "") + len(item.text or "") + 4 * len(item.ids or ())


def _within(value: Any) -> int:
    """Characters of all texts in a value of options or of a schema, at any depth."""
    count, rest = 0, [value]
    while rest:
        held = rest.pop()
        if isinstance(held, str):
            count += len(held)
        elif isinstance(held, dict):
            rest += [*held, *held.values()]
        elif isinstance(held, list | tuple):
            rest += held
    return count
