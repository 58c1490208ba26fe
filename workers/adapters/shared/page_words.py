"""Words of a page with their places, and the windows in which a model reads them beside a question.

metadata of an item:

    words       texts in reading order
    boxes       a box per word
    box_format  "pixels" (default): [x, y, width, height] in pixels of the upright picture, as in our answers;
                "normalized": [left, top, right, bottom] from 0 to 1000, as LayoutLM's processors give them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem
from workers.adapters.shared.image_extracting import Size

MOST_WORDS = 10_000
LONGEST_WORD = 500
SCALE = 1000
_FORMATS = ("pixels", "normalized")
_FARTHEST = 1_000_000


@dataclass(frozen=True, slots=True)
class Words:
    """Texts, and float64 [n, 4] corners (left, top, right, bottom): in pixels, or `relative` to 1000."""

    texts: list[str]
    corners: np.ndarray
    relative: bool

    def on_page(self, size: Size) -> Words:
        """The same words with corners in pixels."""
        if not self.relative:
            return self
        scale = np.array([size.width, size.height] * 2) / SCALE
        return Words(self.texts, self.corners * scale, False)

    def text(self, first: int, last: int) -> str:
        """Words `first` to `last`."""
        return " ".join(self.texts[first : last + 1])

    def around(self, first: int, last: int) -> list[float]:
        """Corners of the box around words `first` to `last`."""
        own = self.corners[first : last + 1]
        return [*own[:, :2].min(axis=0).tolist(), *own[:, 2:].max(axis=0).tolist()]


def words_of(item: InputItem, where: str) -> Words:
    """The words in an item's metadata. Raises `InvalidInput` that names what cannot be used below `where`."""
    metadata = item.metadata or {}
    words, boxes = metadata.get("words"), metadata.get("boxes")
    if not isinstance(words, list) or not isinstance(boxes, list) or not words:
        raise InvalidInput(f"{where}: needs words and boxes, two arrays of equal length")
    if len(words) != len(boxes):
        raise InvalidInput(f"{where}.boxes: {len(boxes)} given for {len(words)} words")
    if len(words) > MOST_WORDS:
        raise InvalidInput(f"{where}.words: {len(words)} given, the limit is {MOST_WORDS}")
    form = metadata.get("box_format", _FORMATS[0])
    if form not in _FORMATS:
        raise InvalidInput(f"{where}.box_format: {str(form)[:64]!r} is not one of {', '.join(_FORMATS)}")
    for index, word in enumerate(words):
        if not isinstance(word, str) or len(word) > LONGEST_WORD:
            raise InvalidInput(f"{where}.words[{index}]: must be a text of at most {LONGEST_WORD} characters")
    corners = [_corners(box, form, f"{where}.boxes[{index}]") for index, box in enumerate(boxes)]
    return Words(words, np.array(corners, np.float64), form == _FORMATS[1])


def _corners(box: Any, form: str, where: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        raise InvalidInput(f"{where}: must be four numbers")
    first, top, third, fourth = box
    if form == _FORMATS[0]:
        if not all(0 <= value <= _FARTHEST for value in box):
            raise InvalidInput(f"{where}: {box} is outside 0..{_FARTHEST}")
        return first, top, first + third, top + fourth
    if not (0 <= first <= third <= SCALE and 0 <= top <= fourth <= SCALE):
        raise InvalidInput(f"{where}: {box} must be left, top, right, bottom within 0..{SCALE}")
    return first, top, third, fourth


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Window:
    """One sequence: ids, types and words int64 [t] (words: index of the token's word, -1 for none), boxes [t, 4]."""

    ids: np.ndarray
    types: np.ndarray
    words: np.ndarray
    boxes: np.ndarray


class PageReader:
    """The tokenizer of one model, for a question and words. Thread-safe after construction."""

    def __init__(self, tokenizer: Any, limit: int, *, placed: bool) -> None:
        """`placed`: the tokenizer takes boxes itself. Raises ValueError for one that does not tell words apart."""
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer of this model is not a fast one; words of tokens need it")
        self._tokenizer, self._limit, self._placed = tokenizer, limit, placed
        self._stride = limit // 4
        self.pad_id = int(tokenizer.pad_token_id or 0)
        # A question that leaves no room would make the Rust object panic, which ends the process: it is counted before.
        self._counter: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._counter.no_padding()
        self._counter.no_truncation()
        # The Rust object takes its settings from the first call; later ones, which are equal, do not touch them.
        self._encode("a", ["b"], [[0, 0, 0, 0]])

    def question_length(self, question: str) -> int:
        """Tokens of the question, special tokens included."""
        return len(self._counter.encode(question.split(), is_pretokenized=True).ids)

    def windows(self, question: str, words: Words, size: Size) -> list[Window]:
        """Windows over all words (whose corners are in pixels), which overlap."""
        scale = SCALE / np.array([size.width, size.height] * 2)
        boxes = np.clip((words.corners * scale).astype(np.int64), 0, SCALE).tolist()
        encoding = self._encode(question, words.texts, boxes)
        return [self._window(encoding, at, boxes) for at in range(len(encoding["input_ids"]))]

    def tokens_of(self, windows: Sequence[Window]) -> int:
        """Tokens of all words beside the question, as one window would have them."""
        first, *others = windows
        return len(first.ids) + sum(int((window.words >= 0).sum()) - self._stride for window in others)

    def _encode(self, question: str, words: Sequence[str], boxes: Sequence[Sequence[int]]) -> Any:
        if self._placed:
            pair = {"text": [question], "text_pair": [list(words)], "boxes": [list(boxes)]}
        else:
            pair = {"text": question.split(), "text_pair": list(words), "is_split_into_words": True}
        return self._tokenizer(
            **pair,
            truncation="only_second",
            max_length=self._limit,
            stride=self._stride,
            return_overflowing_tokens=True,
            return_token_type_ids=True,
        )

    def _window(self, encoding: Any, at: int, boxes: Sequence[Sequence[int]]) -> Window:
        ids, parts = encoding["input_ids"][at], encoding.sequence_ids(at)
        words = [
            word if part == 1 and word is not None else -1
            for word, part in zip(encoding.word_ids(at), parts, strict=True)
        ]
        if self._placed:
            placed = encoding["bbox"][at]
        else:
            end = self._tokenizer.sep_token_id
            empty = [[SCALE] * 4 if token == end else [0] * 4 for token in ids]
            placed = [boxes[word] if word >= 0 else other for word, other in zip(words, empty, strict=True)]
        types = encoding["token_type_ids"][at]
        return Window(*(np.asarray(one, np.int64) for one in (ids, types, words, placed)))
