"""Sessions at the HTTP port: requests by a grammar, their framing, their bytes and their order spoilt.

1. A request is a valid one, with some of it replaced: method, target, version, header fields, bytes of the body.
2. Its body is framed by its length or in pieces, rightly or not.
3. A session has one or several requests behind each other, cut anywhere, with pauses, and ends in one of many ways.
"""

from __future__ import annotations

from random import Random

from tests.fuzz import http2
from tests.fuzz.mutation import MOST_NBYTES, mutated
from tests.fuzz.session import Session, Step
from tests.fuzz.valid import LENGTH, REQUESTS, Valid

METHODS = (
    "GET",
    "POST",
    "PUT",
    "HEAD",
    "OPTIONS",
    "DELETE",
    "PATCH",
    "CONNECT",
    "TRACE",
    "PRI",
    "get",
    "",
    "G T",
)
VERSIONS = (
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/2.0",
    "HTTP/1.10",
    "HTTP/1.",
    "http/1.1",
    "",
    "RTSP/1.0",
)
_TARGETS = """
    /v2/models/add_sub/versions/99/infer /v2/models/../add_sub/infer /v2/models/%2e%2e/infer /v2/models//infer
    /v2/models/add_sub/infer?x=%ff /v2/models/%ff%fe/infer /v2/models/add_sub%00/infer /v2/models/add_sub/generate
    /v2/models/stats?x=1 /v2/repository/models/add_sub/load /v2/trace/setting /v2/systemsharedmemory/region/a/register
    /v2/cudasharedmemory/region/a/register /v2#x /api/infer/add_sub/-1 /api/infer/add_sub/99999999999999999999
    /api/infer/%0d%0aX:y /api/status/%e2%82 /api/status?format=binary&format=text /api/health/%ff /api/profile
    /api/modelcontrol/load/add_sub /api/sharedmemorycontrol/register/a//client_x/0/64 /api/sharedmemorycontrol/status
    /api/sharedmemorycontrol/cudaregister/a/64/0 /v1/encode/nothing /v1/encode/fake%2Fecho /v1/admin/load/x /v1/config
    * http://a/v2 http://[::1 // ? # /ws/status /docs"""
TARGETS = (*_TARGETS.split(), "/" + "a" * 9000, "/\xff", "")
_FIELDS = f"""
    Expect: 100-continue
    Expect: x
    Connection: close
    Connection: keep-alive, upgrade
    Upgrade: h2c
    Upgrade: websocket
    Transfer-Encoding: identity
    Transfer-Encoding: gzip, chunked
    Transfer-Encoding: xchunked
    Transfer-Encoding: chunked, chunked
    Content-Length: -1
    Content-Length: +5
    Content-Length: 0x10
    Content-Length: 5, 5
    Content-Length: 18446744073709551616
    Content-Length:
    Content-Type: application/msgpack
    Content-Type: \xff
    Content-Encoding: gzip
    Content-Encoding: deflate
    Content-Encoding: br
    Host: other
    Host:
    Accept: application/msgpack
    Accept: \xff
    Accept-Encoding: gzip
    Accept-Encoding: deflate;q=0.1, *;q=0
    {LENGTH}: 0
    {LENGTH}: -1
    {LENGTH}: 99999999999999999999
    {LENGTH}: \xb2
    NV-InferRequest: batch_size: 1 input {{ name: "\xff" }}
    X-Request-ID: \xe9
    X-Request-Timeout: 0.001
    X-Request-Timeout: nan
    X-Request-Timeout: -1
    X-SIE-MACHINE-PROFILE: \xff
    X-Forwarded-For: \xff
    Authorization: Basic \xff
    Origin: http://\xff
    Range: bytes=0-1
    If-None-Match: "x
    Date: yesterday
    a b: c
    : d"""
FIELDS = (
    *(
        (name, value.strip())
        for name, _, value in (line.strip().partition(":") for line in _FIELDS.split("\n")[1:])
    ),
    ("X-Request-ID", "a" * 200),
    ("traceparent", "00-" + "0" * 32),
    ("Cookie", "a=b; " * 2000),
    ("NV-InferRequest", "input {" * 3000),
    ("A" * 3000, "b"),
)
CHUNK_SIZES = (b"", b"0", b"-1", b"ffffffffffffffff", b"10000000000000000", b"0x5", b" 5", b"5 ", b"g", b"00000005",
               b'5;ext="\xff"')  # fmt: skip
