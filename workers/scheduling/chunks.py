"""How much of a request is prepared in one go, by what it brings: items, pictures, and characters to tokenize."""

from __future__ import annotations

from typing import Any

from ipc.wire.messages import Call, ExtractCall, InputItem, ScoreCall

CHUNK_ITEMS = 32
CHUNK_IMAGES = 4
"""A large picture takes seconds, and a request that has ended goes on until the end of its chunk."""
CHUNK_CHARACTERS = 1 << 16
"""Some 50 ms; a longer text is tokenized whole, by a thread for which no short one waits."""
LONE_CHARACTERS = 4096


def chunk_end(call: Call, start: int) -> int:
    """Where the chunk of the items of `call` that begins at `start` ends; it has at least one item."""
    beside = _characters_beside(call)
    stop, images, characters = start, 0, 0
    for item in call.items[start : start + CHUNK_ITEMS]:
        images += bool(item.images)
        characters += _characters(item) + beside
        if stop > start and (images > CHUNK_IMAGES or characters > CHUNK_CHARACTERS):
            break
        stop += 1
    return stop


def is_long(call: Call, start: int) -> bool:
    """Whether the chunk that begins at `start` is more text than chunks usually are."""
    characters = _characters_beside(call) + _characters(call.items[start])
    if isinstance(call, ScoreCall):
        characters += _characters(call.query)
    return characters > CHUNK_CHARACTERS


def is_short(call: Call) -> bool:
    """Whether preparing all of it takes well under a millisecond."""
    if any(item.images for item in call.items) or (isinstance(call, ScoreCall) and call.query.images):
        return False
    beside = _characters_beside(call)
    if isinstance(call, ScoreCall):
        beside += _characters(call.query)
    return sum(map(_characters, call.items)) + beside * len(call.items) <= LONE_CHARACTERS


def _characters_beside(call: Call) -> int:
    """Characters that families tokenize with every single item: instruction, labels, fields, templates in options."""
    count = len(call.instruction or "") + _within(call.options)
    if isinstance(call, ExtractCall):
        count += sum(map(len, call.labels)) + len(call.labels) + _within(call.output_schema)
    return count


def _characters(item: InputItem) -> int:
    return len(item.text or "") + 4 * len(item.ids or ())


def _within(value: Any) -> int:
    """Characters of all texts in what options or a schema hold, however deep."""
    count, rest = 0, [value]
    while rest:
        held = rest.pop()
        if isinstance(held, str):
            count += len(held)
        elif isinstance(held, dict):
            rest += [*held, *held.values()]
        elif isinstance(held, list | tuple):
            rest += held
    return count
