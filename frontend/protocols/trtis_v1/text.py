"""Protobuf text: the one-line form of headers, the form of bodies, and the reader of `NV-InferRequest`."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf import text_format
from google.protobuf.message import Message

from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb

CACHED_CHARACTERS = 2048
"""Headers up to this length are remembered: clients send the same one again and again."""
MOST_MARKS = 8192
"""`MARKS` in a long header: what the parser takes most of its time for has at least one of them."""
MARKS = ":{}<>[],;\"'"


def one_line(message: Message) -> str:
    """The message as one line of ASCII, for a header."""
    return text_format.MessageToString(message, as_one_line=True, as_utf8=False)


def many_lines(message: Message) -> bytes:
    """The message as text, for a body; the entries of maps are sorted."""
    return text_format.MessageToString(message, as_utf8=False).encode("ascii")


def read_request_header(text: str | None) -> pb.InferRequestHeader:
    """The header of a request; treat it as read-only. Raises `InvalidInput` with the place of the mistake.

    One of more than `CACHED_CHARACTERS` takes up to 50 ms: too long for the event loop.
    """
    if text is None:
        raise InvalidInput("header NV-InferRequest is missing")
    if len(text) <= CACHED_CHARACTERS:
        return _remembered(text)
    if sum(map(text.count, MARKS)) > MOST_MARKS:
        raise InvalidInput(f"header NV-InferRequest has more than {MOST_MARKS} of the marks {MARKS}")
    return _parse(text)


def _parse(text: str) -> pb.InferRequestHeader:
    try:
        # NOTE: field values reach us as Latin-1; what was meant is UTF-8.
        return text_format.Parse(text.encode("latin-1").decode("utf-8"), pb.InferRequestHeader())
    except UnicodeError as error:
        raise InvalidInput(f"header NV-InferRequest is no UTF-8: {error}") from error
    except (text_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"header NV-InferRequest cannot be read at {str(error)[:300]}") from error


_remembered = lru_cache(maxsize=512)(_parse)
