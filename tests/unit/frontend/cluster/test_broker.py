"""One connection to brokers: what the client library gives up on begins anew."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlparse

import nats
import nkeys
import pytest
import uvloop
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg

from frontend.cluster import broker as module
from frontend.cluster.broker import Broker, Message, QuickClient, lasting
from frontend.cluster.broker_stream import ClosableTransport
from frontend.cluster.bucket import Writer
from ipc.errors import QueueUnavailable
from ipc.settings import Cluster
from ipc.wire.cluster_names import Names
from tests.harness.broker import broker
from tests.harness.server import ROOT, eventually


def test_a_connection_that_a_broker_refused_by_a_word_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRY_AGAIN_S", 0.05)
    most = "max_connections: {}"
    with broker(tmp_path, jetstream=False, more=most.format(9)) as one:

        async def scene() -> None:
            heard: list[bytes] = []
            end = Broker(Cluster(urls=(one.url,)), "test")
            end.listen("here", lambda message: heard.append(message.data))
            end.start()

            async def joined() -> bool:
                return end.up

            async def refused() -> bool:
                return end.client.is_closed and not end.up

            await eventually(joined, "the broker")
            first = end.client
            for count, state in ((0, refused), (9, joined)):
                one.configure(most.format(count))
                await eventually(state, f"{count} connections")
            assert end.client is not first
            end.listen("there", lambda message: heard.append(message.data))
            await end.client.flush()
            end.send("there", b"later")
            end.send("here", b"again")

            async def arrived() -> bool:
                return heard == [b"later", b"again"]

            await eventually(arrived, "a message")
            await end.close()

        asyncio.run(scene())


def test_a_loop_that_fails_is_written_and_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TRY_AGAIN_S", 0.0)
    runs = []

    async def run() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ZeroDivisionError("the first time")

    asyncio.run(lasting(run))
    assert len(runs) == 2 and "ZeroDivisionError" in caplog.text


def test_what_waited_for_a_broker_that_is_lost_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(client: QuickClient, messages: Sequence[Message], failed: Callable[[str], None]) -> None:
        written.extend(subject for subject, *_ in messages)

    monkeypatch.setattr(QuickClient, "write", write)

    async def scene() -> None:
        end = Broker(Cluster(urls=("nats://127.0.0.1:1",)), "test")
        await end._connected()
        end.send("stale", b"")
        await end._lost()
        with pytest.raises(QueueUnavailable):
            end.send("refused", b"")
        assert not end.say("lost", b"")
        await end._connected()
        end.send("fresh", b"")
        await asyncio.sleep(0)
        assert written == ["fresh"]

    asyncio.run(scene())


def test_brokers_that_fail_by_turns_are_written_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        end = Broker(Cluster(urls=("nats://127.0.0.1:1", "nats://127.0.0.1:2")), "test")
        for _ in range(3):
            for port in (1, 2):
                await end._failed(OSError(f"port {port} refuses"))
        lines = [line for line in caplog.messages if line.startswith("brokers: ")]
        assert lines == ["brokers: port 1 refuses", "brokers: port 2 refuses"]
        await end._connected()
        await end._failed(OSError("port 1 refuses"))
        assert caplog.messages.count("brokers: port 1 refuses") == 2

    asyncio.run(scene())


def test_a_broker_without_jetstream_is_written_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with broker(tmp_path, jetstream=False) as one:

        async def scene() -> None:
            end = Broker(Cluster(urls=(one.url,)), "test")
            end.start()

            async def joined() -> bool:
                return end.up

            await eventually(joined, "the broker")
            writer = Writer(end, Names())
            for _ in range(3):
                assert not await writer.write({})
            await end.close()

        asyncio.run(scene())
    assert sum("the bucket of models cannot be written" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "parts", [("here." + "x" * 5000, ""), ("here", "x" * 5000), ("here", "\u00e4" * 1100)]
)
def test_a_subject_that_is_too_long_ends_its_message_alone(tmp_path: Path, parts: tuple[str, str]) -> None:
    with broker(tmp_path, jetstream=False) as one:

        async def scene() -> None:
            heard: list[bytes] = []
            lost: list[bool] = []
            end = Broker(Cluster(urls=(one.url,)), "test")
            end.listen("here", lambda message: heard.append(message.data))
            end.on_down.append(lambda: lost.append(True))
            end.start()

            async def joined() -> bool:
                return end.up

            async def arrived() -> bool:
                return heard == [b"good"]

            await eventually(joined, "the broker")
            end.send(parts[0], b"bad", parts[1])
            end.send("here", b"good")
            await eventually(arrived, "the message behind")
            assert not lost
            await end.close()

        asyncio.run(scene())


def test_a_write_to_a_connection_that_the_broker_closed_is_an_error_of_the_network() -> None:
    """The client library looks for another broker after an `OSError`; uvloop raises a `RuntimeError` here."""

    async def scene() -> None:
        async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = QuickClient()
        client.options["connect_timeout"] = 5
        await client._connect_to_server(Srv(urlparse(f"nats://{host}:{port}")))
        transport = client._transport
        assert isinstance(transport, ClosableTransport)

        async def closed() -> bool:
            try:
                transport.write(b"PING\r\n")
            except ConnectionResetError as error:
                return "closed" in str(error)
            return False

        await eventually(closed, "the end of the connection")
        with pytest.raises(ConnectionResetError, match="closed"):
            transport.writelines([b"PING\r\n"])
        client._status = Client.CONNECTED
        told: list[str] = []
        client.write([("here", b"lost", "", None)], told.append)
        assert told and "closed" in told[0] and not client._pending
        server.close()

    uvloop.run(scene())


def certificates(place: Path, days: str) -> str:
    """Certificates of one host by the script of the deployment; returns the lines that a broker needs for them."""
    shutil.rmtree(place / "h", ignore_errors=True)
    subprocess.run(
        [ROOT / "deploy/nats/certificates.sh", place, "h"],
        env=os.environ | {"DAYS": days},
        check=True,
        capture_output=True,
    )
    files = ", ".join(f'{kind}_file: "{place}/h/{name}"' for kind, name in FILES.items())
    return f"tls {{{files}, verify: true}}"


FILES = {"ca": "ca.pem", "cert": "own.pem", "key": "own.key"}


def test_a_broker_with_an_expired_certificate_is_refused_by_name_until_it_has_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, old = tmp_path / "good", tmp_path / "old"
    own = certificates(good, "30")
    shutil.copytree(good, old)
    expired = certificates(old, "-1")
    ca, cert, key = (str(good / "h" / name) for name in FILES.values())
    with broker(tmp_path / "broker", jetstream=False, more=expired) as one:

        async def scene() -> None:
            end = Broker(
                Cluster(urls=(one.url,), tls_ca_file=ca, tls_cert_file=cert, tls_key_file=key), "test"
            )
            end.start()

            async def refused() -> bool:
                return "certificate has expired" in caplog.text

            async def joined() -> bool:
                return end.up

            await eventually(refused, "the refusal of the certificate")
            assert not end.up
            one.configure(own)
            await eventually(joined, "the broker with another certificate")
            transport = end.client._transport
            assert isinstance(transport, ClosableTransport) and transport._io_reader and transport._io_writer
            transport._io_reader.feed_data(bytes(1 << 17))
            assert not transport._io_writer.transport.is_reading(), "more comes than the library has read"
            await end.close()

        uvloop.run(scene())
    assert "Traceback" not in caplog.text


def test_a_slow_consumer_that_the_broker_has_left_comes_back(tmp_path: Path) -> None:
    """The broker ends the connection of whoever does not read; the messages are lost, the connection is not."""
    with broker(tmp_path, jetstream=False, more="max_pending: 1MB") as one:
        block, heard = threading.Event(), list[bytes]()

        def hear(message: Msg) -> None:
            heard.append(bytes(message.data[:4]))
            if message.data[:4] == b"wait":
                block.wait(60)

        async def slow(ends: asyncio.Event) -> None:
            end = Broker(Cluster(urls=(one.url,)), "slow")
            end.listen("here", hear)
            end.start()
            await ends.wait()
            await end.close()

        loop, ends = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(slow(ends),), daemon=True)
        thread.start()

        async def scene() -> None:
            sender = await nats.connect(one.url)

            async def reaches(word: bytes) -> None:
                async def reached() -> bool:
                    await sender.publish("here", word)
                    await sender.flush()
                    return word in heard

                await eventually(reached, f"{word!r} at the other end")

            async def is_left() -> bool:
                for _ in range(16):
                    await sender.publish("here", bytes(1 << 19))
                await sender.flush()
                return "Slow Consumer" in one.log

            await reaches(b"wait")
            await eventually(is_left, "the word of the broker about a slow consumer")
            block.set()
            await reaches(b"good")
            await sender.close()

        try:
            asyncio.run(scene())
        finally:
            block.set()
            loop.call_soon_threadsafe(ends.set)
            thread.join(60)
        assert not thread.is_alive()
        loop.close()


def jwt(signs: nkeys.KeyPair, subject: nkeys.KeyPair, name: str, kind: str, **claims: object) -> str:
    """A token of NATS about `subject`, signed by `signs`."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    body = {
        "jti": name,
        "iat": 1_700_000_000,
        "iss": signs.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": name,
        "nats": {"type": kind, "version": 2, **claims},
    }
    signed = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{signed}.{base64.urlsafe_b64encode(signs.sign(signed.encode())).decode().rstrip('=')}"


def key_pair(prefix: int) -> nkeys.KeyPair:
    """A new key of the kind that `prefix` says."""
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), prefix))


def test_a_credentials_file_proves_who_connects(tmp_path: Path) -> None:
    operator, account, user = map(
        key_pair, (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    own_account = jwt(operator, account, "account", "account", limits=limits)
    more = f"""
        operator: {jwt(operator, operator, "operator", "operator")}
        resolver: MEMORY
        resolver_preload: {{ {account.public_key.decode()}: {own_account} }}
    """
    file = tmp_path / "credentials"
    with broker(tmp_path, jetstream=False, more=more) as one:

        def write(signs: nkeys.KeyPair) -> None:
            token = jwt(signs, user, "user", "user", subs=-1, data=-1, payload=-1)
            file.write_text(
                f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
            )

        async def scene() -> None:
            end = Broker(Cluster(urls=(one.url,), credentials_file=str(file)), "test")
            end.start()

            async def refused() -> bool:
                return "authentication error" in one.log.lower() and not end.up

            async def joined() -> bool:
                return end.up

            await eventually(refused, "a refusal of a token that the user signed")
            # The file is read at every connect.
            write(account)
            await eventually(joined, "the broker")
            await end.close()

        write(user)
        asyncio.run(scene())
