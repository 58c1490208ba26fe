"""A look at the cluster of the settings, for `penstock doctor`.

1. Each URL is joined by itself: whether the broker is there, has what is needed, and how far its clock is from ours.
2. For `LISTEN_S` the look listens where gateways and boxes tell their transfer ports, and connects to each port from
   this host. The look of the other host shows the other way.

The look changes nothing at a broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js.errors import APIError

from frontend.cluster.broker import QuickClient
from frontend.cluster.transfer_http import host_and_port
from ipc import brokers
from ipc.errors import ConfigError, ProtocolError
from ipc.setting_sources import shown_size
from ipc.settings import Cluster
from ipc.wire.cluster import GatewayBeat, read_beat, read_health
from ipc.wire.cluster_names import Names

TIMEOUT_S = 3
OLDEST = (2, 9)
LEAST_PAYLOAD = 64 << 10
"""Below this hardly any request fits into a message."""
LISTEN_S = 1.5
"""Boxes tell their figures each second, gateways that they live five times a second."""
MOST_APART_S = 0.2
MOST_PEERS = 256
Finding = tuple[bool, str]


def look(cluster: Cluster) -> Iterator[Finding]:
    """Whether all is fine with each broker, and a line for people."""
    try:
        secrets = brokers.secrets_of(cluster)
        tls = brokers.tls_of(cluster)
    except ConfigError as error:
        yield False, error.message
        return
    options: dict[str, object] = {**secrets, **({"tls": tls} if tls is not None else {})}
    any_fine = ""
    for url in cluster.urls:
        fine, text = asyncio.run(_one(url, options, cluster))
        any_fine = any_fine or (url if fine else "")
        yield fine, text
    if any_fine:
        yield from asyncio.run(_ports(any_fine, options, cluster))


@contextlib.asynccontextmanager
async def _joined(url: str, options: dict[str, object]) -> AsyncIterator[Client | str]:
    """A client of this broker alone, or why there is none."""
    told: list[str] = []

    async def note(error: Exception) -> None:
        told.append(str(error) or type(error).__name__)

    client = QuickClient()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.connect(
                [url],
                name="penstock doctor",
                allow_reconnect=False,
                max_reconnect_attempts=0,
                connect_timeout=TIMEOUT_S,
                error_cb=note,
                **options,  # type: ignore[arg-type]
            )
    except (Error, OSError, TimeoutError, ValueError) as error:
        why = told[-1] if told else str(error) or "no answer"
        yield f"broker {url}: cannot be joined: {why.removeprefix('nats: ')}"
        return
    try:
        yield client
    finally:
        await client.close()


async def _one(url: str, options: dict[str, object], cluster: Cluster) -> Finding:
    async with _joined(url, options) as client:
        return (False, client) if isinstance(client, str) else await _examined(url, client, cluster)


async def _examined(url: str, client: Client, cluster: Cluster) -> Finding:
    version, most = client.connected_server_version, client.max_payload
    began = time.perf_counter()
    wrong = []
    try:
        await client.flush(TIMEOUT_S)
    except (Error, TimeoutError) as error:
        wrong.append(f"gives no answer: {error}")
    rtt_ms = (time.perf_counter() - began) * 1e3
    if (version.major, version.minor) < OLDEST:
        wrong.append(f"is older than {OLDEST[0]}.{OLDEST[1]}")
    if most < LEAST_PAYLOAD:
        wrong.append(f"max_payload is below {shown_size(LEAST_PAYLOAD)}")
    try:
        await client.jetstream(timeout=TIMEOUT_S).account_info()
    except (APIError, Error, TimeoutError):
        wrong.append("JetStream is off, has no quorum, or this user may not use it")
    apart_s = await _clock(client, cluster)
    if apart_s is not None and abs(apart_s) > MOST_APART_S:
        ahead = "ahead of" if apart_s > 0 else "behind"
        wrong.append(f"its clock is {abs(apart_s):.1f} s {ahead} the clock of this host")
    count = max(len(client.servers), 1)
    if len(cluster.urls) > 1 and count < len(cluster.urls):
        wrong.append(f"knows {count} brokers, cluster.urls has {len(cluster.urls)}")
    text = f"broker {url}: nats-server {version}, {rtt_ms:.1f} ms, max_payload {shown_size(most)}"
    return not wrong, "; ".join([text, *wrong])


async def _clock(client: Client, cluster: Cluster) -> float | None:
    """Seconds by which the clock of the broker is ahead of ours beyond doubt; None where the broker tells no time."""
    before_s = _wall_s()
    try:
        stream = f"KV_{Names(cluster.name).models}"
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=TIMEOUT_S)
        broker_s = datetime.fromisoformat(json.loads(answer.data)["ts"]).timestamp()
    except (Error, TimeoutError, LookupError, TypeError, ValueError):
        return None
    after_s = _wall_s()
    return min(broker_s - before_s, 0.0) if broker_s < before_s else max(broker_s - after_s, 0.0)


def _wall_s() -> float:
    return time.time()


async def _listening(found: dict[str, str]) -> None:
    """Wait until all who tell an address have told it; `found` grows meanwhile."""
    await asyncio.sleep(LISTEN_S)


async def _ports(url: str, options: dict[str, object], cluster: Cluster) -> list[Finding]:
    """Whether this host reaches the transfer port of each gateway and box."""
    names, found = Names(cluster.name), dict[str, str]()

    async def hear(message: Msg) -> None:
        try:
            if message.subject.startswith(names.gateway_beat("")):
                beat = read_beat(message.data)
                who, address = "a gateway", beat.address if isinstance(beat, GatewayBeat) else ""
            else:
                health = read_health(message.data)
                who, address = f"box {health.box}", health.address
        except ProtocolError:
            return
        if address and len(found) < MOST_PEERS:
            found[address] = who

    async with _joined(url, options) as client:
        if isinstance(client, str):
            return [(False, client)]
        for subject in (names.gateway_beat("*"), names.box_health("*")):
            await client.subscribe(subject, cb=hear)
        await _listening(found)
    if not found:
        return [(True, "transfer ports: no gateway and no box tells one; large bytes go through the brokers")]
    return await _tried(found, cluster)


async def _tried(found: dict[str, str], cluster: Cluster) -> list[Finding]:
    """All ports at once, since one that does not answer takes `TIMEOUT_S`."""
    return await asyncio.gather(*(_port(address, who, cluster) for address, who in sorted(found.items())))


async def _port(address: str, who: str, cluster: Cluster) -> Finding:
    where = host_and_port(address)
    try:
        if where is None:
            raise OSError("no address")
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(*where, ssl=brokers.tls_of(cluster))
    except (OSError, TimeoutError, UnicodeError) as error:
        # NOTE: a name that cannot be asked for, as `a..b`, is an error of its encoding.
        why = str(error) or "no answer"
        return False, f"transfer port {address} of {who}: cannot be reached from this host: {why}"
    writer.transport.abort()
    return True, f"transfer port {address} of {who}: can be reached from this host"
