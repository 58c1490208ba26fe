"""Bodies to typed structs, with every way in which that can fail turned into `InvalidInput`.

Depth is limited by msgspec itself. Duplicate keys are searched for only when a key name occurs more often in the bytes
than it may, since a full check costs more than the decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgpack
import msgspec

from ipc.errors import InvalidInput

T = TypeVar("T")


@lru_cache(maxsize=64)
def _decoder(kind: Any, binary: bool) -> Any:
    return msgspec.msgpack.Decoder(kind) if binary else msgspec.json.Decoder(kind)


def decode(body: bytes, kind: type[T], *, binary: bool, once: Sequence[str] = ()) -> T:
    """Decode `body` into `kind`. Keys in `once` may not be repeated within one object.

    Raises `InvalidInput` whose message holds the decoder's reason and JSON path.
    """
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
    if any(body.count(_key(name, binary)) > 1 for name in once):
        _refuse_duplicates(body, binary)
    return decoded


def _key(name: str, binary: bool) -> bytes:
    return bytes([0xA0 | len(name)]) + name.encode() if binary else b'"' + name.encode() + b'"'


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
