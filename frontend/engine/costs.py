"""What the estimate of a call's cost is made of (`Engine.cost_of`): characters and images of its items."""

from __future__ import annotations

from ipc.wire.messages import Call, ExtractCall, ScoreCall


def characters_of(call: Call) -> list[int]:
    """Characters that each item of a call puts before the model; most families read the labels with each of them."""
    before = len(call.instruction or "")
    if isinstance(call, ScoreCall):
        before += len(call.query.text or "")
    elif isinstance(call, ExtractCall):
        before += sum(len(label) + 4 for label in call.labels)
    return [before + len(item.text or "") for item in call.items]


def images_of(call: Call) -> int:
    """Items of a call that are images, its query included."""
    count = sum(1 for item in call.items if item.images)
    return count + (isinstance(call, ScoreCall) and bool(call.query.images))
