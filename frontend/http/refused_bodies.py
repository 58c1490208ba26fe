"""The model that a refused body names: requests are counted by their model, also those with a mistake elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec


class _Named(msgspec.Struct):
    """A body of which the name of the model alone is read."""

    model: Any = None


_JSON = msgspec.json.Decoder(_Named)
_MSGPACK = msgspec.msgpack.Decoder(_Named)


def model_in(body: bytes, *, binary: bool = False) -> str:
    """The `model` of a body of JSON, or of msgpack if `binary`; empty where the body names none or cannot be read."""
    try:
        found = (_MSGPACK if binary else _JSON).decode(body).model
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return ""
    return found if isinstance(found, str) else ""
