"""Items of other producers than our gateways, run from their SIE fields and answered in SIE's form.

1. Whoever published such an item waits on the reply subject of the item, and speaks none of our words: no claim, no
   sign of life, no cancelling. The queue gives the item to another box if this one dies.
2. The item passes through the checks of the HTTP route of its operation. Its result, or its error, is published once,
   then the delivery is acknowledged. Meanwhile the queue is told that the item needs more time.
3. Another delivery of an item that runs is acknowledged with the first one. Producers make the ids of items, so an
   item is told by its id and its reply subject together.
4. Inputs that a producer put into a store of payloads are read from the directory `cluster.payload_store`. The producer
   removes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from frontend.access.gate import Gate
from frontend.bridge.intake import ACK, NAK, POISON, WORKING, Dead, Send
from frontend.bridge.meter import Meter
from frontend.engine.interface import Engine, Models
from frontend.http.threads import off_loop
from frontend.protocols.sie.encode import EncodeResource
from frontend.protocols.sie.errors import contract_code
from frontend.protocols.sie.extract import ExtractResource
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.score import ScoreResource
from frontend.scope import RequestScope, scope_of_ids
from frontend.services import Services
from ipc import deadline
from ipc.errors import InvalidInput, ModelNotFound, ModelNotLoaded, PenstockError, ResourceExhausted
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster import Item, ItemResult, encode
from ipc.wire.cluster_names import INBOX
from ipc.wire.foreign_items import LOAD, Foreign, body_of, named_payload, part_of, read_foreign, with_payload

log = logging.getLogger(__name__)

SLACK_NBYTES = 2048
"""Room for the fields of a result beside its bytes."""
MOST_REPLY = 512
"""Characters of a reply subject. A broker ends the connection of whoever sends it a longer command than it takes."""


@dataclass(slots=True, eq=False)
class _Running:
    task: asyncio.Task[None]
    acks: list[str] = field(default_factory=list)


def may_hear(subject: str) -> bool:
    """Whether a result may be published on a subject: an inbox, without wildcards."""
    is_subject = subject.isprintable() and len(subject) <= MOST_REPLY and not set(subject) & set("*> ")
    return is_subject and subject.startswith(f"{INBOX}.")


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def payload_in(store: str, name: str, most_nbytes: int) -> bytes:
    """The bytes of a file of a store of payloads; no link is followed. Raises `InvalidInput`."""
    try:
        with open(f"{store}/{name}", "rb", opener=_opened) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            # The file may grow while it is read.
            data = file.read(most_nbytes + 1) if is_file else b""
    except OSError as error:
        raise InvalidInput(f"payload_ref: {name[:64]!a} cannot be read from the store of payloads") from error
    if not is_file:
        raise InvalidInput(f"payload_ref: {name[:64]!a} is no file of the store of payloads")
    if len(data) > most_nbytes:
        raise InvalidInput(f"payload_ref: {name[:64]!a} has over {most_nbytes} bytes (limits.max_body_bytes)")
    return data


def _key(item: Item) -> tuple[str, str]:
    return item.reply_subject, item.work_item_id


class ForeignItems:
    """The items of other producers that one life of a bridge has."""

    def __init__(self, settings: Settings, engine: Engine, models: Models, send: Send, meter: Meter) -> None:
        self._settings, self._models, self._send, self._meter = settings, models, send, meter
        self._seldom = Seldom(log)
        services = Services(settings, models.catalog, Gate(), engine=engine, directory=models)
        self._resources: dict[str, InferenceResource[Any, Any]] = {
            resource.operation: resource(services)
            for resource in (EncodeResource, ScoreResource, ExtractResource)
        }
        self._running: dict[tuple[str, str], _Running] = {}
        self.on_dead: Dead = lambda reason, data, item, error: None
        self.draining = False

    def __len__(self) -> int:
        return len(self._running)

    def take(self, item: Item, data: bytes, ack: str, aged_s: float, most_nbytes: int) -> None:
        """An item has arrived, as `data`; its result may have `most_nbytes`. See `Intake.take` for the others."""
        known = self._running.get(_key(item))
        if known is not None:
            known.acks += [ack] if ack else []
        elif self.draining and ack:
            self._settle([ack], NAK)
        elif not may_hear(item.reply_subject):
            self._seldom.warning("an item of another producer was dropped", "it names no inbox to answer to")
            self._settle([ack], ACK)
        else:
            task = asyncio.get_running_loop().create_task(self._run(item, data, aged_s, most_nbytes))
            self._running[_key(item)] = _Running(task, [ack] if ack else [])
            self._meter.inflight.inc()

    def extend(self) -> None:
        """Tell the queue that all that runs needs more time; call each `extend_every_s`."""
        for running in self._running.values():
            self._settle(running.acks, WORKING)

    async def ended(self, running_s: float) -> None:
        """Wait for what runs, at most `running_s` seconds."""
        if self._running:
            await asyncio.wait([running.task for running in self._running.values()], timeout=running_s)

    def _settle(self, acks: list[str], word: bytes) -> None:
        for ack in filter(None, acks):
            self._send(ack, word)
            if word != WORKING:
                self._meter.settled(given_back=word == NAK)

    async def _run(self, item: Item, data: bytes, aged_s: float, most_nbytes: int) -> None:
        began, limits = time.monotonic(), self._settings.limits
        scope = scope_of_ids(item.request_id, "", limits)
        scope.deadline_ns = deadline.after(limits.request_timeout_s - aged_s)
        result, error, fetched_ms = b"", None, 0.0
        try:
            asked = read_foreign(data)
            name = named_payload(asked, self._settings.cluster.payload_store)
            if name:
                asked = await self._with_payload(asked, name)
                fetched_ms = (time.monotonic() - began) * 1e3
            result = await self._answer(scope, asked)
            if len(result) > most_nbytes - SLACK_NBYTES:
                raise ResourceExhausted(f"the result has {len(result)} bytes, more than a message may have")
        except PenstockError as failure:
            result, error = b"", failure
            if failure.code == POISON:
                self.on_dead("poison", data, item, failure.message)
            if isinstance(failure, (ModelNotFound, ModelNotLoaded)):
                self._meter.lacks(item.model_id)
        except Exception:
            log.exception("item %.100s of another producer failed", item.work_item_id)
            result, error = b"", PenstockError("internal error")
        finally:
            running = self._running.pop(_key(item))
            self._meter.inflight.inc(-1)
        spent_ms = (time.monotonic() - began) * 1e3
        self._meter.ended(item.model_id, item.operation, spent_ms / 1e3)
        told = self._told(item, scope, result, error, aged_s, spent_ms, fetched_ms)
        self._send(item.reply_subject, encode(told))
        self._settle(running.acks, ACK)

    async def _with_payload(self, asked: Foreign, name: str) -> Foreign:
        store, most_nbytes = self._settings.cluster.payload_store, self._settings.limits.max_body_bytes
        return with_payload(asked, await off_loop(payload_in, store, name, most_nbytes))

    async def _answer(self, scope: RequestScope, asked: Foreign) -> bytes:
        if asked.operation == LOAD:
            entry = self._models.find(asked.model)
            await self._models.ensure_loaded(entry.id, scope.deadline_ns)
            return b""
        body = body_of(asked)
        answer = await self._resources[asked.operation].answered(scope, asked.model, body)
        return part_of(asked.operation, answer)

    def _told(
        self,
        item: Item,
        scope: RequestScope,
        result: bytes,
        error: PenstockError | None,
        aged_s: float,
        spent_ms: float,
        fetched_ms: float,
    ) -> ItemResult:
        phases = scope.phases
        box = self._settings.cluster.box_name
        return ItemResult(
            item.work_item_id,
            item.request_id,
            error is None,
            f"{box}/{scope.worker}" if scope.worker else box,
            item.item_index,
            result,
            "" if error is None else error.message,
            "" if error is None else contract_code(error, own_client=True)[1],
            phases.get("device", 0.0),
            aged_s * 1e3 + phases.get("queue", 0.0),
            spent_ms,
            phases.get("tokenize", 0.0),
            phases.get("copy", 0.0),
            fetched_ms,
        )
