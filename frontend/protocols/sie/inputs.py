"""Texts and token ids in the forms of other APIs: one text, several, the ids of one text, or the ids of several.

1. `check_inputs` refuses a mix, and what no model could take.
2. `inputs_of` makes the inputs of workers.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from frontend.http.texts import check_count, check_texts
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Inputs = str | list[TokenId | str | list[TokenId]]


def check_inputs(given: Inputs, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for an empty, mixed or over-long input; `where` is its field."""
    entries = _entries(given)
    if all(isinstance(entry, int) for entry in entries):
        _check_ids(entries, where, limits)
        return
    check_count(len(entries), where, limits)
    if all(isinstance(entry, str) for entry in entries):
        check_texts(entries, f"{where}[{{}}]", limits)
    elif all(isinstance(entry, list) for entry in entries):
        for index, entry in enumerate(entries):
            _check_ids(entry, f"{where}[{index}]", limits)
    else:
        raise InvalidInput(f"{where}: expected one kind of entry (str, int, or array of int), got a mix")


def inputs_of(given: Inputs) -> list[InputItem]:
    """One input per text or token list of a checked request."""
    entries = _entries(given)
    if isinstance(entries[0], int):
        return [InputItem(None, entries)]
    return [InputItem(entry) if isinstance(entry, str) else InputItem(None, entry) for entry in entries]


def names_of(given: Inputs, field: str) -> FieldNames:
    """How messages name the inputs of `field`."""
    single = isinstance(given, str) or isinstance(given[0], int)
    place = field if single else f"{field}[{{}}]"
    return FieldNames(item=place, text=place, options="")


def tokens_of(inputs: list[InputItem], tokens: list[int]) -> int:
    """True number of tokens: of ids the number sent, of texts what the tokenizer made, special tokens included."""
    return sum(
        len(item.ids) if item.ids is not None else used for item, used in zip(inputs, tokens, strict=True)
    )


def _entries(given: Inputs) -> list[Any]:
    return [given] if isinstance(given, str) else given


def _check_ids(ids: list[int], where: str, limits: Limits) -> None:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
