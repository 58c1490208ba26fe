"""GLiNER2: entities of any type; labels go before the text, and spans of words are scored against each label.

Tokens, forward pass and decoding are those of the library (`gliner2` 2.1.0). This module adds limits:

1. `prepare` cuts a text to the words and tokens that the model takes beside its labels.
2. `collate` pads texts of similar lengths together.
3. `extract` decodes with each item's own threshold, and only the likeliest spans: a threshold of 0 costs little.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ipc.errors import InputTooLong, InvalidInput
from ipc.extras import require
from ipc.wire.extraction import Entity, Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import BUILDING, parameter_bytes
from workers.adapters.shared.checkpoint import position_limit, shortest
from workers.adapters.shared.extracting import NOT_FINITE, ExtractAdapter, place_of, text_of
from workers.adapters.shared.known_ids import KnownIds, embedding_rows
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.own_code import own_code
from workers.adapters.shared.packing import PackedBatch, TokenSequence, pack
from workers.adapters.shared.rectangles import PADDED
from workers.adapters.shared.tokenizing import as_ids

EXTRA = "gliner2"
LONGEST = 2048
"""Words and tokens of a text with its labels, where the catalog says nothing."""
_MOST_CANDIDATES = 1000
"""Most spans of one text among which the decoder chooses."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Labels of a request, and the least probability of an entity."""

    labels: Sequence[str]
    threshold: float


@dataclass(frozen=True, slots=True)
class Text:
    """One item: the text, the library's record of the text and its labels, and what is wanted."""

    text: str
    record: Any
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Batch:
    """Items, their tokens for counting, and the library's batches, each with the places of its items."""

    items: list[Text]
    packed: PackedBatch
    parts: list[tuple[list[int], Any]]


