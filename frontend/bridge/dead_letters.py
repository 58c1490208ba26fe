"""Dead letters: what was given up at a box, told to a stream at the brokers, where operators find it for a day.

1. A letter is about bytes that are no item, or about an item that killed workers twice. The item itself is answered as
   ever; a letter that cannot be sent is lost.
2. A letter holds no input, unless `cluster.dead_letter_bodies` is set.
3. `run` makes the stream after each connect. Who reads the stream removes nothing; the oldest letters go first.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time

import msgspec
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError

from frontend.cluster.broker import Broker
from frontend.cluster.bucket import TIMEOUT_S, making
from frontend.cluster.queue import STREAM_EXISTS
from ipc.errors import InvalidInput
from ipc.logs import Seldom
from ipc.settings import Cluster
from ipc.wire.cluster import Item, Letter
from ipc.wire.cluster_names import UNKNOWN, Names

log = logging.getLogger(__name__)

KEPT_S = 86_400
MOST_LETTERS = 10_000
MOST_NBYTES = 64 << 20
TRY_AGAIN_S = 5.0
_UNMADE = "the stream of dead letters cannot be made"
_NAMED = ("work_item_id", "request_id", "model_id", "operation", "pool_name")
_SHOWN = 256


class DeadLetters:
    """The letters of one box."""

    def __init__(self, cluster: Cluster, broker: Broker, names: Names) -> None:
        self._cluster, self._broker, self._names = cluster, broker, names
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        broker.on_up.append(self._wanted.set)

    def keep(self, reason: str, data: bytes, item: Item | None = None, error: str = "") -> None:
        """Tell of `data` that was given up, which is `item` where it could be read."""
        fields: dict[str, str] = {}
        if item is not None:
            fields = {name: getattr(item, name)[:_SHOWN] for name in _NAMED}
        body = ""
        if self._cluster.dead_letter_bodies and len(data) < self._broker.inline_nbytes // 2:
            body = base64.b64encode(data).decode()
        now, box = time.time(), self._cluster.box_name
        letter = Letter(reason, box, now, len(data), error=error[:_SHOWN], body=body, **fields)
        self._broker.say(self._subject(fields.get("model_id", "")), msgspec.json.encode(letter))

    def _subject(self, model: str) -> str:
        try:
            return self._names.dead(model)
        except InvalidInput:
            return self._names.dead(UNKNOWN)

    async def run(self) -> None:
        """Make the stream after each connect, for ever."""
        await making(self._broker, self._wanted, self._make, self._seldom, _UNMADE, TRY_AGAIN_S)

    async def _make(self) -> None:
        client = self._broker.client
        stream = StreamConfig(
            name=self._names.dead_letters,
            subjects=[self._names.dead_any],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            num_replicas=self._broker.replicas,
            max_age=KEPT_S,
            max_msgs=MOST_LETTERS,
            max_bytes=MOST_NBYTES,
            discard=DiscardPolicy.OLD,
        )
        try:
            await client.jetstream(timeout=TIMEOUT_S).add_stream(stream)
        except APIError as error:
            if error.err_code != STREAM_EXISTS:
                raise
