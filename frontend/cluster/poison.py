"""The inputs on which workers and boxes died, as all hosts of a cluster know them.

1. A verdict is a value of a bucket under the name of its input, which is a digest. Brokers forget a value
   `limits.poison_ttl_s` after it was written.
2. Gateways and bridges follow the bucket, and their `PoisonList` learns what is there.
3. A verdict of this host is written unless the bucket has an equal one or a worse one. While no broker takes verdicts,
   the newest `MOST` of them wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

from nats.js.errors import KeyWrongLastSequenceError

from frontend.cluster.broker import Broker
from frontend.cluster.bucket import TRY_AGAIN_S, making
from frontend.cluster.kept import Followed, Kept
from frontend.engine.poison import MOST, RANK, PoisonList, Verdict
from ipc.errors import ProtocolError
from ipc.logs import Seldom
from ipc.wire.cluster import VERSION, JudgedInput, encode, read_judged
from ipc.wire.cluster_names import Names

log = logging.getLogger(__name__)

_NAME = re.compile("[0-9a-f]{32}")
_UNWRITABLE = "other hosts do not know of an input on which a worker or a box died"


class SharedPoison:
    """What one process tells the others, and hears of them. `loops` run as long as the process."""

    def __init__(self, broker: Broker, names: Names, poison: PoisonList) -> None:
        self._broker, self._poison = broker, poison
        self._kept = Kept(broker, names.shared, poison.ttl_s)
        self._followed = Followed(broker, self._kept, read_judged)
        self._followed.on_change = self._learn
        self._waiting: dict[str, Verdict] = {}
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        poison.on_verdict = self._judged
        broker.on_up.append(self._wanted.set)

    @property
    def loops(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What follows the bucket, and what writes verdicts."""

        async def follow() -> None:
            await self._followed.run(self._broker)

        async def tell() -> None:
            await making(self._broker, self._wanted, self._write_all, self._seldom, _UNWRITABLE, TRY_AGAIN_S)

        return follow, tell

    def _learn(self) -> None:
        values = self._followed.values
        self._poison.learn({name: value.verdict for name, value in values.items() if _NAME.fullmatch(name)})

    def _judged(self, name: str, verdict: Verdict) -> None:
        self._waiting.pop(name, None)
        while len(self._waiting) >= MOST:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[name] = verdict
        self._wanted.set()

    async def _write_all(self) -> None:
        while self._waiting:
            name, verdict = next(iter(self._waiting.items()))
            if await self._is_written(name, verdict) and self._waiting.get(name) == verdict:
                del self._waiting[name]

    async def _is_written(self, name: str, verdict: Verdict) -> bool:
        """Whether the bucket has the verdict now; false where somebody has written another one meanwhile."""
        data, revision = await self._kept.read(name)
        if data is not None and RANK[verdict] <= self._rank(data):
            return True
        try:
            await self._kept.write(name, encode(JudgedInput(VERSION, verdict)), revision)
        except KeyWrongLastSequenceError:
            return False
        return True

    @staticmethod
    def _rank(data: bytes) -> int:
        """How bad the verdict of a value is; -1 for what is none."""
        try:
            return RANK[read_judged(data).verdict]
        except ProtocolError:
            return -1
