"""Decodes bodies into typed structs; every failure becomes `InvalidInput`.

msgspec limits the depth. The search for repeated keys runs only if a key name occurs too often in the bytes, or may be
spelled with escapes, since a full check costs more than the decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgpack
import msgspec

from frontend.http.values import count, without_long_values
from ipc.errors import InvalidInput

T = TypeVar("T")

# Keys hold a to z and _, which writers do not escape; a key that is spelled so would not be found by its bytes.
_ESCAPED_KEY = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")


@lru_cache(maxsize=64)
def _decoder(kind: Any, binary: bool) -> Any:
    return msgspec.msgpack.Decoder(kind) if binary else msgspec.json.Decoder(kind)


def decode(body: bytes, kind: type[T], *, binary: bool) -> T:
    """Decode `body` into `kind`. Raises `InvalidInput` whose message holds the decoder's reason and JSON path."""
    form = "msgpack" if binary else "JSON"
    if not body:
        raise InvalidInput(f"body: empty, expected {form}")
    try:
        decoded: T = _decoder(kind, binary).decode(body)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise InvalidInput(f"body: {error}") from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"body: malformed {form}: {error}") from error
    except RecursionError as error:
        raise InvalidInput(f"body: {form} is nested too deeply") from error
    except (ValueError, OverflowError, MemoryError) as error:
        raise InvalidInput(f"body: {form} cannot be read: {str(error)[:200]}") from error
    return decoded


class Key:
    """A field's name as its bytes may lie in a body."""

    __slots__ = ("json", "name", "spellings")

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.json = b'"' + self.name + b'"'
        size = len(self.name)
        headers = (
            bytes([0xA0 | size]),
            *(head + bytes([size]) for head in (b"\xd9", b"\xda\0", b"\xdb\0\0\0")),
        )
        self.spellings = tuple(header + self.name for header in headers)

    def occurs_more(self, body: bytes, times: int, binary: bool) -> bool:
        """Whether the name may occur as a key more than `times`."""
        if not binary:
            return count(body, self.json, times) > times
        if count(body, self.name, times) <= times:
            return False
        return sum(count(body, spelling, times) for spelling in self.spellings) > times


def refuse_repeated(
    body: bytes, once: Sequence[Key], often: Sequence[tuple[Key, int]] = (), *, binary: bool
) -> None:
    """Raise `InvalidInput` for a key that occurs twice in one object.

    Keys in `once` belong to one object, those in `often` to as many objects as their number says. A body in which none
    occurs more often than that is taken to be without repetition.
    """
    names = without_long_values(body, binary)
    suspicious = not binary and b"\\u00" in names and _ESCAPED_KEY.search(names) is not None
    for key in once:
        suspicious = suspicious or key.occurs_more(names, 1, binary)
    for key, times in often:
        suspicious = suspicious or key.occurs_more(names, times, binary)
    if suspicious:
        _refuse_duplicates(body, binary)


def _refuse_duplicates(body: bytes, binary: bool) -> None:
    def check(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidInput(f"body: key {str(key)[:64]!r} occurs twice in one object")
            seen.add(key)
        return dict(pairs)

    try:
        if binary:
            msgpack.unpackb(body, object_pairs_hook=check, strict_map_key=False, raw=False)
        else:
            json.loads(body, object_pairs_hook=check)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput("body: repeated keys could not be ruled out") from error
