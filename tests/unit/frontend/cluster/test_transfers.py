"""Large bytes between two ends over a real broker, and what becomes of wrong secrets, peers, places and digests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import nats
import pytest

from frontend.cluster.transfers import TransferFailed, Transfers
from ipc.settings import Cluster
from ipc.wire.cluster import MOST_CHUNK_NBYTES, VERSION, Want, encode
from tests.harness.broker import Broker, broker
from tests.harness.server import eventually

DATA = secrets.token_bytes(3 * MOST_CHUNK_NBYTES + 17)
MOST = 1 << 30


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("transfers"), jetstream=False) as one:
        yield one


def played(one: Broker, scene: Callable[[Transfers, Transfers], Awaitable[None]]) -> None:
    """Run a scene with two ends that have joined the broker."""

    async def run() -> None:
        ends = [Transfers(Cluster(urls=(one.url,)), name, name) for name in ("here", "there")]
        for end in ends:
            end.broker.start()

        async def joined() -> bool:
            return all(end.broker.up for end in ends)

        await eventually(joined, "both ends at the broker")
        try:
            await scene(*ends)
        finally:
            for end in ends:
                await end.broker.close()

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [0, 1, MOST_CHUNK_NBYTES, len(DATA)])
def test_all_bytes_arrive_in_their_order(one_broker: Broker, nbytes: int) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        data = DATA[:nbytes]
        offer = await here.offer([data[:7], memoryview(data[7:])], "there")
        assert await there.get(offer, "here", MOST) == data and there.got_nbytes == nbytes
        here.withdraw(offer)
        here.withdraw(offer)
        assert here.offered == 0

    played(one_broker, scene)


def test_only_the_peer_with_the_secret_gets_the_bytes(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "another")
        guessed = msgspec.structs.replace(offer, secret="0" * 64)
        for wrong in (offer, guessed):
            with pytest.raises(TransferFailed, match="0 bytes came"):
                await there.get(wrong, "here", MOST)
        mine = await here.offer([DATA], "there")
        here.withdraw(mine)
        with pytest.raises(TransferFailed, match="0 bytes came"):
            await there.get(mine, "here", MOST)
        assert here.refused > 0 and not here.sent_nbytes

    played(one_broker, scene)


def test_other_bytes_or_lengths_than_offered_are_not_taken(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "")
        for change in ({"digest": b"x" * 32}, {"nbytes": len(DATA) + 1}, {"nbytes": len(DATA) - 1}):
            with pytest.raises(TransferFailed):
                await there.get(msgspec.structs.replace(offer, **change), "here", MOST)
        with pytest.raises(TransferFailed, match="the limit"):
            await there.get(offer, "here", len(DATA) - 1)
        assert not there.got_nbytes

    played(one_broker, scene)


def test_an_owner_that_has_gone_is_not_waited_for(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "")
        with pytest.raises(TransferFailed, match="does not send"):
            await there.get(offer, "nobody", MOST, lambda owner: False)

    played(one_broker, scene)


def test_words_of_strangers_are_dropped_and_the_next_transfer_goes_on(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        stranger = await nats.connect(one_broker.url)
        offer = await here.offer([DATA], "there")
        words = [b"", b"\xc1", encode(Want(VERSION, offer.secret, "a.b", 1, 0, 8))]
        words += [encode(Want(VERSION, offer.secret, "there", 1, 1 << 60, 8)), b"\x91" * 9000]
        for word in words:
            await stranger.publish("_INBOX.here-bytes.want", word)
        await stranger.publish("_INBOX.there-bytes.chunk.1", b"x")
        await stranger.flush()
        assert await there.get(offer, "here", MOST) == DATA
        assert here.refused == len(words)
        await stranger.close()

    played(one_broker, scene)
