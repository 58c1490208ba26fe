"""Sessions at the gRPC port: valid rpcs whose frames are changed, floods of frames, and what is no HTTP/2 at all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.fuzz import http2
from tests.fuzz.http2 import frame
from tests.fuzz.mutation import mutated
from tests.fuzz.session import Session, Step
from tests.fuzz.valid import REQUESTS

MOST_FLOOD = 300
"""Frames of a flood."""
_PATHS = ("/", "", "no path", "/inference.GRPCInferenceService/", "/inference.GRPCInferenceService/Nothing", "/\xff",
          "/grpc.health.v1.Health/Watch", "/inference.GRPCInferenceService/RepositoryIndex")  # fmt: skip
_FIELDS: tuple[dict[str, str], ...] = (
    *({"grpc-timeout": value} for value in ("0n", "99999999H", "x")),
    *({"grpc-encoding": value} for value in ("gzip", "none of these")),
    *({"x-request-id": value} for value in ("a\nb", "job\n", "\xff\xfe")),
    {"content-type": "text/html"},
    {"te": "x"},
    {"traceparent": "00-x"},
    {":method": "GET"},
    {":path": "*"},
    {"connection": "close"},
    {"x-bin": "\x80"},
    {"data-bin": "%%%"},
    {"authorization": "Bearer \xe9"},
    {"x-forwarded-for": "\xff"},
    {"x" * 300: "y" * 9000},
    {"UPPER": "case"},
    {"": "empty"},
)
_PAYLOADS = (b"", b"\0\0\0\0", b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\0\0\x08", bytes(8), bytes(5), b"\0\4\0\0\0\0",
             b"\0\5\0\0\0\0", b"\0\4\xff\xff\xff\xff")  # fmt: skip


def drawn(chance: Random) -> Session:
    """One session."""
    frames = chance.choice(_KINDS)(chance)
    steps: list[Step] = [("send", one) for one in _cut(chance, b"".join(frames))]
    if chance.random() < 0.3:
        steps.insert(chance.randint(0, len(steps)), ("wait", b""))
    if chance.random() < 0.4:
        steps.append((chance.choice(("half", "close", "reset")), b""))
    return Session("grpc", tuple(steps))


def _cut(chance: Random, data: bytes) -> list[bytes]:
    """The bytes in one piece, or in a few cut anywhere, perhaps without their end."""
    if chance.random() < 0.2:
        data = data[: chance.randint(0, len(data))]
    places = sorted(chance.randint(0, len(data)) for _ in range(chance.choice((0, 0, 1, 3))))
    ends = [*places, len(data)]
    return [data[start:end] for start, end in zip([0, *places], ends, strict=True) if end > start]


def _valid(chance: Random) -> list[bytes]:
    return [*http2.opening(), *http2.RPCS[chance.choice(list(http2.RPCS))]]


def _rearranged(chance: Random) -> list[bytes]:
    """Frames dropped, repeated and swapped, others put in between."""
    frames = _valid(chance)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(1, len(frames))
        change = chance.randrange(4)
        if change == 0:
            del frames[at : at + 1]
        elif change == 1:
            frames[at:at] = frames[at - 1 : at] * chance.randint(1, 5)
        else:
            frames.insert(at, _odd(chance))
    return frames


def _odd(chance: Random) -> bytes:
    """A frame of any kind with a payload that may fit or not."""
    payload = chance.choice((*_PAYLOADS, chance.randbytes(chance.randint(0, 40))))
    kind = chance.choice((*range(10), chance.randrange(256)))
    nbytes = chance.choice((None, None, None, 0, 1, 16384, 16385, 0xFFFFFF))
    stream = chance.choice((0, 1, 1, 2, 3, 5, 0x7FFFFFFF, 0xFFFFFFFF))
    return frame(kind, chance.randrange(64), stream, payload, nbytes)


def _headers(chance: Random) -> list[bytes]:
    """An rpc whose header fields are not those that they should be."""
    fields = http2.fields_of("/inference.GRPCInferenceService/ModelInfer") | chance.choice(_FIELDS)
    if chance.random() < 0.3:
        fields[":path"] = chance.choice(_PATHS)
    if chance.random() < 0.3:
        del fields[chance.choice(list(fields))]
    pairs = list(fields.items()) * chance.choice((1, 1, 1, 2))
    block = http2.block(pairs)
    if chance.random() < 0.3:
        block = mutated(chance, [block])
    body = http2.message(http2.kserve_infer("7").SerializeToString())
    opened = frame(http2.HEADERS, http2.END_HEADERS, 1, block)
    return [*http2.opening(), opened, frame(http2.DATA, http2.END_STREAM, 1, body)]


def _messages(chance: Random) -> list[bytes]:
    """Messages that are none, with lengths and flags that lie."""
    path, seed = chance.choice(
        (
            ("/inference.GRPCInferenceService/ModelInfer", http2.kserve_infer("7")),
            ("/inference.GRPCInferenceService/ModelStreamInfer", http2.kserve_typed()),
            ("/inference.GRPCInferenceService/ModelInfer", http2.kserve_image()),
            ("/nvidia.inferenceserver.GRPCService/Infer", http2.trtis_infer()),
            ("/nvidia.inferenceserver.GRPCService/StreamInfer", http2.trtis_infer()),
        )
    )
    frames = http2.opening() + http2.rpc(1, path)[:1]
    for _ in range(chance.randint(1, 4)):
        data = mutated(chance, [seed.SerializeToString()])
        nbytes = chance.choice((None, None, None, 0, len(data) + 1, 0xFFFFFFFF))
        whole = http2.message(data, chance.choice((0, 0, 0, 1, 255)), nbytes)
        frames += [frame(http2.DATA, 0, 1, whole[at : at + 16384]) for at in range(0, len(whole), 16384)]
    return [*frames, frame(http2.DATA, http2.END_STREAM, 1)]


def _flood(chance: Random) -> list[bytes]:
    """Many frames of one kind."""
    count = chance.randint(2, MOST_FLOOD)
    opened = frame(http2.HEADERS, 0, 1, http2.block(http2.fields_of("/grpc.health.v1.Health/Watch")))
    path = http2.block(http2.fields_of("/grpc.health.v1.Health/Watch"))
    floods: tuple[Callable[[], list[bytes]], ...] = (
        lambda: [frame(http2.SETTINGS)] * count,
        lambda: [frame(http2.SETTINGS, http2.ACK)] * count,
        lambda: [frame(http2.PING, 0, 0, bytes(8))] * count,
        lambda: [opened, *[frame(http2.CONTINUATION, 0, 1, http2.block({"a": "b"}))] * count],
        lambda: [opened, *[frame(http2.CONTINUATION, 0, 1)] * count],
        lambda: [
            part
            for n in range(count)
            for part in (
                frame(http2.HEADERS, http2.END_HEADERS, 2 * n + 1, path),
                frame(http2.RST_STREAM, 0, 2 * n + 1, b"\0\0\0\x08"),
            )
        ],
        lambda: [frame(http2.HEADERS, http2.END_HEADERS, 2 * n + 1, path) for n in range(count)],
        lambda: [frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")] * count,
        lambda: [frame(http2.PRIORITY, 0, 2 * n + 1, b"\0\0\0\1\0") for n in range(count)],
        lambda: [frame(http2.DATA, 0, 1)] * count,
    )
    return [*http2.opening(), *chance.choice(floods)()]


def _changed(chance: Random) -> list[bytes]:
    """A valid connection with wrong bytes."""
    return [mutated(chance, [b"".join(_valid(chance))])]


def _other(chance: Random) -> list[bytes]:
    """Another protocol, or none."""
    return [
        chance.choice(
            (
                REQUESTS[chance.choice(list(REQUESTS))].wire(),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(64),
                http2.PREFACE[: chance.randint(1, len(http2.PREFACE))],
                http2.PREFACE * 2,
                chance.randbytes(chance.randint(1, 400)),
            )
        )
    ]


_KINDS = (
    _valid,
    *[_rearranged] * 2,
    *[_headers] * 2,
    *[_messages] * 3,
    _flood,
    *[_changed] * 2,
    _other,
)
"""How sessions are made; what stands here more than once is chosen more often."""
