"""Items that another program than a gateway of ours puts into a queue, in the form of SIE's gateway.

1. `read_foreign` reads the fields of SIE beside those of `cluster.Item`. What a caller gave stays as it came (`Raw`).
   Inputs that lie in a store of payloads are read by the name that `named_payload` finds, and `with_payload` takes the
   bytes in.
2. `body_of` makes the msgpack body of the route of the item's operation, whose checks then hold for the item.
3. `part_of` finds in the answer of that route what SIE expects of one item.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ipc.errors import InvalidInput, ProtocolError

LOAD = "load"
"""Operation of an item without input, which asks to have its model loaded."""
MOST_NAME = 255
"""Characters of the name of a file."""
OPERATIONS = ("encode", "score", "extract")
_SHOWN = 64
_NONE = msgspec.Raw(b"\xc0")


class Foreign(msgspec.Struct, frozen=True):
    """What an item asks for. A payload that lies elsewhere is named by `payload_ref` or `query_payload_ref`."""

    operation: str
    model_id: str
    profile_id: str = ""
    item: msgspec.Raw = _NONE
    payload_ref: str | None = None
    output_types: msgspec.Raw = _NONE
    instruction: msgspec.Raw = _NONE
    is_query: msgspec.Raw = _NONE
    options: msgspec.Raw = _NONE
    query_item: msgspec.Raw = _NONE
    query_payload_ref: str | None = None
    score_items: msgspec.Raw = _NONE
    labels: msgspec.Raw = _NONE
    output_schema: msgspec.Raw = _NONE

    @property
    def model(self) -> str:
        """The name of the model with its profile."""
        return self.model_id if self.profile_id in ("", "default") else f"{self.model_id}:{self.profile_id}"


class _Items(msgspec.Struct):
    items: list[msgspec.Raw]


class _Pair(msgspec.Struct):
    query: msgspec.Raw = _NONE
    items: msgspec.Raw = _NONE


class _Scores(msgspec.Struct):
    scores: msgspec.Raw


_foreign = msgspec.msgpack.Decoder(Foreign)
_pair, _raw = msgspec.msgpack.Decoder(_Pair), msgspec.msgpack.Decoder(msgspec.Raw)
_items, _scores = msgspec.msgpack.Decoder(_Items), msgspec.msgpack.Decoder(_Scores)
_encoder = msgspec.msgpack.Encoder()


def read_foreign(data: bytes) -> Foreign:
    """The fields of SIE of an item. Raises `ProtocolError`."""
    try:
        return _foreign.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"undecodable item: {error}") from error


def named_payload(asked: Foreign, store: str) -> str:
    """The file of the directory `store` that has the inputs of an item; empty where the item itself has the inputs.

    Producers name the file, or `store` and the file. Raises `InvalidInput` for any other place.
    """
    in_pairs = asked.operation == "score"
    field = "query_payload_ref" if in_pairs else "payload_ref"
    reference = asked.query_payload_ref if in_pairs else asked.payload_ref
    if not reference or (asked.query_item if in_pairs else asked.item) != _NONE:
        return ""
    if not store:
        raise InvalidInput(
            f"{field}: this box reads no store of payloads (cluster.payload_store); send the item itself"
        )
    place, _, name = reference.rpartition("/")
    is_name = (
        name not in ("", ".", "..") and len(name) <= MOST_NAME and name.isprintable() and "\\" not in name
    )
    if not is_name or (place and place.rstrip("/") != store.rstrip("/")):
        raise InvalidInput(
            f"{field}: {reference[:_SHOWN]!a}: expected the name of a file of the store of payloads"
        )
    return name


def with_payload(asked: Foreign, payload: bytes) -> Foreign:
    """An item with its inputs, from the bytes that its reference names: an item, or query and items of a score.

    Raises `InvalidInput` for other bytes.
    """
    try:
        if asked.operation == "score":
            pair = _pair.decode(payload)
            return msgspec.structs.replace(asked, query_item=pair.query, score_items=pair.items)
        return msgspec.structs.replace(asked, item=_raw.decode(payload))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"payload_ref: the payload is no msgpack of an item: {str(error)[:_SHOWN]}"
        ) from error


def body_of(asked: Foreign) -> bytes:
    """The body of the route of the operation. Raises `InvalidInput` for what no route takes."""
    if asked.operation == "score":
        needed = {"query_item": asked.query_item, "score_items": asked.score_items}
        body: dict[str, Any] = {"query": asked.query_item, "items": asked.score_items}
        body |= _given(instruction=asked.instruction, options=asked.options)
    elif asked.operation in OPERATIONS:
        needed = {"item": asked.item}
        params = _given(instruction=asked.instruction, options=asked.options)
        if asked.operation == "encode":
            params |= _given(output_types=asked.output_types, is_query=asked.is_query)
        else:
            params |= _given(labels=asked.labels, output_schema=asked.output_schema)
        body = {"items": [asked.item], "params": params}
    else:
        raise InvalidInput(
            f"operation: {asked.operation[:_SHOWN]!a}: expected {', '.join((*OPERATIONS, LOAD))}"
        )
    missing = next((name for name, value in needed.items() if value == _NONE), "")
    if missing:
        raise InvalidInput(f"{missing}: missing in an item of {asked.operation}")
    return _encoder.encode(body)


def _given(**fields: msgspec.Raw) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in fields.items() if value != _NONE}


def part_of(operation: str, answer: bytes) -> bytes:
    """The msgpack of one result in an answer of the route of the operation; of a score the list of entries."""
    if operation == "score":
        return bytes(_scores.decode(answer).scores)
    return bytes(_items.decode(answer).items[0])
