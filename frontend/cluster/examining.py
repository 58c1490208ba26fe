"""A look at the brokers of the settings, for `penstock doctor`: whether each can be joined and has what is needed.

Each URL is joined by itself. The look changes nothing at a broker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import nats
from nats.aio.client import Client
from nats.errors import Error
from nats.js.errors import APIError

from ipc import brokers
from ipc.errors import ConfigError
from ipc.setting_sources import shown_size
from ipc.settings import Cluster

TIMEOUT_S = 3
OLDEST = (2, 9)
LEAST_PAYLOAD = 64 << 10
"""Below this hardly any request fits into a message."""
Finding = tuple[bool, str]


def look(cluster: Cluster) -> Iterator[Finding]:
    """Whether all is fine with each broker, and a line for people."""
    try:
        secrets = brokers.secrets_of(cluster)
        tls = brokers.tls_of(cluster)
    except ConfigError as error:
        yield False, error.message
        return
    for url in cluster.urls:
        yield asyncio.run(_one(url, {**secrets, **({"tls": tls} if tls is not None else {})}, cluster))


async def _one(url: str, options: dict[str, object], cluster: Cluster) -> Finding:
    told: list[str] = []

    async def note(error: Exception) -> None:
        told.append(str(error) or type(error).__name__)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            client = await nats.connect(
                [url],
                name="penstock doctor",
                allow_reconnect=False,
                max_reconnect_attempts=0,
                connect_timeout=TIMEOUT_S,
                error_cb=note,
                **options,
            )
    except (Error, OSError, TimeoutError, ValueError) as error:
        why = told[-1] if told else str(error) or "no answer"
        return False, f"broker {url}: cannot be joined: {why.removeprefix('nats: ')}"
    try:
        return await _examined(url, client, cluster)
    finally:
        await client.close()


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
    count = max(len(client.servers), 1)
    if len(cluster.urls) > 1 and count < len(cluster.urls):
        wrong.append(f"knows {count} brokers, cluster.urls has {len(cluster.urls)}")
    text = f"broker {url}: nats-server {version}, {rtt_ms:.1f} ms, max_payload {shown_size(most)}"
    return not wrong, "; ".join([text, *wrong])
