"""Bodies of multipart/form-data (RFC 7578), taken apart while they arrive.

1. `parts_of` yields (part, data): once with empty data when a part begins, then the data of the part in pieces.
   `held_parts` gives the same to a function that keeps the data in memory.
2. A part is known by its name, and by its file name where the part is a file. Names are UTF-8.
3. The body has a limit of its own, beside that of all bodies. Number and size of the heads of parts are bounded.
4. A body without its last boundary is refused, so that a client that was cut off stores nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from falcon.asgi import Request

from frontend.generation.errors import MalformedBody, WrongContentType
from frontend.http.bodies import BodyReader
from ipc.errors import BodyTooLarge

FRAMING_NBYTES = 1 << 20
"""Bytes of a body beside its files: boundaries, heads, small fields."""
MAX_PARTS = 1024
MAX_FIELD_NBYTES = 64 << 10
"""Bytes of a part that is a value and no file."""
_MOST_BOUNDARY = 70
"""Characters of a boundary, by RFC 2046."""


@dataclass(eq=False, slots=True)
class Part:
    """The head of a part; `filename` is None for a part that is no file."""

    name: str
    filename: str | None


async def parts_of(
    req: Request, bodies: BodyReader, deadline_ns: int, max_nbytes: int
) -> AsyncGenerator[tuple[Part, bytes], None]:
    """The parts of a body of at most `max_nbytes`.

    Raises `WrongContentType`, `MalformedBody`, and as `BodyReader.pieces` does.
    """
    parser = _Parser(_boundary(req))
    async for piece in bodies.pieces(req, deadline_ns, max_nbytes):
        parser.take(piece)
        for found in parser.taken():
            yield found
    parser.end()


@asynccontextmanager
async def held_parts(
    req: Request,
    bodies: BodyReader,
    deadline_ns: int,
    max_nbytes: int,
    take: Callable[[Part, bytes], object],
) -> AsyncGenerator[None, None]:
    """Give `take` the parts of a body, whose bytes count in the budget of bodies until the context ends.

    Entering raises as `parts_of` does.
    """
    parser, nbytes = _Parser(_boundary(req)), 0

    def parse(piece: bytes) -> None:
        nonlocal nbytes
        nbytes += len(piece)
        if nbytes > max_nbytes:
            raise BodyTooLarge(f"body: more than {max_nbytes} bytes")
        parser.take(piece)
        for part, data in parser.taken():
            take(part, data)

    if req.content_length is not None and req.content_length > max_nbytes:
        raise BodyTooLarge(f"body: {req.content_length} bytes, the limit is {max_nbytes}")
    async with bodies.pour(req, deadline_ns, parse):
        parser.end()
        yield


def _boundary(req: Request) -> bytes:
    from python_multipart.multipart import parse_options_header

    media, options = parse_options_header(req.content_type or "")
    if media != b"multipart/form-data":
        shown = f"got {media[:64].decode('latin-1')!a}" if media else "got none"
        raise WrongContentType(f"header Content-Type: expected multipart/form-data, {shown}")
    boundary: bytes = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise MalformedBody(f"header Content-Type: a boundary has 1 to {_MOST_BOUNDARY} characters")
    return boundary


class _Parser:
    """Gathers what a push parser tells of one piece of a body."""

    def __init__(self, boundary: bytes) -> None:
        from python_multipart.multipart import MultipartParser

        self._found: list[tuple[Part, bytes]] = []
        self._head: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._part: Part | None = None
        self._parts = 0
        self._is_over = False
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._take_data,
            "on_end": self._finish,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def take(self, piece: bytes) -> None:
        """Parse a piece. Raises `MalformedBody`."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise MalformedBody(f"body: malformed multipart: {str(error)[:200]}") from None

    def taken(self) -> list[tuple[Part, bytes]]:
        """What has been found since the last call."""
        pieces, self._found = self._found, []
        return pieces

    def end(self) -> None:
        """The body is over. Raises `MalformedBody` if the parts are not."""
        if not self._is_over:
            raise MalformedBody("body: ends before its last boundary")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise MalformedBody(f"body: more than {MAX_PARTS} parts")
        self._head.clear()

    def _end_header(self) -> None:
        self._head[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _open(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._head.get(b"content-disposition", b"").decode("latin-1"))
        if kind != b"form-data" or b"name" not in options:
            raise MalformedBody("body: a part has no Content-Disposition of form-data with a name")
        filename = options.get(b"filename")
        name = None if filename is None else filename.decode(errors="replace")
        self._part = Part(options[b"name"].decode(errors="replace"), name)
        self._found.append((self._part, b""))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        self._found.append((self._part, data[start:end]))

    def _finish(self) -> None:
        self._is_over = True


class Fields:
    """The values of small parts, by name; of several parts of a name the last."""

    def __init__(self) -> None:
        self._values: dict[str, bytearray] = {}
        self._parts: dict[str, Part] = {}

    def take(self, part: Part, data: bytes) -> None:
        """Add data of a part. Raises `MalformedBody` for a value that is too long."""
        if self._parts.get(part.name) is not part:
            self._parts[part.name], self._values[part.name] = part, bytearray()
        value = self._values[part.name]
        value += data
        if len(value) > MAX_FIELD_NBYTES:
            raise MalformedBody(f"{part.name[:64]}: more than {MAX_FIELD_NBYTES} bytes")

    def text(self, name: str) -> str:
        """A value without the spaces around; empty where no part has the name. Raises `MalformedBody`."""
        try:
            return self._values.get(name, b"").decode().strip()
        except UnicodeDecodeError:
            raise MalformedBody(f"{name}: the value is not UTF-8") from None
