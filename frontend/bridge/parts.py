"""Answers in parts of a bridge: the local engine runs the work, and gateways get each part when it is there.

1. A part is copied, so that its place at the worker is free before the client of the gateway takes it.
2. A part that is too large for a message is offered to the gateway, and nothing goes behind it until it is taken. All
   such parts take `cluster.keep_result_bytes` together: the next one waits at its worker.
3. Numbers, credit and what is kept are those of all that is told in pieces (`relays`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from frontend.bridge.relays import Relay, Relays
from frontend.cluster.transfers import Room, Transfers
from frontend.engine.answer import Answer
from frontend.engine.interface import Engine, Payload
from frontend.scope import RequestScope
from ipc.errors import ResourceExhausted
from ipc.settings import Settings
from ipc.wire.cluster import VERSION, encode
from ipc.wire.cluster_answers import PartBody, PartsTold
from ipc.wire.cluster_names import parts as parts_of
from ipc.wire.messages import Work
from ipc.wire.streams import part_flow

SLACK_NBYTES = 2048
"""Of a message around one part."""


class SentPart(NamedTuple):
    """One part and about what it takes in a message."""

    number: int
    body: PartBody
    nbytes: int


class PartRelay(Relay[SentPart]):
    """One answer on its way to a gateway."""

    def __init__(self, name: str, router: str, window: int, on_news: Callable[[PartRelay], None]) -> None:
        """`window` is `Work.parts`; `on_news` as for a text."""
        super().__init__(name, router, part_flow(window))
        self._on_news = on_news
        self._waiting: list[PartBody] = []

    def tell(self, body: PartBody) -> None:
        """A part has come."""
        if not self._waiting:
            self._on_news(self)
        self._waiting.append(body)
        self._flow.sent(1, alone=body.large is not None)

    def cut(self) -> list[SentPart]:
        """What waits, as parts, which are kept."""
        waiting, self._waiting = self._waiting, []
        return [
            self._keep(SentPart(number, body, _nbytes_of(body)))
            for number, body in enumerate(waiting, self.number + 1)
        ]


def _nbytes_of(body: PartBody) -> int:
    return len(body.result) + len(body.data) + len(body.loose) + SLACK_NBYTES


class Parts(Relays[PartRelay, SentPart]):
    """All answers in parts of one life of a bridge."""

    def __init__(
        self,
        life: str,
        engine: Engine,
        send: Callable[[str, bytes], bool],
        most_inline: Callable[[], int],
        transfers: Transfers,
        settings: Settings,
    ) -> None:
        """`most_inline`: bytes that a message may take."""
        super().__init__(send, most_inline)
        self._life, self._engine, self._transfers, self._cluster = life, engine, transfers, settings.cluster
        self._room = Room(settings.cluster.keep_result_bytes)

    async def run(self, name: str, router: str, scope: RequestScope, work: Work, payload: Payload) -> Answer:
        """Run the work of an item; returns the end of the answer. Raises the `PenstockError` of the engine."""
        relay = self._streams[name] = PartRelay(name, router, work.parts, self._note)
        async with self._engine.stream(scope, work, payload) as parts:
            async for part in parts:
                relay.tell(await self._body(part, router))
                await relay.room()
            assert parts.result is not None
            return parts.result

    async def _body(self, part: Answer, router: str) -> PartBody:
        """A part as a message has it; bytes that are too large for one are offered to a gateway."""
        # NOTE: nothing of the bytes may stay in `run`, which waits there for the room of the next part.
        with part:
            body, whole = await self._copied(part)
        if whole is None:
            return body
        return msgspec.structs.replace(body, large=await self._transfers.offer([whole], router))

    async def _copied(self, part: Answer) -> tuple[PartBody, memoryview | None]:
        """A part as a message has it, and the bytes that are too large for one."""
        result, data, loose = part.parts()
        plain = encode(msgspec.structs.replace(result, block=None, trace=None))
        nbytes = len(plain) + data.nbytes + loose.nbytes
        if nbytes + SLACK_NBYTES <= self._most_inline():
            return PartBody(plain, bytes(data), bytes(loose)), None
        if nbytes > self._cluster.keep_result_bytes:
            keeps = self._cluster.keep_result_bytes
            raise ResourceExhausted(
                f"a part of the answer has {nbytes} bytes; cluster.keep_result_bytes is {keeps}"
            )
        large = PartBody(result_nbytes=len(plain), data_nbytes=data.nbytes)
        whole, at = await self._room.buffer(nbytes), 0
        for piece in (plain, data, loose):
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return large, whole

    def _message(self, router: str, pieces: Sequence[tuple[str, SentPart]]) -> tuple[str, bytes]:
        names, parts = [name for name, _ in pieces], [part for _, part in pieces]
        told = PartsTold(
            VERSION,
            self._cluster.box_name,
            self._life,
            names,
            [part.number for part in parts],
            [part.body for part in parts],
        )
        return parts_of(router), encode(told)

    def _end(self, pieces: Sequence[SentPart]) -> None:
        for part in pieces:
            self._transfers.withdraw(part.body.large)
