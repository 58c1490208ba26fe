"""Plans a request once: its cost, its lane, and the `Work` that travels to a worker. The engine adds the deadlines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from frontend.engine.events import Pace
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope
from ipc.settings import Limits, Settings
from ipc.wire.messages import (
    Call,
    EncodeCall,
    ExtractCall,
    GenerateCall,
    ModelStatus,
    ScoreCall,
    TokenizeCall,
    Work,
)
from ipc.wire.streams import WINDOW

_INLINE_NBYTES = 512 << 10
"""Inputs up to this size are looked at on the event loop."""


def plan(
    scope: RequestScope,
    settings: Settings,
    model: str,
    call: Call,
    cost: int,
    *,
    lane: str = "",
    streams: bool = False,
    tensors: bool = False,
) -> Work:
    """The work of a request. `lane` empty: chosen by the cost; `streams`: the answer comes in parts.

    `tensors`: a request of named tensors, whose runs are counted in the statistics.
    """
    return Work(
        model,
        call,
        0,
        cost,
        scope.request_id,
        scope.traceparent,
        lane or lane_of(cost, settings),
        scope.grant.caller,
        scope.grant.share,
        WINDOW if streams else 0,
        tensors=tensors,
    )


def pace_of(scope: RequestScope, settings: Settings, recorder: Recorder, model: str) -> Pace:
    """How fast the text of a request for a model has to come, and where its tokens are counted."""
    began_ns = time.monotonic_ns() - int((time.perf_counter() - scope.started) * 1e9)
    meter = recorder.text(model, scope.grant.name, scope.http.route if scope.http is not None else "")
    first_by_ns = min(scope.waits_until_ns, scope.deadline_ns)
    return Pace(began_ns, first_by_ns, settings.generation.idle_timeout_s, meter)


def lane_of(cost: int, settings: Settings) -> str:
    """`bulk` for a request above `batch.bulk_tokens`: bulk work waits behind interactive work."""
    return "bulk" if cost > settings.batch.bulk_tokens else "interactive"


def is_long(work: Work) -> bool:
    """Whether a look at all inputs would hold up the event loop: much work, or large texts and images.

    The cost alone does not tell: an image costs the same whatever its file's size, and a long text is cut.
    """
    if work.lane == "bulk":
        return True
    items = work.call.items
    return sum([len(item.text or "") + sum(map(len, item.images)) for item in items]) > _INLINE_NBYTES


def part_of(work: Work, places: Sequence[int], settings: Settings) -> Work:
    """The work of some items of an encode call; each has a share of the estimated cost by its characters."""
    assert isinstance(work.call, EncodeCall)
    sizes = [characters // 4 + 2 for characters in characters_of(work.call)]
    cost = max(1, work.cost * sum([sizes[at] for at in places]) // sum(sizes))
    call = msgspec.structs.replace(work.call, items=[work.call.items[at] for at in places])
    return msgspec.structs.replace(work, call=call, cost=cost, lane=lane_of(cost, settings))


def characters_of(call: Call) -> list[int]:
    """Characters that each item of a call puts before the model, four for each token id given.

    Most families read the labels with each item.
    """
    if isinstance(call, GenerateCall):
        return [_prompt_characters(call)]
    if isinstance(call, TokenizeCall) and call.prompt is not None:
        return [_prompt_characters(call.prompt)]
    before = len(call.instruction or "")
    if isinstance(call, ScoreCall):
        before += len(call.query.text or "")
    elif isinstance(call, ExtractCall):
        before += sum(len(label) + 4 for label in call.labels)
    return [
        before + len(item.first or "") + (4 * len(item.ids or ()) if item.text is None else len(item.text))
        for item in call.items
    ]


def _prompt_characters(call: GenerateCall) -> int:
    """Characters of a prompt: its text, four for each token id, or the messages with some for their frames."""
    if call.messages is None:
        return 4 * len(call.ids or ()) if call.text is None else len(call.text)
    functions = len(msgspec.json.encode(call.tools.functions)) if call.tools else 0
    return functions + sum(len(message.get("content") or "") + 32 for message in call.messages)


def cost_of(call: Call, status: ModelStatus, limits: Limits) -> int:
    """Estimated tokens of a call: four characters a token, each text cut at the model's length, and its images."""
    longest = limits.max_chunked_tokens if call.overflow == "chunk" else status.max_sequence_length or 512
    texts = sum(min(each // 4 + 2, longest) for each in characters_of(call))
    return texts + _images_of(call) * status.image_tokens


def _images_of(call: Call) -> int:
    """Items of a call that are images, its query included."""
    count = sum(1 for item in call.items if item.images)
    return count + (isinstance(call, ScoreCall) and bool(call.query.images))
