"""Large bytes between two ends over a real broker, and what becomes of wrong secrets, peers, places and digests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import nats
import pytest
import uvloop

from frontend.cluster import transfers as module
from frontend.cluster.transfer_http import LEAF_NBYTES, Leaves, Listener
from frontend.cluster.transfers import Room, TransferFailed, Transfers
from ipc.addresses import BACKLOG
from ipc.settings import Cluster
from ipc.wire.cluster import MOST_CHUNK_NBYTES, VERSION, Offer, Want, encode
from tests.harness.broker import Broker, broker
from tests.harness.server import ROOT, eventually

DATA = secrets.token_bytes(3 * MOST_CHUNK_NBYTES + 17)
LARGE = secrets.token_bytes(3 * LEAF_NBYTES + 17)
MOST = 1 << 30


@pytest.fixture(scope="module")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("transfers"), jetstream=False) as one:
        yield one


def played(one: Broker, scene: Callable[[Transfers, Transfers], Awaitable[None]], bind: str = "") -> None:
    """Run a scene with two ends that have joined the broker; the first one listens at `bind`, too."""

    async def run() -> None:
        ends = [
            Transfers(Cluster(urls=(one.url,), transfer_bind=bind), "here", "here"),
            Transfers(Cluster(urls=(one.url,)), "there", "there"),
        ]
        for end in ends:
            await end.start()

        async def joined() -> bool:
            return all(end.broker.up for end in ends)

        await eventually(joined, "both ends at the broker")
        try:
            await scene(*ends)
        finally:
            for end in ends:
                await end.close()

    uvloop.run(run())


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


def test_bytes_of_others_wait_for_room_until_earlier_ones_are_read_no_more(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        room = there.room = Room(2 * len(DATA))
        offer = await here.offer([DATA], "there")
        had = [await there.get(offer, "here", MOST) for _ in range(2)]
        third = asyncio.ensure_future(there.get(offer, "here", MOST))
        with pytest.raises(TransferFailed, match="gone"):
            await there.get(offer, "here", MOST, lambda owner: False)
        assert not third.done() and room.nbytes == 2 * len(DATA)
        part = had.pop()[1:2]
        await asyncio.sleep(0)
        assert not third.done(), "a part of the bytes is still read"
        del part
        assert await third == DATA and len(had) == 1
        del third, had

        async def empty() -> bool:
            return not room.nbytes and not room.waiting

        await eventually(empty, "an empty room")

    played(one_broker, scene)


def test_room_is_given_in_turn_and_a_buffer_that_is_too_large_gets_all_of_it() -> None:
    async def scene() -> None:
        room = Room(10)
        first = await room.buffer(4)
        large, small, gone = (asyncio.ensure_future(room.buffer(nbytes)) for nbytes in (11, 1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert (room.nbytes, room.waiting) == (4, 2), "nobody is overtaken"
        del first
        assert len(await large) == 11 and not small.done()
        # The last view goes in another thread.
        holder = [large.result()]
        del large
        await asyncio.to_thread(holder.clear)
        assert len(await small) == 1
        whole = asyncio.ensure_future(room.buffer(10))
        await asyncio.sleep(0)
        del small
        # The caller is cancelled with the room in hand.
        asyncio.get_running_loop().call_soon(whole.cancel)
        await asyncio.wait([whole])
        assert whole.cancelled() and room.nbytes == room.waiting == 0

    asyncio.run(scene())


def test_who_leaves_while_room_comes_free_is_cancelled_and_takes_no_room() -> None:
    async def scene() -> None:
        room = Room(10)
        first = await room.buffer(10)
        left, next_one = (asyncio.ensure_future(room.buffer(10)) for _ in range(2))
        await asyncio.sleep(0)
        # The room comes free between the cancellation and the next step of its task.
        del first
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()
        assert len(await next_one) == 10 and room.waiting == 0

    asyncio.run(scene())


def test_bytes_that_did_not_come_take_no_room_without_a_look_of_the_collector(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "there")
        gc.collect()
        gc.disable()
        try:
            for false in (
                msgspec.structs.replace(offer, nbytes=len(DATA) + 1),
                msgspec.structs.replace(offer, digest=bytes(32)),
                msgspec.structs.replace(offer, secret="0" * 64),
            ):
                with contextlib.suppress(TransferFailed):
                    await there.get(false, "here", MOST)

            async def empty() -> bool:
                return not there.room.nbytes

            await eventually(empty, "an empty room")
        finally:
            gc.enable()

    played(one_broker, scene)


def test_an_owner_that_has_gone_is_not_waited_for(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "")
        with pytest.raises(TransferFailed, match="does not send"):
            await there.get(offer, "nobody", MOST, lambda owner: False)

    played(one_broker, scene)


def test_an_owner_that_stands_still_holds_no_transfer_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays, and no byte comes."""

    async def scene() -> None:
        here = Transfers(Cluster(urls=("nats://127.0.0.1:1",)), "here", "here")
        ended = list[bool]()

        async def never(offer: Offer, data: memoryview) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        monkeypatch.setattr(module, "AGAIN_S", 0.001)
        monkeypatch.setattr(here._getter, "get", never)
        looks = iter([True, True, False])
        with pytest.raises(TransferFailed, match="has gone"):
            await here.get(Offer("s", 1, b"", "127.0.0.1:1"), "there", MOST, lambda owner: next(looks))
        await asyncio.sleep(0)
        assert ended == [True]

    asyncio.run(scene())


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


