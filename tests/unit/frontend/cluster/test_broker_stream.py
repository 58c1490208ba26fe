"""What a broker sends, cut into commands: messages are heard at once, the library reads all else as it was sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from frontend.cluster.broker_stream import ClosableTransport, headers_of

OURS, OTHERS = 1, 2
Heard = tuple[int, bytes, bytes, bytes, bytes]


async def received(pieces: Sequence[bytes]) -> tuple[list[Heard], bytes]:
    """What a listener of the subscription `OURS` has heard of bytes that came in pieces, and what the library reads."""
    heard: list[Heard] = []

    def hear(sid: int, *message: bytes) -> bool:
        if sid == OURS:
            heard.append((sid, *message))  # type: ignore[arg-type]
        return sid == OURS

    protocol = ClosableTransport(hear)._reading(1 << 16)
    for piece in pieces:
        protocol.data_received(piece)
    protocol.stream.feed_eof()
    return heard, await protocol.stream.read()


SENT = (
    b"INFO {}\r\n",
    b"MSG a 1 2\r\n\r\n\r\n",
    b"PING\r\n",
    b"HMSG b 1 back 12 15\r\nNATS/1.0\r\n\r\nMSG\r\n",
    b"MSG c 2 r 5\r\nPONG\n\r\n",
    b"-ERR 'some\r\n",
    b"HMSG e 1 0 2\r\nhi\r\n",
    b"MSG d 1 r 0\r\n\r\n",
)


def test_messages_and_commands_are_told_apart_wherever_the_bytes_are_split() -> None:
    async def scene() -> None:
        whole = b"".join(SENT)
        cuts = [[whole], [bytes([each]) for each in whole]]
        cuts += [[whole[:at], whole[at:]] for at in range(1, len(whole))]
        cuts += [
            [whole[:at], whole[at:end], whole[end:]]
            for at, end in itertools.combinations(range(1, len(whole), 5), 2)
        ]
        for pieces in cuts:
            heard, read = await received(pieces)
            assert heard == [
                (OURS, b"a", b"", b"", b"\r\n"),
                (OURS, b"b", b"back", b"NATS/1.0\r\n\r\n", b"MSG"),
                (OURS, b"e", b"", b"", b"hi"),
                (OURS, b"d", b"r", b"", b""),
            ]
            assert read == SENT[0] + SENT[2] + SENT[4] + SENT[5]

    asyncio.run(scene())


def test_a_word_that_is_no_message_is_left_to_the_library() -> None:
    heard, read = asyncio.run(received([b"MSG\r\n", b"\xff\r\n", b"msg a 1 2\r\nhi\r\n"]))
    assert not heard and read == b"MSG\r\n\xff\r\nmsg a 1 2\r\nhi\r\n"


def test_a_message_is_told_by_a_tab_as_by_a_space() -> None:
    heard, read = asyncio.run(received([b"MSG\ta 1\t6\r\nPING\r\n\r\nPING\r\n"]))
    assert heard == [(OURS, b"a", b"", b"", b"PING\r\n")] and read == b"PING\r\n"


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a 1 many",
        b"MSG 5",
        b"MSG a 1 -5",
        b"MSG a 1 -15",
        b"MSG a 1 1_0",
        b"MSG a -1 2",
        b"MSG a 1 b c 2",
        b"MSG a 1 67108865",
        b"MSG a 1 " + b"9" * 5000,
        b"HMSG a 1 x 9",
        b"HMSG a 1 2",
        b"HMSG a 1 -3 10",
        b"HMSG a 1 11 10",
    ],
    ids=lambda line: line.decode()[:20],
)
def test_a_message_of_impossible_size_or_form_ends_its_connection(line: bytes) -> None:
    """A size below zero would have the same bytes read for ever, and a huge one would fill the memory."""

    async def scene() -> None:
        heard: list[bytes] = []

        def hear(sid: int, subject: bytes, *rest: bytes) -> bool:
            assert len(heard) < 10, "the same bytes are read for ever"
            heard.append(subject)
            return True

        protocol = ClosableTransport(hear)._reading(1 << 16)
        for piece in (b"MSG good 1 1\r\nx\r\n", line + b"\r\n", b"0123456789\r\n", b"MSG evil 1 1\r\nx\r\n"):
            protocol.data_received(piece)
        protocol.stream.feed_eof()
        with pytest.raises(ConnectionResetError, match="MSG"):
            await protocol.stream.read()
        assert heard == [b"good"] and not protocol._parts

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503", "Description": ""}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nA: b: c\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "A": "b: c"},
        ),
        (b"NATS/1.0\r\nA: caf\xe9\r\nB: c\r\n\r\n", {"A": "caf\ufffd", "B": "c"}),
        (b"NATS/1.0 later\r\nA: b\r\n\r\n", {"A": "b"}),
    ],
)
def test_headers_are_the_status_and_the_fields(block: bytes, headers: dict[str, str]) -> None:
    """As the library reads them; a value in another encoding than UTF-8 costs no message."""
    assert headers_of(block) == headers
