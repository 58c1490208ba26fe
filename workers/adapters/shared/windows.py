"""Fit a tokenized text into a model's length: cut on the right, cut on the left, or split into windows.

Special tokens around the text (`frame`: how many before, how many after) stay, and every window gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A stretch of a text as token ids with its special tokens, and segment ids (None where all are 0)."""

    ids: list[int]
    types: list[int] | None


class Frame(NamedTuple):
    """Special tokens that a tokenizer puts around every single text."""

    before: int
    after: int


class Windows(NamedTuple):
    """What runs through the model for one text: one window, or several of a text that was split.

    `tokens` are those of the whole text, special tokens included, 0 where they were not counted.
    """

    parts: list[Part]
    truncated: bool
    tokens: int = 0


def fit(parts: Sequence[Part], overflow: str, max_length: int, frame: Frame) -> Windows:
    """The windows of one text, given as consecutive parts that each have the frame.

    `overflow` is `truncate` (drop the end; `error` does the same and leaves the refusal to the caller),
    `truncate_left` (drop the beginning) or `chunk` (keep all, in windows of at most `max_length` tokens).
    """
    if len(parts) == 1 and len(parts[0].ids) <= max_length:
        return Windows([parts[0]], False, len(parts[0].ids))
    ids = _joined([part.ids for part in parts], frame)
    types = _joined([part.types for part in parts if part.types is not None], frame)
    room = max(1, max_length - frame.before - frame.after)
    inner = len(ids) - frame.before - frame.after
    if inner <= room or overflow not in ("chunk", "truncate_left"):
        spans = [(0, min(room, inner))]
    elif overflow == "truncate_left":
        spans = [(inner - room, inner)]
    else:
        spans = [(start, min(start + room, inner)) for start in range(0, inner, room)]
    windows = [
        Part(_span(ids, span, frame), _span(types, span, frame) if len(types) == len(ids) else None)
        for span in spans
    ]
    return Windows(windows, overflow != "chunk" and inner > room, len(ids))


def _joined(stretches: Sequence[list[int]], frame: Frame) -> list[int]:
    """One list with one frame around all stretches."""
    if not stretches:
        return []
    last = stretches[-1]
    joined = list(stretches[0][: frame.before])
    for stretch in stretches:
        joined += stretch[frame.before : len(stretch) - frame.after]
    return joined + last[len(last) - frame.after :]


def _span(values: list[int], span: tuple[int, int], frame: Frame) -> list[int]:
    """The frame with `span` of what lies inside it."""
    start, stop = frame.before + span[0], frame.before + span[1]
    return values[: frame.before] + values[start:stop] + values[len(values) - frame.after :]
