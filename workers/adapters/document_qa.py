"""Answers to a question about a page, as spans of its words: LayoutLMv3, and LayoutLM, which reads no picture.

The caller brings the words of the page and their boxes (from any OCR) in the item's metadata:

    words       texts in reading order
    boxes       a box per word
    box_format  "pixels" (default): [x, y, width, height] in pixels of the upright picture, as in our answers;
                "normalized": [left, top, right, bottom] from 0 to 1000, as LayoutLM's processors give them

A page with more words than the model takes is cut, or read in overlapping windows ("chunk"). Spans are scored by the
rules of transformers' document-question-answering pipeline; of spans over the same words the best one counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ipc.errors import InputTooLong, InvalidInput
from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, Excess, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.extracting import NOT_FINITE, place_of
from workers.adapters.shared.image_extracting import (
    ImageExtractAdapter,
    Size,
    patches,
    pixel_box,
    refuse_endless,
    size_of,
)
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import divided, padding_share
from workers.adapters.shared.tokenizing import rust_copy
from workers.device import stepping

MOST_WORDS = 10_000
LONGEST_WORD = 500
SCALE = 1000
_FORMATS = ("pixels", "normalized")
_FARTHEST = 1_000_000
KINDS = ("layoutlm", "layoutlmv3")
_CANDIDATES = 256
"""Spans of tokens examined for each answer; several may cover the same words."""


@dataclass(frozen=True, slots=True)
class Words:
    """Texts, and float64 [n, 4] corners (left, top, right, bottom): in pixels, or `relative` to 1000."""

    texts: list[str]
    corners: np.ndarray
    relative: bool

    def scaled(self, size: Size) -> np.ndarray:
        """int64 [n, 4] corners from 0 to 1000, cut to whole numbers as LayoutLM's processors do."""
        corners = self.corners if self.relative else SCALE * (self.corners / ([size.width, size.height] * 2))
        return np.clip(corners.astype(np.int64), 0, SCALE)

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
    """The words in an item's metadata. Raises `InvalidInput` that names the field below `where`."""
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
        """`placed`: the tokenizer takes boxes. Raises ValueError for a tokenizer that does not know words."""
        self._tokenizer, self._limit, self._placed = tokenizer, limit, placed
        self._stride = limit // 4
        self.pad_id = int(tokenizer.pad_token_id or 0)
        # A question that leaves no room makes the Rust object panic, which ends the process: count its tokens first.
        self._counter = rust_copy(tokenizer, "words of tokens need it")
        # The Rust object takes its settings from the first call. Later calls have equal settings and do not touch them.
        self._encode("a", ["b"], [[0, 0, 0, 0]])

    def question_length(self, question: str) -> int:
        """Tokens of the question, special tokens included."""
        return len(self._counter.encode(question.split(), is_pretokenized=True).ids)

    def windows(self, question: str, words: Words, size: Size) -> list[Window]:
        """Overlapping windows over all words."""
        boxes = words.scaled(size).tolist()
        encoding = self._encode(question, words.texts, boxes)
        return [self._window(encoding, at, boxes) for at in range(len(encoding["input_ids"]))]

    def tokens_of(self, windows: Sequence[Window]) -> int:
        """Tokens of the question and all words in a single window."""
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


@dataclass(frozen=True, slots=True)
class _Question:
    """Question and options of a request; `whole` keeps all windows of a page."""

    text: str
    top_k: int
    max_answer_tokens: int
    threshold: float
    whole: bool


@dataclass(frozen=True, slots=True)
class _Page:
    """One item: pixel values (None for a model that reads no picture), size, words, windows, and question."""

    pixels: np.ndarray | None
    size: Size
    words: Words
    windows: list[Window]
    question: _Question