LOOPBACK = "127.0.0.1:0"


def test_bytes_come_by_http_and_each_peer_gets_them_once(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        for data in (DATA, DATA[:5], b"", LARGE):
            offer = await here.offer([data], "there")
            assert await there.get(offer, "here", MOST) == data
        assert here.by_http == 4 and here.sent_nbytes == len(DATA) + 5 + len(LARGE) and there.kept == 1
        again = await here.offer([DATA], "")
        assert await there.get(again, "here", MOST) == DATA
        assert here.by_http == 5
        assert await there.get(again, "here", MOST) == DATA
        assert here.by_http == 5 and here.refused == 1

    played(one_broker, scene, LOOPBACK)


def test_a_digest_is_that_of_the_bytes_in_whatever_pieces_they_arrive() -> None:
    async def digest(data: bytes, *steps: int) -> bytes:
        leaves = Leaves(memoryview(data))
        for step in steps:
            leaves.grown(step)
        return await leaves.digest()

    async def scene() -> None:
        leaves = [LARGE[at : at + LEAF_NBYTES] for at in range(0, len(LARGE), LEAF_NBYTES)]
        expected = hashlib.blake2b(b"".join(hashlib.sha256(leaf).digest() for leaf in leaves), digest_size=32)
        assert await digest(LARGE) == expected.digest()
        assert await digest(LARGE, 0, 1, LEAF_NBYTES, 2 * LEAF_NBYTES + 9, len(LARGE)) == expected.digest()
        found = {await digest(data) for data in (b"", b"x", LARGE[:-1], LARGE[:LEAF_NBYTES], LARGE)}
        assert len(found) == 5

    asyncio.run(scene())


def test_connections_to_a_host_that_has_gone_are_ended_with_the_next_transfer(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        former = Listener(Cluster(transfer_bind=LOOPBACK), lambda secret, peer: memoryview(DATA))
        await former.start()
        offer = await here.offer([DATA], "there")
        assert await there.get(msgspec.structs.replace(offer, address=former.address), "here", MOST) == DATA
        assert there.kept == 1
        await former.close()

        async def ended() -> bool:
            assert await there.get(await here.offer([DATA], "there"), "here", MOST) == DATA
            return there.kept == 1

        await eventually(ended, "one connection, to the host that is there")

    played(one_broker, scene, LOOPBACK)


def test_the_listener_has_a_line_as_long_as_other_listeners_have() -> None:
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())

    async def scene() -> None:
        listener = Listener(Cluster(transfer_bind=LOOPBACK), lambda secret, peer: None)
        await listener.start()
        assert listener._server is not None
        # `tcpi_sacked` of a listener: the length of its accept queue.
        told = listener._server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        assert int.from_bytes(told[28:32], sys.byteorder) == min(BACKLOG, somaxconn) > 100
        await listener.close()

    asyncio.run(scene())


def test_an_address_that_nobody_answers_at_leaves_the_bytes_to_the_broker(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([DATA], "there")
        for address in ("127.0.0.1:1", "nonsense", "a b:1", "127.0.0.1:99999"):
            there_only = msgspec.structs.replace(offer, address=address)
            assert await there.get(there_only, "here", MOST) == DATA
        assert not here.by_http

    played(one_broker, scene, LOOPBACK)


def test_everything_but_a_secret_of_ones_own_is_the_same_404(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        mine, others = await here.offer([DATA], "there"), await here.offer([DATA], "another")
        host, _, port = mine.address.rpartition(":")
        asked = [
            "GET / HTTP/1.1\r\n",
            f"GET /{'0' * 64} HTTP/1.1\r\nPenstock-Peer: there\r\n",
            f"GET /{others.secret} HTTP/1.1\r\nPenstock-Peer: there\r\n",
            f"GET /{mine.secret} HTTP/1.1\r\n",
            f"POST /{mine.secret} HTTP/1.1\r\nPenstock-Peer: there\r\n",
            f"GET /../{mine.secret} HTTP/1.1\r\nPenstock-Peer: there\r\n",
            "\x00\xff\r\n",
        ]
        answers = set()
        for head in asked:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode("latin-1") + b"\r\n")
            answers.add(await reader.read())
            writer.close()
        (answer,) = answers
        assert answer.startswith(b"HTTP/1.1 404 ") and not here.by_http
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /" + b"a" * 10_000)
        assert await reader.read() == b""
        writer.close()
        assert await there.get(mine, "here", MOST) == DATA and here.by_http == 1

    played(one_broker, scene, LOOPBACK)


def test_a_listener_leaves_clients_that_say_or_take_too_little_and_has_a_bound_of_clients(
    one_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = bytes(64 << 20)

    async def scene(here: Transfers, there: Transfers) -> None:
        offer = await here.offer([large], "slow")
        host, _, port = offer.address.rpartition(":")

        async def client(head: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(head.encode())
            return reader, writer

        async def is_alone() -> bool:
            return not here._listener._open

        monkeypatch.setattr("frontend.cluster.transfer_http.time_for", lambda nbytes: 0.05)
        slow, writer = await client(f"GET /{offer.secret} HTTP/1.1\r\nPenstock-Peer: slow\r\n\r\n")
        await slow.readexactly(20)
        await eventually(is_alone, "the end of a client that takes nothing")
        writer.close()
        monkeypatch.setattr(here._listener, "_cluster", Cluster(max_transfers=1))
        _, writer = await client()

        async def is_there() -> bool:
            return len(here._listener._open) == 1

        await eventually(is_there, "the only client")
        refused, other = await client()
        assert await refused.read() == b""
        other.close()
        monkeypatch.setattr("frontend.cluster.transfer_http.HEAD_S", 0.05)
        writer.close()
        await eventually(is_alone, "the end of the only client")
        silent, writer = await client()
        with contextlib.suppress(ConnectionResetError):
            assert await silent.read() == b""
        writer.close()

    played(one_broker, scene, LOOPBACK)


def test_bytes_that_were_changed_on_the_way_come_once_more_by_the_broker(one_broker: Broker) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA) + bytes(len(DATA)))
            await writer.drain()

        liar = await asyncio.start_server(lie, "127.0.0.1", 0)
        port = liar.sockets[0].getsockname()[1]
        offer = await here.offer([DATA], "there")
        false = msgspec.structs.replace(offer, address=f"127.0.0.1:{port}")
        assert await there.get(false, "here", MOST) == DATA
        liar.close()

    played(one_broker, scene)


def test_a_broker_whose_messages_hardly_hold_headers_brings_the_bytes_in_small_chunks(tmp_path: Path) -> None:
    async def scene(here: Transfers, there: Transfers) -> None:
        assert 0 < there.broker.inline_nbytes <= 512
        offer = await here.offer([DATA[:5000]], "there")
        assert await there.get(offer, "here", MOST) == DATA[:5000]

    with broker(tmp_path, jetstream=False, more="max_payload: 2048") as one:
        played(one, scene)


def certificates(place: Path) -> dict[str, str]:
    """Settings of a host of an authority of its own, with a certificate for 127.0.0.1."""
    place.mkdir()
    subprocess.run(
        [ROOT / "deploy/nats/certificates.sh", place, "127.0.0.1"], check=True, capture_output=True
    )
    files = {"tls_ca_file": "ca.pem", "tls_cert_file": "own.pem", "tls_key_file": "own.key"}
    return {name: str(place / "127.0.0.1" / file) for name, file in files.items()}


def test_transfers_are_encrypted_and_hosts_of_another_authority_get_nothing_by_http(tmp_path: Path) -> None:
    """A stranger that hears the offer has chunks over the brokers, which have checks of their own."""
    own, other = certificates(tmp_path / "own"), certificates(tmp_path / "other")
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(each["tls_ca_file"]).read_text() for each in (own, other)))
    other["tls_ca_file"] = own["tls_ca_file"]
    files = f'cert_file: "{own["tls_cert_file"]}", key_file: "{own["tls_key_file"]}", ca_file: "{both}"'

    async def scene(one: Broker) -> None:
        urls, bind = (one.url,), "127.0.0.1:0"
        here = Transfers(Cluster(urls=urls, transfer_bind=bind, **own), "here", "here")
        friend = Transfers(Cluster(urls=urls, **own), "there", "there")
        stranger = Transfers(Cluster(urls=urls, **other), "stranger", "stranger")
        ends = (here, friend, stranger)
        for end in ends:
            await end.start()
        try:

            async def joined() -> bool:
                return all(end.broker.up for end in ends)

            await eventually(joined, "all ends at the broker")
            offer = await here.offer([LARGE], "")
            assert await friend.get(offer, "here", MOST) == LARGE and here.by_http == 1
            assert await stranger.get(offer, "here", MOST) == LARGE and here.by_http == 1
            host, _, port = here.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /{offer.secret} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert b"HTTP" not in answer and len(answer) < 100, "no word in the clear"
            assert here.by_http == 1
        finally:
            for end in ends:
                await end.close()

    with broker(tmp_path / "broker", jetstream=False, more=f"tls {{{files}, verify: true}}") as one:
        uvloop.run(scene(one))
