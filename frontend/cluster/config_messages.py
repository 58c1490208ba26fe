"""Changes that a configuration service tells by messages, in SIE's form.

Gateways hear all changes, boxes those of their bundle.

1. A message waits in a line of bounded size; one at a time is read and given to `apply`. Nobody answers a message, and
   a message that nobody hears is lost: a service tells its changes again.
2. A message that is older than the last one of its model is dropped. Each service counts epochs of its own, and a
   service that has lost its disk counts anew: epochs are forgotten with the connection and with another service.
3. A message that the brokers cannot keep now stays first in the line, and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg

from frontend.cluster.broker import Broker, readable
from frontend.cluster.bucket import LOST, TRY_AGAIN_S
from ipc.errors import PenstockError, QueueUnavailable
from ipc.logs import Seldom
from ipc.metrics.cluster import ConfigResult
from ipc.wire import cluster_configs as wire
from ipc.wire.cluster_configs import ConfigMessage

log = logging.getLogger(__name__)

MOST_WAITING_NBYTES = 16 << 20
MOST_WAITING = 1024
MOST_EPOCHS = 4096
"""Models whose last epoch is remembered: those of the latest changes."""
_UNREADABLE = "a message about a configuration was dropped"
_REFUSED = "a configuration that a message brings is refused"
_FULL = "messages about configurations come too fast, and some were dropped"
_UNKEPT = "a configuration that a message brings waits for the brokers"


class ConfigMessages:
    """The messages of one subject. `run` runs as long as the process."""

    def __init__(
        self,
        broker: Broker,
        subject: str,
        apply: Callable[[dict[str, Any]], Awaitable[ConfigResult]],
        on_result: Callable[[ConfigResult], None],
        bundle: str = "",
    ) -> None:
        """`apply` gets a document, and returns what became of it; `on_result` hears of each message's end.

        `bundle`: messages that name another one are refused.
        """
        self._apply, self._on_result, self._bundle = apply, on_result, bundle
        self._waiting: deque[bytes] = deque()
        self._waiting_nbytes = 0
        self._epochs: dict[str, tuple[str, int]] = {}
        """Service and epoch of the last message that was applied, by model."""
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        broker.listen(subject, self._hear)
        broker.on_up.append(self._epochs.clear)

    def _hear(self, message: Msg) -> None:
        nbytes = len(message.data)
        if self._waiting_nbytes + nbytes > MOST_WAITING_NBYTES or len(self._waiting) >= MOST_WAITING:
            self._seldom.warning(_FULL, f"{len(self._waiting)} wait")
            self._on_result("dropped")
            return
        self._waiting.append(message.data)
        self._waiting_nbytes += nbytes
        self._wanted.set()

    async def run(self) -> None:
        """Apply messages for ever."""
        while True:
            self._wanted.clear()
            # An error may have ended this loop before, with messages that wait.
            if not self._waiting:
                await self._wanted.wait()
            await self._take_first()

    async def _take_first(self) -> None:
        data = self._waiting.popleft()
        self._waiting_nbytes -= len(data)
        message = readable(wire.read_message, data, self._seldom, _UNREADABLE)
        if message is None:
            self._on_result("unreadable")
            return
        try:
            result = await self._result(message)
        except (QueueUnavailable, *LOST) as error:
            self._seldom.warning(_UNKEPT, repr(error))
            self._waiting.appendleft(data)
            self._waiting_nbytes += len(data)
            await asyncio.sleep(TRY_AGAIN_S)
        else:
            self._on_result(result)

    async def _result(self, message: ConfigMessage) -> ConfigResult:
        """What becomes of a message. Raises `QueueUnavailable` or one of `LOST` where no broker keeps the document."""
        producer, epoch = self._epochs.get(message.model_id, ("", 0))
        if message.producer == producer and message.epoch < epoch:
            return "stale"
        try:
            # PERF: a document of 1 MiB takes a tenth of a second.
            document = await asyncio.to_thread(wire.document_of, message, self._bundle)
            result = await self._apply(document)
        except QueueUnavailable:
            raise
        except PenstockError as error:
            self._seldom.warning(_REFUSED, f"{message.model_id[:64]!a}: {error.message}")
            return "refused"
        if result == "ignored":
            return result
        self._epochs.pop(message.model_id, None)
        self._epochs[message.model_id] = message.producer, message.epoch
        if len(self._epochs) > MOST_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        return result