class DocumentQaAdapter(ImageExtractAdapter):
    """An extractive question-answering head over words, places and (LayoutLMv3) the picture."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="document_qa",
        operations=("extract",),
        inputs=("image",),
        outputs=("json",),
    )
    overflows = ("truncate", "chunk", "error")
    asks = True
    model_class = "AutoModelForDocumentQuestionAnswering"

    def __init__(
        self, model: Any, processor: Any, longest: int | None = None, batch_tokens: int = 16384
    ) -> None:
        """Take over a loaded model and its processor; windows have at most `longest` tokens, passes `batch_tokens`.

        Raises ValueError for another kind of model.
        """
        super().__init__(model, processor)
        self._batch_tokens = batch_tokens
        config = model.config
        if config.model_type not in KINDS:
            raise ValueError(f"{config.model_type} is not supported, only {', '.join(KINDS)}")
        self._sees = config.model_type == "layoutlmv3"
        tokenizer = processor.tokenizer if self._sees else processor
        # Both kinds keep positions in the manner of RoBERTa where their vocabulary pads with 1.
        positions = int(config.max_position_embeddings) - (
            config.pad_token_id + 1 if config.pad_token_id else 0
        )
        self._limit = min(positions, int(tokenizer.model_max_length), longest or positions)
        self._reader = PageReader(tokenizer, self._limit, placed=self._sees)
        self._filler = filler_of(model, self._reader.pad_id)
        self.known_ids = KnownIds(embedding_rows(model), tokenizer)

    @classmethod
    def build(cls, model: Any, processor: Any, context: LoadContext) -> Self:
        """With the catalog's length."""
        return cls(model, processor, context.max_sequence_length, context.batch_tokens)

    @property
    def max_sequence_length(self) -> int:
        """Longest window in tokens: the question and the words of the page."""
        return self._limit

    def wanted_of(self, call: ExtractCall) -> _Question:
        """The question and its options. Raises `InputTooLong` for a question that leaves little room for the page."""
        options, question = OptionReader(call), call.instruction or ""
        if not question.strip():
            raise InvalidInput("params.instruction: this model needs a question")
        refuse_endless(question, self._limit)
        tokens, most = self._reader.question_length(question), self._limit // 2
        if not tokens:
            raise InvalidInput("params.instruction: the question has no token in this model")
        if tokens > most:
            raise InputTooLong(
                f"params.instruction: {tokens} tokens, this model reads questions of up to {most}"
            )
        return _Question(
            question,
            options.whole("top_k", 1, 1, 50),
            min(self._limit, options.whole("max_answer_tokens", 15, 1)),
            options.threshold("threshold", 0.0),
            call.overflow == "chunk",
        )

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Decode pages and lay out their words. Raises `InvalidInput` for words or boxes that cannot be used."""
        for item in items:
            words_of(item, f"{call.names.item.format(place_of(item, call))}.metadata")
        return super().prepare(items, call)

    def prepared(self, image: Any, item: InputItem, wanted: Any) -> Prepared | ItemFailure:
        """Windows over the words, and pixel values float32 [3, h, w] for a model that reads pictures."""
        size = size_of(image)
        words = words_of(item, "metadata")
        windows = self._reader.windows(wanted.text, words, size)
        cut = len(windows) > 1 and not wanted.whole
        used = windows[:1] if cut else windows
        pixels = None
        if self._sees:
            processed = self._processor.image_processor(images=image, return_tensors="np")
            pixels = np.asarray(processed["pixel_values"][0], np.float32)
        page = _Page(pixels, size, words.on_page(size), used, wanted)
        excess = Excess(self._reader.tokens_of(windows), self._limit, "with the question") if cut else None
        return Prepared(page, sum(_cost(page, window) for window in used), cut, excess=excess)

    def ids_of(self, payload: _Page) -> list[np.ndarray]:
        """The windows."""
        return [window.ids for window in payload.windows]

    def collate(self, prepared: Sequence[Prepared]) -> list[_Page]:
        """The pages; `extract` pads their windows."""
        return [item.payload for item in prepared]

    def padding_ratio(self, batch: list[_Page]) -> float:
        """Share of padding in the windows."""
        pairs, tokens, parts = self._parts(batch)
        lengths = [len(window.ids) for _, window in pairs]
        filled = sum(len(lengths[part]) * max(lengths[part]) - sum(lengths[part]) for part in parts)
        return padding_share(sum(tokens), sum(tokens) + filled)

    def _parts(self, batch: list[_Page]) -> tuple[list[tuple[_Page, Window]], list[int], list[slice]]:
        """All windows with their pages, the tokens of each window, and the slices of windows that run together."""
        pairs = [(page, window) for page in batch for window in page.windows]
        tokens = [_cost(page, window) for page, window in pairs]
        return pairs, tokens, divided(tokens, self._batch_tokens)

    @torch.inference_mode()
    def extract(self, batch: list[_Page]) -> list[Extraction | ItemFailure]:
        """The likeliest answers to each page's question, the best first."""
        pairs, tokens, parts = self._parts(batch)
        steps = stepping.each(parts, [sum(tokens[part]) for part in parts])
        logits = [one for part in steps for one in self._logits(pairs[part])]
        extractions: list[Extraction | ItemFailure] = []
        rest = iter(logits)
        for page in batch:
            own = [next(rest) for _ in page.windows]
            finite = all(np.isfinite(one).all() for one in own)
            extractions.append(Extraction(entities=_answers(page, own)) if finite else NOT_FINITE)
        return extractions

    def _logits(self, pairs: Sequence[tuple[_Page, Window]]) -> list[np.ndarray]:
        """float32 [2, t], of starts and ends, for the tokens of each window."""
        longest = max(len(window.ids) for _, window in pairs)
        ids = np.full((len(pairs), longest), self._filler, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        boxes = np.zeros((*ids.shape, 4), np.int64)
        for row, (_, window) in enumerate(pairs):
            count = len(window.ids)
            ids[row, :count], mask[row, :count] = window.ids, 1
            types[row, :count], boxes[row, :count] = window.types, window.boxes
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "bbox": boxes}
        if self._sees:
            inputs["pixel_values"] = np.stack([page.pixels for page, _ in pairs if page.pixels is not None])
        output = self._model(**{name: self.on_device(array) for name, array in inputs.items()})
        both = torch.stack([output.start_logits, output.end_logits], dim=1).float().cpu().numpy()
        return [both[row, :, : len(window.ids)] for row, (_, window) in enumerate(pairs)]