class Gliner2Adapter(ExtractAdapter):
    """One GLiNER2 of the span architecture."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="gliner2",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "required"

    def __init__(self, model: Any, limit: int) -> None:
        """Take over a library model (eval mode, on its device); `limit` counts words, and tokens with the labels."""
        self._model, self._processor, self._limit = model, model.processor, limit
        self._processor.change_mode(is_training=False)
        self._marks = tuple(self._processor.SPECIAL_TOKENS)
        self._tokenizing = threading.Lock()
        self.known_ids = KnownIds(embedding_rows(model.encoder), self._processor.tokenizer)

    @classmethod
    def load(cls, context: LoadContext) -> Gliner2Adapter:
        """Load with the library. Raises ImportError that names the extra, ValueError for other architectures."""
        library = require("gliner2.inference.engine", EXTRA)
        # Any text may hold words without tokens, about each of which the library warns.
        logging.getLogger("gliner2").setLevel(logging.ERROR)
        config = library.SpanExtractor.config_class.from_pretrained(str(context.directory))
        if getattr(config, "architecture", "span") != "span":
            raise ValueError(f"GLiNER2 models of the architecture {config.architecture!r} are not supported")
        with BUILDING, own_code(allowed=context.trust_remote_code):
            model = library.SpanExtractor.from_pretrained(str(context.directory), local_files_only=True)
        context.progress("weights", 1.0)
        model.to(context.device, context.dtype).eval().requires_grad_(False)
        return cls(model, shortest(context.max_sequence_length, LONGEST, _learned_positions(model.encoder)))

    @property
    def max_sequence_length(self) -> int:
        """Longest text in words, and in tokens with its labels."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model)

    def wanted_of(self, call: ExtractCall) -> Wanted:
        """Labels and threshold of a call. Raises `InvalidInput` for labels that hold the model's own markers."""
        for label in call.labels:
            mark = next((mark for mark in self._marks if mark in label), None)
            if mark is not None:
                raise InvalidInput(
                    f"params.labels: {label[:64]!r} holds {mark!r}, which marks labels in this model"
                )
        return Wanted(list(dict.fromkeys(call.labels)), OptionReader(call).threshold("threshold", 0.5))

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Split texts into words and cut them to the model's limits.

        Raises `InputTooLong` for labels that leave no room for a word, and with the policy "error" for a text that is
        too long.
        """
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        prepared: list[Prepared | ItemFailure] = []
        for item in items:
            text = text_of(item)
            record, cut = self._record(text, wanted.labels)
            if cut and call.overflow == "error":
                raise InputTooLong(
                    f"{call.names.text.format(place_of(item, call))}: this model takes {self._limit} words, or tokens "
                    "with the labels"
                )
            prepared.append(Prepared(Text(text, record, wanted), len(record.input_ids), cut))
        return prepared

    def _record(self, text: str, labels: Sequence[str]) -> tuple[Any, bool]:
        """The library's record of a text that fits into the limit, and whether words were cut."""
        text = self._processor._normalize_text(text)
        record = self._transformed(text, labels, self._limit)
        words = sum(1 for _ in self._processor.word_splitter(text, True))
        whole_words = min(words, self._limit)
        if (tokens := len(record.input_ids)) > self._limit:
            ends = [*record.text_word_first_positions[1:], tokens]
            whole_words = sum(1 for end in ends if end <= self._limit)
            if not whole_words:
                raise InputTooLong(
                    f"params.labels: {record.text_word_first_positions[0]} tokens, the model takes {self._limit} with "
                    "the first word of the text"
                )
            record = self._transformed(text, labels, whole_words)
        return record, whole_words < words

    def _transformed(self, text: str, labels: Sequence[str], words: int) -> Any:
        given = {"text": text, "schema": {"entities": dict.fromkeys(labels, "")}}
        # NOTE: a transformers tokenizer is not thread-safe.
        with self._tokenizing:
            return self._processor._transform_record(given, max_len=words)

    def ids_of(self, payload: Text) -> list[list[int]]:
        """Labels and text."""
        return [payload.record.input_ids]

    def collate(self, prepared: Sequence[Prepared]) -> Batch:
        """The library's batches, one for each group of similar lengths."""
        items: list[Text] = [item.payload for item in prepared]
        packed = pack([TokenSequence(as_ids(item.record.input_ids)) for item in items])
        order, parts, first = packed.restore.argsort().tolist(), [], 0
        for _, lens in PADDED.rectangles(packed):
            places = order[first : first + len(lens)]
            parts.append((places, self._processor._pad_batch([items[place].record for place in places])))
            first += len(lens)
        return Batch(items, packed, parts)

    def padding_ratio(self, batch: Batch) -> float:
        """Share of padding in the library's batches."""
        return PADDED.padding([batch.packed])

    @torch.inference_mode()
    def extract(self, batch: Batch) -> list[Extraction | ItemFailure]:
        """The entities of each item."""
        extractions: dict[int, Extraction | ItemFailure] = {}
        for places, part in batch.parts:
            for at, logits in enumerate(self._logits(part)):
                extractions[places[at]] = self._found(batch.items[places[at]], logits)
        return [extractions[place] for place in sorted(extractions)]

    def _logits(self, part: Any) -> list[torch.Tensor | None]:
        """For each item fp32 [labels, words, widths] on the host, or None where the model counts no entity."""
        dtype = None if self._model.dtype == torch.float32 else self._model.dtype
        moved = part.to(self._model.device, dtype)
        tokens, schemas = self._processor.extract_embeddings_from_batch(
            self._model.encode_tokens(moved, None), moved.input_ids, moved
        )
        scored, _ = self._model._compute_direct_span_logits_batched(moved, tokens, schemas)
        return [None if one[0] is None else one[0][0].float().cpu() for one in scored]

    def _found(self, item: Text, logits: torch.Tensor | None) -> Extraction | ItemFailure:
        if logits is None:
            return Extraction()
        if torch.isnan(logits).any():
            return NOT_FINITE
        scores = _likeliest(torch.sigmoid(logits))
        record, wanted = item.record, item.wanted
        [named] = self._model._extract_entities(
            list(wanted.labels),
            scores[None],
            len(record.start_token_idx),
            record.text_tokens,
            record.text,
            record.start_token_idx,
            record.end_token_idx,
            # A score of 0 is a span that was dropped.
            max(wanted.threshold, torch.finfo(torch.float32).tiny),
            {},
            True,
            True,
        )
        entities = [
            entity
            for label, spans in named.items()
            for span in spans
            if (entity := _entity(item.text, label, span)).text
        ]
        return Extraction(entities=sorted(entities, key=lambda entity: (entity.start or 0, entity.end or 0)))


def _entity(text: str, label: str, span: Any) -> Entity:
    """A span of the library within the text. The library reads a full stop behind texts that end without one."""
    start, end = span["start"], min(span["end"], len(text))
    return Entity(text[start:end], label, float(span["confidence"]), start, end)


def _learned_positions(encoder: Any) -> int | None:
    """How many positions an encoder has learned; None for relative and rotary positions, which go on."""
    learned = any(name.endswith("position_embeddings") for name, _ in encoder.named_modules())
    return position_limit(encoder) if learned else None


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    """`scores` with 0 for all but the likeliest spans."""
    if scores.numel() <= _MOST_CANDIDATES:
        return scores
    best = torch.topk(scores.flatten(), _MOST_CANDIDATES)
    return torch.zeros(scores.numel()).scatter_(0, best.indices, best.values).view(scores.shape)
