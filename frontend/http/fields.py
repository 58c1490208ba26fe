"""Checks of fields that several protocols have: texts, labels, words of a fixed set.

1. Number and size of texts are held against the limits of the server.
2. Labels and output schema of an extract request are checked before anything is loaded.
3. Where a handler checks the words of a field by a constant, `one_of` tells the same constant in the schema.
4. Where the decoder checks the words, its message repeats the word that it got. `mismatch_of` cuts a long one, and adds
   the words that the field takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Meta, ValidationError, inspect

from ipc.errors import InvalidInput
from ipc.settings import Limits

LONGEST_LABEL = 500
"""Characters of one label."""
LARGEST_SCHEMA = 64 << 10
"""Bytes of an output schema as msgpack."""
_SHOWN = 200
_WRONG_WORD = "Invalid enum value"
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


def check_texts(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` that names the item for a text that is too long."""
    for index, text in enumerate(texts):
        if len(text) * 4 > limits.max_text_bytes:
            nbytes = len(text.encode())
            if nbytes > limits.max_text_bytes:
                place = where.format(index)
                raise InvalidInput(
                    f"{place}: {nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
                )


def check_shared(text: str, where: str, items: int, limits: Limits) -> None:
    """Raise `InvalidInput` for a text that is too long alone, or together with the items it stands before."""
    check_texts([text], where, limits)
    if items * len(text) > limits.max_body_bytes:
        raise InvalidInput(
            f"{where}: {len(text)} characters before {items} items, "
            f"the limit is {limits.max_body_bytes} in all (limits.max_body_bytes)"
        )


def check_count(count: int, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no items or too many."""
    if count == 0:
        raise InvalidInput(f"{where}: may not be empty")
    if count > limits.max_items:
        raise InvalidInput(f"{where}: {count} given, the limit is {limits.max_items} (limits.max_items)")


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


def one_of(words: Iterable[str], description: str | None = None, *, required: bool = False) -> Meta:
    """What the schema of a text says: one of `words`, or null unless the text is `required`."""
    known = [*words] if required else [*words, None]
    return Meta(description=description, extra_json_schema={"enum": known})


def mismatch_of(error: ValidationError, kind: Any) -> str:
    """What the decoder of a `kind` says of a wrong type or an unknown word, with the JSON path of the value."""
    text = str(error)
    said, at, place = text.rpartition(" - at `")
    if len(text) > 2 * _SHOWN:
        said, place = f"{said[:_SHOWN]}...", place[-_SHOWN:]
    if said.startswith(_WRONG_WORD):
        words = _words_at(kind, tuple(_STEP.findall(place)))
        said += (
            f", expected {' or '.join(filter(None, (', '.join(words[:-1]), *words[-1:])))}" if words else ""
        )
    return f"{said}{at}{place}"


@lru_cache(maxsize=256)
def _words_at(kind: Any, steps: tuple[str, ...]) -> list[str]:
    """The words that a field takes. Each step is the name of a field, or empty for an entry of an array or a map."""
    found = list(_plain(inspect.type_info(kind)))
    for name in steps:
        found = [plain for one in found for inner in _inner(one, name) for plain in _plain(inner)]
    literals = [one.values for one in found if isinstance(one, inspect.LiteralType)]
    return [repr(word) for values in literals for word in values]


def _plain(found: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, without what is said about them."""
    if isinstance(found, inspect.Metadata):
        yield from _plain(found.type)
    elif isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _plain(one)
    else:
        yield found


def _inner(found: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if name and isinstance(found, inspect.StructType):
        yield from (field.type for field in found.fields if field.encode_name == name)
    elif not name and isinstance(found, inspect.ListType | inspect.VarTupleType):
        yield found.item_type
    elif not name and isinstance(found, inspect.DictType):
        yield found.value_type
