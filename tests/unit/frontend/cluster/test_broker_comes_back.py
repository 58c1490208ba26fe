"""A connection to brokers comes back whatever a broker, a network, or a part of this process does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.errors import FlushTimeoutError

from frontend.cluster import broker as module
from frontend.cluster import broker_stream
from frontend.cluster.broker import Broker, QuickClient, ended
from frontend.cluster.broker_stream import ClosableTransport
from frontend.cluster.examining import look
from ipc.settings import Cluster
from tests.fakes.scripted_broker import GREETING, ScriptedBroker
from tests.harness.server import PATIENCE_S, eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_S", "TRY_AGAIN_S", "RECONNECT_WAIT_S"):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(broker_stream, "CLOSE_S", 0.02)


class Joined:
    """A broker, and a connection that has joined it."""

    PATIENCE_S = 20.0

    def __init__(self, broker: ScriptedBroker, end: Broker, heard: list[bytes]) -> None:
        self.broker, self.end, self.heard = broker, end, heard

    async def again(self, connections: int) -> None:
        """Wait for so many connections in all, of which the last one carries messages both ways."""

        async def joined() -> bool:
            return self.end.up and self.broker.connections >= connections

        await eventually(joined, f"connection {connections}", self.PATIENCE_S)
        self.heard.clear()
        self.end.send("there", b"to the broker")
        self.broker.say(b"MSG here 1 4\r\ngood\r\n")

        async def carried() -> bool:
            return self.heard == [b"good"] and b"to the broker\r\n" in self.broker.heard

        await eventually(carried, "a message each way", self.PATIENCE_S)


@asynccontextmanager
async def joined(*greetings: bytes) -> AsyncIterator[Joined]:
    broker, heard = ScriptedBroker(*greetings), list[bytes]()
    await broker.start()
    end = Broker(Cluster(urls=(broker.url,)), "test")
    end.listen("here", lambda message: heard.append(message.data))
    end.start()
    one = Joined(broker, end, heard)
    try:
        await one.again(1)
        yield one
    finally:
        await end.close()
        broker.stop()


def play(scene: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture) -> None:
    """Run on the loop of production. No task may end with an error that nobody has seen."""

    async def whole() -> None:
        untold: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: untold.append(context))
        await scene()
        assert not untold, untold

    uvloop.run(whole())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "odd",
    [
        b"INFO []\r\n",
        b"INFO\r\n",
        b"INFO " + b"x" * 200_000 + b"\r\n",
        b'INFO {"connect_urls": ["[::"]}\r\n',
    ],
    ids=["no object", "nothing", "too long", "no address"],
)
def test_a_client_whose_search_for_a_broker_ended_by_an_error_is_replaced(
    odd: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with joined(GREETING, odd, GREETING) as one:
            one.broker.hang_up()
            await one.again(3)

    play(scene, caplog)


def test_nothing_is_heard_before_a_connection_is_joined(caplog: pytest.LogCaptureFixture) -> None:
    """These bytes are in the clear, whoever wrote them, where TLS begins only after the first word of a broker."""

    async def scene() -> None:
        async with joined(GREETING, GREETING + b"MSG there 2 4\r\nevil\r\n") as one:
            heard: list[bytes] = []
            one.end.listen("there", lambda message: heard.append(message.data))

            async def hears() -> bool:
                return b"SUB there  2\r\n" in one.broker.heard

            await eventually(hears, "the second subscription")
            one.broker.hang_up()
            await one.again(2)
            one.broker.say(b"MSG there 2 4\r\ngood\r\n")

            async def told() -> bool:
                return b"good" in heard

            await eventually(told, "a message over the joined connection")
            assert heard == [b"good"]

    play(scene, caplog)


def test_no_secret_is_sent_in_the_clear_to_a_broker_that_asks_for_no_tls(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")

    async def scene() -> None:
        broker = ScriptedBroker()
        await broker.start()
        url = broker.url.replace("nats:", "tls:")
        cluster = Cluster(urls=(url,), user="u", password_file=str(tmp_path / "secret"))
        end = Broker(cluster, "test")
        end.start()

        async def tried_again() -> bool:
            return bool(broker.heard) or broker.connections > 1

        await eventually(tried_again, "another attempt")
        await end.close()
        assert not broker.heard
        ((is_fine, text),) = await asyncio.to_thread(list, look(cluster))
        assert not is_fine and "no TLS" in text and not broker.heard
        broker.stop()

    uvloop.run(scene())


def test_odd_words_of_a_broker_at_the_first_connect_are_no_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        broker = ScriptedBroker(b"INFO []\r\n", GREETING)
        await broker.start()
        end = Broker(Cluster(urls=(broker.url,)), "test")
        end.start()

        async def is_up() -> bool:
            return end.up

        await eventually(is_up, "a connection")
        await end.close()
        broker.stop()

    play(scene, caplog)
    assert "a client of the brokers is replaced" in caplog.text


def test_a_client_closes_although_commands_wait_for_a_connection_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The library would try to write the commands, fail, and never say that it has closed."""

    async def scene() -> None:
        async with joined() as one:
            first = one.end.client
            await first._send_command(b"PUB there  1\r\nx\r\n")
            assert isinstance(first._transport, ClosableTransport)
            first._transport.abort()
            await first.close()
            await one.again(2)
            assert one.end.client is not first

    play(scene, caplog)


