"""Where what stays belongs, by hashes that all agree on: the worker or box of a sequence or a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from ipc.wire.messages import GenerateCall

STREAMS_APART = 4
"""So many streams more a worker may have that knows the beginning of a prompt."""
PROMPT_BEGINNING = 64
"""Characters or tokens of a prompt without messages that are its beginning."""
Place = TypeVar("Place", int, str)


def beginning_of(call: GenerateCall) -> str:
    """What the prompts of all turns of a conversation begin with: the messages up to the first of the user."""
    if call.messages is None:
        return repr((call.text or "")[:PROMPT_BEGINNING] or (call.ids or [])[:PROMPT_BEGINNING])
    first = next((at for at, each in enumerate(call.messages) if each.get("role") == "user"), 0)
    messages = call.messages[: first + 1]
    parts = [part for each in messages if isinstance(each.get("content"), list) for part in each["content"]]
    # PERF: sizes tell pictures apart well enough for a choice of workers.
    sizes = [len(image) for image in call.images[: sum(part["type"] == "image" for part in parts)]]
    return repr([(each.get("role"), each.get("content")) for each in messages]) + (
        repr(sizes) if sizes else ""
    )


def home(slots: Sequence[Place], model: str, sequence: int | str, caller: str = "") -> Place:
    """The slot among `slots` that keeps a sequence: the slot with the highest hash of model, caller, id and slot.

    Boxes of a cluster are chosen by their names in the same way.

    Every frontend chooses the same slot without asking, and a change of the slots moves few sequences.
    """
    name = f"{model}\0{caller}\0{sequence!r}" if caller else f"{model}\0{sequence!r}"

    def weight(slot: Place) -> bytes:
        return hashlib.blake2b(f"{name}\0{slot}".encode(), digest_size=8).digest()

    return max(slots, key=weight)
