"""Inputs in the forms of other APIs: one text, several texts and images, the ids of one text, or the ids of several.

1. `check_inputs` refuses ids beside texts, and what no model could take.
2. `inputs_of` makes the inputs of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from frontend.http.fields import check_count, check_texts
from frontend.protocols.sie.media import MediaInput, counted, input_of, require, seen
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Inputs = str | list[TokenId | str | list[TokenId] | MediaInput]


def check_inputs(given: Inputs, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for an empty, mixed or over-long input; `where` is its field."""
    entries = _entries(given)
    if all(isinstance(entry, int) for entry in entries):
        _check_ids(entries, where, limits)
        return
    check_count(len(entries), where, limits)
    if all(isinstance(entry, str | MediaInput) for entry in entries):
        found = [seen(entry, f"{where}[{at}]") for at, entry in enumerate(entries)]
        check_texts([one.text or "" for one in found], f"{where}[{{}}]", limits)
    elif all(isinstance(entry, list) for entry in entries):
        for index, entry in enumerate(entries):
            _check_ids(entry, f"{where}[{index}]", limits)
    else:
        raise InvalidInput(f"{where}: expected one kind of entry (str, int, or array of int), got a mix")


def inputs_of(given: Inputs, where: str, entry: ModelEntry) -> list[InputItem]:
    """One input per text, image or token list of a checked request. Raises `InvalidInput` for what a model refuses."""
    entries = _entries(given)
    if isinstance(entries[0], int):
        entries = [entries]
    if isinstance(entries[0], list):
        require("text", where, entry)
        return [InputItem(None, ids) for ids in entries]
    places = [where] if isinstance(given, str) else [f"{where}[{at}]" for at in range(len(entries))]
    return [input_of(seen(one, place), place, entry) for one, place in zip(entries, places, strict=True)]


def names_of(given: Inputs, field: str) -> FieldNames:
    """How messages name the inputs of `field`."""
    single = isinstance(given, str) or isinstance(given[0], int)
    return names_at(field if single else f"{field}[{{}}]")


def names_at(place: str) -> FieldNames:
    """How messages name the inputs at the JSON path `place`, with {} for the index of an input."""
    return FieldNames(item=place, text=place, options="")


def images_of(inputs: Sequence[InputItem], where: str) -> list[tuple[str, bytes]]:
    """JSON path and bytes of each image; `where` is the path of an input, with {} for its place."""
    return [(where.format(at), image) for at, item in enumerate(inputs) for image in item.images]


def key_counts(given: Inputs) -> dict[str, int]:
    """How often names of fields stand in the objects among the inputs, as fields or as values of `type`."""
    objects = [entry for entry in given if isinstance(entry, MediaInput)] if isinstance(given, list) else []
    return counted([part for entry in objects for part in (entry, *(entry.content or ()))]) if objects else {}


def _entries(given: Inputs) -> list[Any]:
    return [given] if isinstance(given, str) else given


def _check_ids(ids: list[int], where: str, limits: Limits) -> None:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