def test_a_ping_over_a_connection_that_is_gone_begins_the_search_for_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        async with joined() as one:
            client = one.end.client
            client.options["ping_interval"] = 0
            assert isinstance(client._transport, ClosableTransport)
            client._transport.abort()
            await client._ping_interval()
            client.options["ping_interval"] = 60
            await one.again(2)
            assert one.end.client is client

    play(scene, caplog)


def test_a_client_that_reads_no_more_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PING_EVERY_S", 60)

    async def scene() -> None:
        async with joined() as one:
            one.broker.say(b"INFO {no object\r\n")
            await one.again(2)

    uvloop.run(scene())
    assert "it looks for no broker" in caplog.text


def test_a_client_that_closed_without_a_word_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        async with joined() as one:
            first, lost = one.end.client, list[bool]()
            one.end.on_down.append(lambda: lost.append(one.end.up))
            await first._close(first.CLOSED, False)
            await one.again(2)
            assert one.end.client is not first and lost == [False]

    play(scene, caplog)


def test_a_client_that_says_that_it_has_closed_is_replaced_though_it_is_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        async with joined() as one:
            first = one.end.client
            await one.end._ended()
            await one.again(2)
            assert one.end.client is not first and first.is_closed

    play(scene, caplog)


def test_no_task_of_a_client_that_is_replaced_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with joined() as one:

            async def drop(message: Msg) -> None:
                pass

            subscription = await one.end.client.subscribe("there", cb=drop)
            waiting = subscription._wait_for_msgs_task
            assert waiting is not None and not waiting.done()
            await one.end._ended()
            await one.again(2)
            assert waiting.done()

    play(scene, caplog)


def test_a_stop_while_a_broker_is_joined_ends_the_search_for_brokers() -> None:
    """The end of the connection and the cancellation come together."""

    async def scene() -> None:
        accepted = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set()
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        for _ in range(3):
            accepted.clear()
            end = Broker(Cluster(urls=(f"nats://127.0.0.1:{port}",)), "test")
            end.start()
            await accepted.wait()
            async with asyncio.timeout(PATIENCE_S):
                await end.close()
            assert all(task.done() for task in end._tasks)
        silent.close()

    asyncio.run(scene())


def test_a_task_that_loses_its_first_cancellation_is_cancelled_again() -> None:
    async def scene() -> None:
        lost: list[int] = []

        async def stubborn() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            lost.append(1)
            await asyncio.Event().wait()

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await ended([task])
        assert task.cancelled() and lost == [1]

    asyncio.run(scene())


