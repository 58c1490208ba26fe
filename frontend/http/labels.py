"""Labels and output schema of an extract request, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.errors import InvalidInput
from ipc.settings import Limits

LONGEST_LABEL = 500
"""Characters of one label."""
LARGEST_SCHEMA = 64 << 10
"""Bytes of an output schema as msgpack."""


def check_labels(labels: Sequence[str] | None, limits: Limits, field: str = "params.labels") -> list[str]:
    """The labels in the caller's order, each once. Raises `InvalidInput` for an unusable label of `field`."""
    given = list(labels or ())
    check_label_count(len(given), limits, field)
    for index, label in enumerate(given):
        where = f"{field}[{index}]"
        if not label.strip():
            raise InvalidInput(f"{where}: may not be empty")
        if len(label) > LONGEST_LABEL:
            raise InvalidInput(f"{where}: {len(label)} characters, the limit is {LONGEST_LABEL}")
    return distinct(given)


def distinct(labels: Sequence[str]) -> list[str]:
    """Each label once, where it stands first."""
    return list(dict.fromkeys(labels))


def check_label_count(count: int, limits: Limits, field: str) -> None:
    """Raise `InvalidInput` for more labels than a request may have."""
    if count > limits.max_labels:
        raise InvalidInput(f"{field}: {count} given, the limit is {limits.max_labels} (limits.max_labels)")


def check_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """The output schema, whose content the model family checks. Raises `InvalidInput` if the schema is too large."""
    if schema is not None:
        try:
            nbytes = len(msgspec.msgpack.encode(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput("params.output_schema: holds a value that JSON does not have") from error
        if nbytes > LARGEST_SCHEMA:
            raise InvalidInput(f"params.output_schema: {nbytes} bytes, the limit is {LARGEST_SCHEMA}")
    return schema