HANDSHAKE = (
    b"GET /ws/status HTTP/1.1\r\nHost: fuzz\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def drawn(chance: Random) -> Session:
    """One session."""
    roll = chance.random()
    if roll < 0.06:
        return Session("http", tuple(_steps(chance, _other(chance))))
    if roll < 0.12:
        return Session("http", tuple(_steps(chance, [HANDSHAKE, _websocket_frames(chance)])))
    requests = [_request(chance) for _ in range(chance.choice((1, 1, 1, 2, 3, 8)))]
    if chance.random() < 0.3:
        at = chance.randrange(len(requests))
        requests[at] = mutated(chance, [requests[at]])
    return Session("http", tuple(_steps(chance, requests)))


def _steps(chance: Random, parts: list[bytes]) -> list[Step]:
    """These bytes in pieces, perhaps not all of them, and how the session ends."""
    data = b"".join(parts)
    if chance.random() < 0.15:
        data = data[: chance.randint(0, len(data))]
    how = chance.random()
    if how < 0.1 and len(data) < 400:
        pieces = [data[at : at + 1] for at in range(len(data))]
    else:
        places = sorted(chance.randint(0, len(data)) for _ in range(chance.choice((0, 0, 1, 2, 6))))
        pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    steps: list[Step] = [("send", piece) for piece in pieces if piece]
    for verb in ("wait", "half"):
        if chance.random() < 0.12:
            steps.insert(chance.randint(0, len(steps)), (verb, b""))
    if chance.random() < 0.3:
        steps.append((chance.choice(("half", "close", "reset")), b""))
    return steps


def _request(chance: Random) -> bytes:
    valid = REQUESTS[chance.choice(list(REQUESTS))]
    if chance.random() < 0.3:
        return valid.wire()
    method, target, version = valid.method, valid.path, "HTTP/1.1"
    if chance.random() < 0.1:
        method = chance.choice(METHODS)
    if chance.random() < 0.15:
        target = chance.choice(TARGETS)
    if chance.random() < 0.07:
        version = chance.choice(VERSIONS)
    fields, body = _fields(chance, valid), valid.body
    if body and chance.random() < 0.5:
        body = mutated(chance, [body])
    framing, framed = _framed(chance, body)
    fields += framing
    if chance.random() < 0.1:
        chance.shuffle(fields)
    return _head(chance, f"{method} {target} {version}", fields) + framed


def _fields(chance: Random, valid: Valid) -> list[tuple[str, str]]:
    fields = [("Host", "fuzz"), *valid.headers.items()]
    for _ in range(chance.choice((0, 0, 1, 1, 3))):
        fields.insert(chance.randint(0, len(fields)), chance.choice(FIELDS))
    if chance.random() < 0.1:
        fields.append(chance.choice(fields))
    if chance.random() < 0.1:
        del fields[chance.randrange(len(fields))]
    if fields and chance.random() < 0.25:
        at = chance.randrange(len(fields))
        name, value = fields[at]
        fields[at] = (
            name,
            mutated(chance, [value.encode("latin-1")])[:4096].decode("latin-1").replace("\n", ""),
        )
    if chance.random() < 0.02:
        fields += [("X-Many", "y" * chance.choice((10, 1000)))] * 300
    return fields


def _head(chance: Random, start: str, fields: list[tuple[str, str]]) -> bytes:
    end = "\n" if chance.random() < 0.03 else "\r\n"
    between = chance.choice((": ", ": ", ": ", ": ", ":", " : ", ":\t", "", ":\0"))
    lines = [start, *(f"{name}{between if chance.random() < 0.1 else ': '}{value}" for name, value in fields)]
    if chance.random() < 0.03:
        lines.insert(1, " folded")
    return (end.join(lines) + end + end).encode("latin-1")


def _framed(chance: Random, body: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """The fields that frame a body, and the body."""
    roll = chance.random()
    if roll < 0.5:
        return ([("Content-Length", str(len(body)))] if body else []), body
    if roll < 0.62:
        lie = len(body) + chance.choice((-1, 1, -len(body), 1000, MOST_NBYTES, 1 << 24))
        return [("Content-Length", str(max(0, lie)))], body
    if roll < 0.67:
        return [("Content-Length", str(len(body))), ("Transfer-Encoding", "chunked")], body
    if roll < 0.7:
        return [], body
    return [("Transfer-Encoding", "chunked")], _chunked(chance, body)


def _chunked(chance: Random, body: bytes) -> bytes:
    """A body in pieces: of one byte or of many, perhaps with a wrong size among them, or without its end."""
    size = chance.choice((1, 7, 1000, len(body) or 1))
    size = max(size, len(body) // 500)
    parts = []
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        stated = b"%x" % len(piece)
        if chance.random() < 0.3 / (1 + len(body) / size):
            stated = chance.choice(CHUNK_SIZES)
        parts.append(stated + b"\r\n" + piece + chance.choice((b"\r\n",) * 20 + (b"\n", b"")))
    trailer = chance.choice(
        (b"", b"", b"", b"X: y\r\n", b"Content-Length: 5\r\n", b"Z: " + b"z" * 5000 + b"\r\n")
    )
    parts.append(chance.choice((b"0\r\n" + trailer + b"\r\n",) * 8 + (b"", b"0\r\n", b"0")))
    return b"".join(parts)


def _websocket_frames(chance: Random) -> bytes:
    """Frames of a client, most of them wrong (RFC 6455, section 5.2)."""
    parts = []
    for _ in range(chance.randint(0, 20)):
        payload = chance.randbytes(chance.choice((0, 1, 2, 20, 125)))
        mask = chance.choice((0x80, 0x80, 0x80, 0))
        head = bytes([chance.choice((0x81, 0x82, 0x88, 0x89, 0x8A, 0x01, 0x00, 0xF1, chance.randrange(256)))])
        length = chance.choice(
            (
                bytes([mask | len(payload)]),
                bytes([mask | 126]) + b"\xff\xff",
                bytes([mask | 127]) + b"\xff" * 8,
            )
        )
        parts.append(head + length + (bytes(4) if mask else b"") + payload)
    return b"".join(parts)


def _other(chance: Random) -> list[bytes]:
    """Another protocol, or none."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(64)
    rpc = [*http2.opening(), *http2.RPCS["kserve-infer"]]
    return chance.choice(
        (
            rpc,
            [hello],
            [http2.PREFACE],
            [chance.randbytes(chance.randint(1, 300))],
            [b"\r\n" * 50],
            [b"\0" * 100],
            [],
        )
    )
