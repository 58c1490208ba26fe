"""Texts that are longer than the model takes.

1. A tokenized text is fitted into the model's length: cut on the right, cut on the left, or split into windows. Special
   tokens around the text (`Frame`: how many before, how many after) stay, in every window.
2. A text that is cut is not tokenized as a whole: a megabyte takes a second, and the model keeps a few hundred tokens.
   For a tokenizer that goes word by word, a blank always ends a word, so the beginning of a text gives the same first
   tokens as the whole text:
   - The beginning ends at a blank, and has several times the characters of the tokens that are kept.
   - Its tokens count if they fill the model's length and the last kept token ends some words before the end, so that
     the end cannot have influenced the kept tokens.
   - Otherwise a longer beginning is tried, and in the end the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

CHARACTERS_PER_TOKEN = 16
LONG = 4
"""A text is long from so many beginnings on, and each beginning is so many times longer than the one before."""
_WORDS_BEFORE_CUT = 8
_WORD_BY_WORD = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_WITHIN_WORDS = frozenset({"Punctuation", "Digits", "UnicodeScripts"})
_PLAIN_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip"}
    | {"StripAccents"}
)
_PLAIN_PATTERNS = ({"Regex": " {2,}"}, {"String": " "}, {"String": "``"}, {"String": "''"})


class Tokens(NamedTuple):
    """A stretch of a text as token ids with special tokens, and segment ids (None where all are 0)."""

    ids: list[int]
    types: list[int] | None
    truncated: bool = False


class Frame(NamedTuple):
    """Special tokens that a tokenizer puts around every single text."""

    before: int
    after: int


class FittedText(NamedTuple):
    """One window of a text, or several windows of a text that was split.

    `tokens` counts the whole text, special tokens included; 0 if not counted.
    """

    windows: list[Tokens]
    truncated: bool
    tokens: int = 0


def fit(stretches: Sequence[Tokens], overflow: str, max_length: int, frame: Frame) -> FittedText:
    """The windows of one text, given as consecutive stretches that each have the frame.

    `overflow` is `truncate` (drop the end), `error` (the same, and the caller refuses), `truncate_left` (drop the
    beginning) or `chunk` (keep all, in windows of at most `max_length` tokens).
    """
    if len(stretches) == 1 and len(stretches[0].ids) <= max_length:
        return FittedText([stretches[0]], False, len(stretches[0].ids))
    ids = _joined([stretch.ids for stretch in stretches], frame)
    types = _joined([stretch.types for stretch in stretches if stretch.types is not None], frame)
    room = max(1, max_length - frame.before - frame.after)
    inner = len(ids) - frame.before - frame.after
    if inner <= room or overflow not in ("chunk", "truncate_left"):
        spans = [(0, min(room, inner))]
    elif overflow == "truncate_left":
        spans = [(inner - room, inner)]
    else:
        spans = [(start, min(start + room, inner)) for start in range(0, inner, room)]
    windows = [
        Tokens(_span(ids, span, frame), _span(types, span, frame) if len(types) == len(ids) else None)
        for span in spans
    ]
    return FittedText(windows, overflow != "chunk" and inner > room, len(ids))


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
    """The frame around `span` of the tokens inside."""
    start, stop = frame.before + span[0], frame.before + span[1]
    return values[: frame.before] + values[start:stop] + values[len(values) - frame.after :]


def goes_word_by_word(backend: Tokenizer) -> bool:
    """Whether a blank ends a word for this tokenizer, and later words never influence the tokens of earlier ones."""
    splits = [_ends_words(step) for step in _steps(backend.pre_tokenizer, "pretokenizers")]
    normalizers = _steps(backend.normalizer, "normalizers")
    return None not in splits and True in splits and all(map(_is_plain, normalizers))


def encode_beginning(backend: Tokenizer, text: str, limit: int) -> Encoding:
    """The encoding of `text` by a tokenizer that goes word by word and cuts on the right at `limit` tokens.

    The ids, and whether there is overflow, are those of the whole text. The overflow itself may be incomplete.
    """
    size = CHARACTERS_PER_TOKEN * limit
    while size * LONG <= len(text):
        cut = text.rfind(" ", 0, size)
        if cut > 0:
            [encoding] = backend.encode_batch([text[:cut]])
            end = max((end for _, end in encoding.offsets), default=0)
            if encoding.overflowing and len(text[end:cut].split()) > _WORDS_BEFORE_CUT:
                return encoding
        size *= LONG
    [encoding] = backend.encode_batch_fast([text])
    return encoding


def encode_side(backend: Tokenizer, text: str, limit: int, *, left: bool) -> Encoding:
    """The encoding, without special tokens, of the left or right side of `text`, with at least `limit` tokens.

    The `limit` tokens at that end are those of the whole text; where a side is not sure to have them the whole text is
    encoded. The tokenizer goes word by word and does not cut.
    """
    size = CHARACTERS_PER_TOKEN * limit
    while size * LONG <= len(text):
        cut = text.rfind(" ", 0, size) if left else text.find(" ", len(text) - size)
        side = text[: max(cut, 0)] if left else text[cut:]
        [encoding] = backend.encode_batch([side], add_special_tokens=False)
        places = encoding.offsets
        if len(places) > limit:
            rest = side[places[limit - 1][1] :] if left else side[: places[-limit][0]]
            if len(rest.split()) > _WORDS_BEFORE_CUT:
                return encoding
        size *= LONG
    [encoding] = backend.encode_batch([text], add_special_tokens=False)
    return encoding


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer as its steps in the form of tokenizer.json."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    nested = state.get(name)
    return nested if state["type"] == "Sequence" else [state]


def _ends_words(step: dict[str, Any]) -> bool | None:
    """Whether a blank ends a word after this step; None for a step that may look beyond a word."""
    kind = step["type"]
    if kind in _WORD_BY_WORD:
        return True
    if kind == "Metaspace":
        return bool(step.get("split", True))
    if kind == "ByteLevel":
        return bool(step.get("use_regex", True))
    return False if kind in _WITHIN_WORDS else None


def _is_plain(step: dict[str, Any]) -> bool:
    """Whether a normalizer looks only at a character and its neighbours."""
    return step["type"] in _PLAIN_NORMALIZERS or (
        step["type"] == "Replace" and step["pattern"] in _PLAIN_PATTERNS
    )
