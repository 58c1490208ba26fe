"""Input items of a response: as the store keeps them, and as messages for chat templates.

1. A string is one message of a user. Items without a type that have a role are messages.
2. Calls that follow each other, or follow text of the assistant, belong to one message of the assistant.
3. Reasoning is accepted and not replayed. A reference to an item is dropped.
4. Output items of earlier responses have the same form, so the same functions read history and new input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.generation.conversation import Conversation, text_of
from frontend.generation.errors import InvalidField
from frontend.protocols.responses.tools import joined

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Kinds of items that are kept, and the beginning of their ids."""
REFERENCE = "item_reference"


def item_id(kind: str, response: str, place: str) -> str:
    """The id of an item of a response, the same whenever the response is told again."""
    return f"{PREFIXES[kind]}_{response.partition('_')[2]}_{place}"


def kept_items(given: str | Sequence[Any], response: str) -> list[dict[str, Any]]:
    """Input items of the response with that id, each with a type and an id of its own. Raises `InvalidField`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    kept: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(given):
        kind = _kind_of(item, f"input[{index}]")
        if kind != REFERENCE:
            new_id, id_ = item_id(kind, response, f"in{index}"), item.get("id")
            # NOTE: pages are asked for by the id of an item, and would never end if two items had the same.
            if not isinstance(id_, str) or not id_ or id_ in kept:
                id_ = new_id
            kept[id_] = _kept(item, kind, id_)
    return list(kept.values())


def _kind_of(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise InvalidField(where, "expected an object")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind not in PREFIXES and kind != REFERENCE:
        raise InvalidField(
            f"{where}.type", f"{kind[:64]!a} is not one of {', '.join((*PREFIXES, REFERENCE))}"
        )
    return kind


def _kept(item: dict[str, Any], kind: str, id_: str) -> dict[str, Any]:
    kept = {**item, "type": kind, "id": id_}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        kept["content"] = [{"type": part, "text": item["content"]}]
    return kept


class Turns:
    """Adds items to a conversation, and joins what the assistant says and calls in one turn."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._said: tuple[str | None, str] | None = None
        """Text and place of the assistant's turn that is not added yet."""
        self._calls: list[dict[str, Any]] = []

    def add(self, items: Sequence[dict[str, Any]], field: str) -> None:
        """Items in their order; `field` is the path of their list. Raises `InvalidField`."""
        for index, item in enumerate(items):
            where = f"{field}[{index}]"
            if item["type"] == "message":
                self._message(item, where)
            elif item["type"] == "function_call":
                self._call(item, where)
            elif item["type"] == "function_call_output":
                self._output(item, where)
        self._flush()

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, text = item.get("role"), text_of(item.get("content"), f"{where}.content")
        if not isinstance(role, str):
            raise InvalidField(f"{where}.role", "expected a string")
        self._flush()
        if role == "assistant" and text is not None:
            self._said = text, where
        else:
            self._talk.add(role, text, where)

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id = _text_in(item, "call_id", where)
        name = joined(item.get("namespace"), _text_in(item, "name", where))
        self._calls.append(self._talk.call(call_id, name, item.get("arguments"), where))
        self._said = self._said or (None, where)

    def _output(self, item: dict[str, Any], where: str) -> None:
        call_id = _text_in(item, "call_id", where)
        text = text_of(item.get("output"), f"{where}.output")
        if text is None:
            raise InvalidField(f"{where}.output", "is required")
        self._flush()
        self._talk.add("tool", text, where, call_id=call_id)

    def _flush(self) -> None:
        """The turn of the assistant is complete."""
        if self._said is not None:
            self._talk.add("assistant", *self._said, calls=self._calls)
        self._said, self._calls = None, []


def _text_in(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{where}.{name}", "expected a string")
    return value
