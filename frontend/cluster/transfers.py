"""Bytes that are too large for a message, from one host to another.

1. The process that has the bytes makes an `Offer`: a secret of 256 bits, the length and a digest. The offer travels in
   the item or the result, and stands until it is withdrawn, for one peer.
2. The other side gets the bytes by HTTP where the offer names an address (`transfer_http`), else in chunks over core
   NATS, `WINDOW` of them asked for at a time. A chunk that does not come is asked for again. Length and digest are
   checked at the end.
3. Bytes of others lie in memory of a bounded size (`Room`), until nobody reads them any more. Who finds no room waits,
   and the other side keeps the bytes meanwhile: so slow clients fill no memory.
4. Chunks have a connection of their own, so that small messages are not held up.

A wrong secret, peer or place is answered with an empty chunk, whatever was wrong.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from nats.aio.msg import Msg

from frontend.cluster.broker import Broker, readable
from frontend.cluster.transfer_http import Getter, Leaves, Listener
from ipc.errors import PenstockError, QueueUnavailable
from ipc.logs import Seldom
from ipc.settings import Cluster
from ipc.wire.cluster import MOST_CHUNK_NBYTES, VERSION, Offer, Want, encode, read_want
from ipc.wire.cluster_names import INBOX, is_id

log = logging.getLogger(__name__)

WINDOW = 4
AGAIN_S = 0.5
TRIES = 10
"""So often a chunk is asked for before the bytes count as lost."""
T = TypeVar("T")


class TransferFailed(PenstockError):
    """The bytes of an offer could not be got: the other side has gone, or has other bytes."""


class Room:
    """A number of bytes that buffers of this process may take together."""

    def __init__(self, most_nbytes: int) -> None:
        """A buffer that is larger by itself gets all of the room."""
        self._most_nbytes = most_nbytes
        self.nbytes = 0
        """Bytes of all buffers that are there."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    async def buffer(self, nbytes: int) -> memoryview:
        """A new buffer, in the order of the calls. Its room is free again once no view of the buffer is left."""
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._waiting.append((nbytes, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            # NOTE: `_grant` may have passed over this one already, between the cancellation and now.
            if granted.cancelled():
                with suppress(ValueError):
                    self._waiting.remove((nbytes, granted))
                self._grant()
            else:
                self._give(nbytes)
            raise
        try:
            # PERF: a bytearray would be filled with zeros first.
            found = np.empty(nbytes, np.uint8)
        except MemoryError:
            self._give(nbytes)
            raise
        weakref.finalize(found, self._ended, loop, nbytes)
        return found.data

    def _ended(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        # NOTE: the last view may go in a thread, and behind the end of the loop.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._give, nbytes)

    def _give(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if self.nbytes and self.nbytes + nbytes > self._most_nbytes:
                return
            self._waiting.popleft()
            if not granted.done():
                self.nbytes += nbytes
                granted.set_result(None)


@dataclass(frozen=True, slots=True)
class _Offered:
    peer: str
    data: memoryview
    served: set[str] = field(default_factory=set)
    """Peers that were sent the bytes by HTTP."""

    def is_for(self, peer: str) -> bool:
        """Whether a peer may have the bytes."""
        return hmac.compare_digest(self.peer or peer, peer)


class Transfers:
    """The offers of this process, and its requests for offers of others. Other processes know this one as `me`."""

    def __init__(self, cluster: Cluster, me: str, name: str, room_nbytes: int = 1 << 30) -> None:
        """Raises `ConfigError` for files of the settings that cannot be read. `name` is for the brokers' pages.

        Bytes of others take `room_nbytes` together.
        """
        self._me, self.broker = me, Broker(cluster, f"{name}, large bytes")
        self._seldom = Seldom(log)
        self._offers: dict[str, _Offered] = {}
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self.room = Room(room_nbytes)
        self._turns = asyncio.Semaphore(cluster.max_transfers)
        self._listener, self._getter = Listener(cluster, self._find), Getter(cluster, me)
        self.sent_nbytes = self.got_nbytes = self.refused = self.by_http = 0
        self.broker.listen(f"{_inbox(me)}.want", self._wanted)
        self.broker.listen(f"{_inbox(me)}.chunk.*", self._chunk)

    async def start(self) -> None:
        """Join the brokers, and listen."""
        self.broker.start()
        await self._listener.start()

    async def close(self) -> None:
        """Leave."""
        await self._listener.close()
        self._getter.close()
        await self.broker.close()

    @property
    def address(self) -> str:
        """HOST:PORT where other hosts get large bytes, empty without a listener."""
        return self._listener.address

    @property
    def offered(self) -> int:
        """Offers that stand."""
        return len(self._offers)

    @property
    def kept(self) -> int:
        """Connections to other hosts that wait for the next transfer."""
        return self._getter.kept

    async def offer(self, parts: Sequence[bytes | memoryview], peer: str) -> Offer:
        """Offer the bytes of `parts`, one behind another, to a peer; "" for whoever has the secret."""
        (data,) = parts if len(parts) == 1 else (b"".join(parts),)
        data = memoryview(data)
        digest = await Leaves(data).digest()
        secret = secrets.token_hex(32)
        self._offers[secret] = _Offered(peer, data)
        return Offer(secret, len(data), digest, self._listener.address)

    def withdraw(self, offer: Offer | None) -> None:
        """Nobody needs the bytes any more. Safe to call twice."""
        if offer is not None:
            self._offers.pop(offer.secret, None)

    def _find(self, secret: str, peer: str) -> memoryview | None:
        """The bytes for a peer that asks by HTTP, once for each peer."""
        offered = self._offers.get(secret)
        if offered is None or peer in offered.served or not offered.is_for(peer):
            self.refused += 1
            return None
        offered.served.add(peer)
        self.sent_nbytes += len(offered.data)
        self.by_http += 1
        return offered.data

    def _wanted(self, message: Msg) -> None:
        """A piece of an offer is asked for."""
        want = readable(read_want, message.data, self._seldom, "a word about large bytes was dropped")
        if want is None or not is_id(want.peer):
            self.refused += 1
            return
        offered, chunk = self._offers.get(want.secret), b""
        if offered is not None and offered.is_for(want.peer):
            chunk = bytes(offered.data[want.offset : want.offset + want.nbytes])
        self.refused += not chunk
        self.sent_nbytes += len(chunk)
        self.broker.say(f"{_inbox(want.peer)}.chunk.{want.number}", chunk)

    def _chunk(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None and not waiting.done():
            waiting.set_result(message.data)

    async def get(
        self,
        offer: Offer,
        owner: str,
        most_nbytes: int,
        is_alive: Callable[[str], bool] = lambda owner: True,
    ) -> memoryview:
        """The bytes that `owner` offers, read-only, while `is_alive(owner)`.

        Raises `TransferFailed` for bytes that do not come, are others than offered, or would be more than
        `most_nbytes`.
        """
        if offer.nbytes > most_nbytes:
            raise TransferFailed(f"{offer.nbytes} bytes are offered, {most_nbytes} are the limit")
        data = await _while_alive(self.room.buffer(offer.nbytes), owner, is_alive)
        async with self._turns:
            # An owner that stands still keeps its connection, and sends nothing.
            if not await _while_alive(self._getter.get(offer, data), owner, is_alive):
                await self._in_chunks(offer, data, owner, is_alive)
        self.got_nbytes += len(data)
        return data.toreadonly()

    async def _in_chunks(
        self, offer: Offer, data: memoryview, owner: str, is_alive: Callable[[str], bool]
    ) -> None:
        step = min(MOST_CHUNK_NBYTES, self.broker.inline_nbytes)
        places, why = iter(range(0, offer.nbytes, step)), ""

        async def some() -> None:
            """Get one chunk after another until none is left, or one did not come."""
            # NOTE: an error raised here would hold `data` in a cycle, by frames and the group of tasks, and the room
            # would not be free before the collector looks.
            nonlocal why
            for offset in places:
                nbytes = min(step, offer.nbytes - offset)
                try:
                    chunk = await self._one(offer, owner, offset, nbytes, is_alive)
                except TransferFailed as error:
                    why = why or error.message
                    return
                if len(chunk) != nbytes:
                    why = why or f"{len(chunk)} bytes came where {nbytes} were expected"
                if why:
                    return
                data[offset : offset + nbytes] = chunk

        async with asyncio.TaskGroup() as group:
            for _ in range(WINDOW):
                group.create_task(some())
        if why:
            raise TransferFailed(why)
        if await Leaves(data).digest() != offer.digest:
            raise TransferFailed("the bytes are others than those that were offered")

    async def _one(
        self, offer: Offer, owner: str, offset: int, nbytes: int, is_alive: Callable[[str], bool]
    ) -> bytes:
        # No other user of the brokers can guess where a chunk is waited for.
        number = secrets.randbits(62)
        future = self._waiting[str(number)] = asyncio.get_running_loop().create_future()
        want = encode(Want(VERSION, offer.secret, self._me, number, offset, nbytes))
        try:
            for _ in range(TRIES):
                with suppress(QueueUnavailable):
                    self.broker.send(f"{_inbox(owner)}.want", want)
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        return await asyncio.shield(future)
                if not is_alive(owner):
                    break
            raise TransferFailed("the other host does not send what it offers")
        finally:
            del self._waiting[str(number)]
            future.cancel()


async def _while_alive(work: Awaitable[T], owner: str, is_alive: Callable[[str], bool]) -> T:
    """The result of `work`. Raises `TransferFailed` for an owner that is not alive any more."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=AGAIN_S))[0]:
            if not is_alive(owner):
                raise TransferFailed("the other host has gone")
        return task.result()
    finally:
        task.cancel()


def _inbox(owner: str) -> str:
    return f"{INBOX}.{owner}-bytes"
