"""`output_schema` as the families read it that fill fields with what they find in a text.

The names of the schema's `properties` are the labels to look for. A property of type "array" collects all texts found
under its name, any other takes the likeliest one, or null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity
from ipc.wire.messages import ExtractCall

Fields = Mapping[str, bool]
"""Field names in order, with whether a field collects many texts."""

MOST_FIELDS = 200
LONGEST_NAME = 200


def fields_of(call: ExtractCall) -> Fields:
    """The fields of a call's schema, none without one. Raises `InvalidInput` for a schema of another form."""
    schema = call.output_schema
    if schema is None:
        return {}
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        raise InvalidInput("params.output_schema.properties: a map with at least one field is needed")
    if len(properties) > MOST_FIELDS:
        raise InvalidInput(
            f"params.output_schema.properties: {len(properties)} given, the limit is {MOST_FIELDS}"
        )
    return {_name(name): _collects(name, value) for name, value in properties.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidInput(
            f"params.output_schema.properties: {str(name)[:64]!r} must be 1 to {LONGEST_NAME} printable characters"
        )
    return name


def _collects(name: str, value: Any) -> bool:
    kind = value.get("type", "string") if isinstance(value, dict) else None
    items = value.get("items") if isinstance(value, dict) else None
    nested = isinstance(items, dict) and items.get("type", "string") != "string"
    if kind not in ("string", "array") or nested:
        raise InvalidInput(
            f"params.output_schema.properties.{name[:64]}: only strings and arrays of strings can be filled"
        )
    return bool(kind == "array")


def filled(fields: Fields, entities: Sequence[Entity]) -> dict[str, Any]:
    """What was found, by field."""
    data: dict[str, Any] = {}
    for name, collects in fields.items():
        found = [entity for entity in entities if entity.label == name]
        if collects:
            data[name] = [entity.text for entity in found]
        else:
            data[name] = max(found, key=lambda entity: entity.score).text if found else None
    return data