def _cost(page: _Page, window: Window) -> int:
    """Tokens of a window and of the page's picture."""
    return len(window.ids) + (0 if page.pixels is None else patches(page.pixels))


def _answers(page: _Page, logits: Sequence[np.ndarray]) -> list[Entity]:
    """The best spans of words over all windows."""
    best: dict[tuple[int, int], float] = {}
    for window, both in zip(page.windows, logits, strict=True):
        for span, score in _spans(window, both, page.question):
            best[span] = max(score, best.get(span, 0.0))
    ranked = sorted(best.items(), key=lambda pair: -pair[1])[: page.question.top_k]
    return [
        Entity(page.words.text(*span), "answer", score, bbox=pixel_box(page.words.around(*span), page.size))
        for span, score in ranked
        if score >= page.question.threshold
    ]


def _spans(window: Window, both: np.ndarray, question: _Question) -> list[tuple[tuple[int, int], float]]:
    """The best `top_k` spans as ((first word, last word), score of the best span of tokens over these words).

    The first token takes part in the softmax, as the model's choice for "no answer", but is never an answer.
    """
    allowed = window.words >= 0
    if not allowed.any():
        return []
    allowed[0] = True
    masked = np.where(allowed, both, -np.inf)
    chances = np.exp(masked - masked.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[:, 0] = 0.0
    outer = np.tril(np.triu(np.outer(*chances)), question.max_answer_tokens - 1)
    most = min(outer.size, _CANDIDATES * question.top_k)
    flat = outer.ravel()
    likeliest = np.argpartition(-flat, most - 1)[:most]
    scores: dict[tuple[int, int], float] = {}
    for at in likeliest[np.argsort(-flat[likeliest], kind="stable")].tolist():
        start, end = divmod(at, len(window.ids))
        score = float(flat[at])
        if score <= 0.0 or len(scores) >= question.top_k:
            break
        scores.setdefault((int(window.words[start]), int(window.words[end])), score)
    return list(scores.items())