def test_a_connection_is_closed_before_it_began(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        end = Broker(Cluster(urls=("nats://127.0.0.1:1",)), "test")
        end.start()
        await end.close()
        assert end.client.is_closed

    play(scene, caplog)


def test_a_part_that_fails_at_a_change_keeps_nobody_from_the_brokers() -> None:
    async def scene() -> None:
        async with joined() as one:
            told: list[str] = []

            def fail() -> None:
                raise ZeroDivisionError

            one.end.on_down += [fail, lambda: told.append("down")]
            one.end.on_up += [fail, lambda: told.append("up")]
            one.broker.hang_up()
            await one.again(2)
            assert told == ["down", "up"]

    uvloop.run(scene())


def test_a_search_for_a_broker_that_does_not_move_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.05)
    stuck = {"client": None}
    connect = QuickClient._connect_to_server

    async def hang(self: QuickClient, s: Srv) -> None:
        await connect(self, s)
        if self is stuck["client"]:
            await asyncio.Event().wait()

    monkeypatch.setattr(QuickClient, "_connect_to_server", hang)

    async def scene() -> None:
        async with joined() as one:
            stuck["client"] = one.end.client  # type: ignore[assignment]
            one.broker.hang_up()
            await one.again(3)

    play(scene, caplog)


def test_a_broker_that_takes_nothing_is_left_although_much_waits_to_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who closes a connection waits until all is written, which a broker that stands still never takes."""
    monkeypatch.setattr(module, "PING_EVERY_S", 0.05)

    async def scene() -> None:
        async with joined() as one:
            first = one.end.client
            one.broker.reads.clear()
            for _ in range(32):
                one.end.send("there", bytes(1 << 19))

            async def left() -> bool:
                return one.broker.connections > 1

            await eventually(left, "another connection")
            one.broker.reads.set()
            await one.again(2)
            assert one.end.client is first

    play(scene, caplog)


def test_a_late_answer_to_a_ping_ends_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with joined() as one:
            one.broker.is_quiet = True
            with pytest.raises(FlushTimeoutError):
                await one.end.client.flush(0.01)  # type: ignore[arg-type]
            one.broker.is_quiet = False
            one.broker.say(b"PONG\r\n")
            await one.again(1)
            await one.end.client.flush(5)
            assert one.broker.connections == 1

    play(scene, caplog)


@pytest.mark.parametrize("sid", [1, 2], ids=["ours", "of the library"])
@pytest.mark.parametrize(
    "message",
    [
        b"MSG \xff\xfe %d 1\r\nx\r\n",
        b"MSG here %d \xff\xfe 1\r\nx\r\n",
        b"HMSG here %d 4 5\r\nNATSx\r\n",
        b"HMSG here %d 15 16\r\nNATS/1.0 \xff\xff\xff\xff\r\nx\r\n",
        b"HMSG here %d 19 20\r\nNATS/1.0 503 \xff\xfe\r\n\r\nx\r\n",
    ],
    ids=["subject", "reply", "short head", "status", "description"],
)
def test_a_message_of_any_bytes_ends_itself_alone(
    message: bytes, sid: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with joined() as one:
            await one.end.client.subscribe("there")
            one.broker.say(message % sid)
            await one.again(1)
            await one.end.client.flush(5)
            assert one.broker.connections == 1

    play(scene, caplog)


def test_a_line_of_a_broker_that_does_not_end_ends_the_connection_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_stream, "MOST_LINE_NBYTES", 1000)

    async def scene() -> None:
        async with joined() as one:
            one.broker.say(b"INFO " + b"x" * 1000)
            await one.again(2)

    play(scene, caplog)


def test_a_request_waits_for_the_brokers_that_were_not_tried_since_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No clock ends a wait here, so each wait ends by what was found: another broker, and then none."""
    monkeypatch.setattr(module, "SEARCH_S", 1e6)

    async def scene() -> None:
        async with joined() as one:
            other = ScriptedBroker()
            await other.start()
            one.end.client._setup_server_pool([other.url])
            found: list[bool] = []

            async def ask() -> None:
                await one.end.found()
                found.append(one.end.up)

            tasks: list[asyncio.Task[None]] = []
            one.end.on_down.append(lambda: tasks.append(asyncio.create_task(ask())))
            for broker, expected in ((one.broker, [True]), (other, [True, False])):
                broker.stop()

                async def is_answered(expected: list[bool] = expected) -> bool:
                    return len(found) == len(expected)

                await eventually(is_answered, "the end of the wait", one.PATIENCE_S)
                assert found == expected

    play(scene, caplog)


def test_a_request_waits_for_no_broker_where_none_was_ever_there() -> None:
    async def scene() -> None:
        end = Broker(Cluster(urls=("nats://127.0.0.1:1",)), "test")
        await end.found()
        assert not end.up

    asyncio.run(scene())
