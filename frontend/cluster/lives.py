"""Which gateways live, for rows that name the gateway whose work they wait for.

1. A gateway is its router id, which tells one life of one process. The signs of life of all gateways arrive here.
2. A gateway is dead once nothing was heard of it for `cluster.gateway_silence_s`. Silence while this process had no
   broker says nothing: the time begins anew with each connection.
3. All gateways are one server: each can go on with what another one has begun.
"""

from __future__ import annotations

import logging
import time

from nats.aio.msg import Msg

from frontend.cluster.broker import Broker, readable
from ipc.logs import Seldom
from ipc.settings import Cluster
from ipc.wire.cluster import GatewayBeat, read_beat
from ipc.wire.cluster_names import Names, is_id

log = logging.getLogger(__name__)

MOST_HEARD = 4096
"""Gateways that are remembered; those that were silent for longest are forgotten first."""


class GatewayLives:
    """The lives of gateways, as one of them hears of the others."""

    def __init__(self, broker: Broker, names: Names, cluster: Cluster, router: str) -> None:
        self._broker, self._names, self._router, self._seldom = broker, names, router, Seldom(log)
        self._silence_s, self._server = cluster.gateway_silence_s, f"cluster {names.cluster}"
        self._heard: dict[str, float] = {}
        self._since = time.monotonic()
        broker.listen(names.gateway_beat("*"), self._beat)
        broker.on_up.append(self._joined)

    def _joined(self) -> None:
        self._since = time.monotonic()

    def _beat(self, message: Msg) -> None:
        beat = readable(read_beat, message.data, self._seldom, "a sign of life was dropped")
        if not isinstance(beat, GatewayBeat) or not is_id(beat.router):
            return
        if message.subject == self._names.gateway_beat(beat.router):
            self._heard.pop(beat.router, None)
            while len(self._heard) >= MOST_HEARD:
                del self._heard[next(iter(self._heard))]
            self._heard[beat.router] = time.monotonic()

    def own(self) -> str:
        """The router id of this gateway."""
        return self._router

    def server(self) -> str:
        """The gateways of the cluster."""
        return self._server

    def is_running(self, identity: str) -> bool:
        """Whether a gateway lives, or may live as far as this one can tell; true of the cluster itself."""
        if identity in (self._router, self._server) or not self._broker.up:
            return True
        heard = max(self._heard.get(identity, 0.0), self._since)
        return time.monotonic() - heard <= self._silence_s
