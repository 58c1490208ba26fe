"""Parts of the GLiNER family: words with places, rectangles of items, bounds on candidates, and answers.

With an `output_schema` the names of its `properties` are the labels to look for. A property of type "array" collects
all texts found under its name, any other takes the likeliest text, or null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.extraction import Entity, Extraction, Relation
from ipc.wire.messages import ExtractCall
from workers.adapters.shared.checkpoint import stored_limit
from workers.adapters.shared.tokenizing import rust_copy

Fields = Mapping[str, bool]
"""Field names in order, with whether a field collects many texts."""

MOST_FIELDS = 200
LONGEST_NAME = 200


_LEAST_FILL = 0.8
"""A rectangle ends where a text is shorter than this share of its longest one."""
_MOST_VALUES = 1 << 26
"""Values of one rectangle: of spans (words x widths x the larger of labels and hidden size) or of paired entities."""
_MOST_CANDIDATES = 1000
"""Spans of one text among which the decoder chooses."""
_MOST_ENDS = 100
"""First words, and last words, of which a token-level decoder makes spans."""
_MOST_PAIRED = 50
"""Entities of one text between which relations are looked for."""


def fields_of(call: ExtractCall) -> Fields:
    """The fields of a call's schema, none without one. Raises `InvalidInput` for a schema of another form."""
    schema = call.output_schema
    if schema is None:
        return {}
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        raise InvalidInput("params.output_schema.properties: a map with at least one field is needed")
    if len(properties) > MOST_FIELDS:
        raise InvalidInput(
            f"params.output_schema.properties: {len(properties)} given, the limit is {MOST_FIELDS}"
        )
    return {_name(name): _collects(name, value) for name, value in properties.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidInput(
            f"params.output_schema.properties: {str(name)[:64]!r} must be 1 to {LONGEST_NAME} printable characters"
        )
    return name


def _collects(name: str, value: Any) -> bool:
    kind = value.get("type", "string") if isinstance(value, dict) else None
    items = value.get("items") if isinstance(value, dict) else None
    nested = isinstance(items, dict) and items.get("type", "string") != "string"
    if kind not in ("string", "array") or nested:
        raise InvalidInput(
            f"params.output_schema.properties.{name[:64]}: only strings and arrays of strings can be filled"
        )
    return bool(kind == "array")


def filled(fields: Fields, entities: Sequence[Entity]) -> dict[str, Any]:
    """What was found, by field."""
    data: dict[str, Any] = {}
    for name, collects in fields.items():
        found = [entity for entity in entities if entity.label == name]
        if collects:
            data[name] = [entity.text for entity in found]
        else:
            data[name] = max(found, key=lambda entity: entity.score).text if found else None
    return data


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of its items; thresholds are probabilities."""

    labels: Sequence[str]
    relations: Sequence[str]
    fields: Fields
    threshold: float
    relation_threshold: float
    adjacency_threshold: float
    flat: bool
    multi_label: bool
    merge: bool


@dataclass(frozen=True, slots=True)
class Words:
    """One item: its text and words, where each starts and ends, its tokens with the labels, and whether it was cut."""

    text: str
    words: list[str]
    starts: list[int]
    ends: list[int]
    tokens: int
    cut: bool
    wanted: Wanted


@dataclass(slots=True)
class Batch:
    """Items, and the collated rectangles with the places of their items."""

    items: list[Words]
    parts: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)


class WordTokenizer:
    """Splits texts into words as the library does, and counts tokens.  Thread-safe."""

    def __init__(self, processor: Any) -> None:
        """Take the splitter and a copy of the tokenizer's Rust object. Raises ValueError when it has none."""
        tokenizer = processor.transformer_tokenizer
        self._processor, self._backend = processor, rust_copy(tokenizer)
        self._special = int(self._backend.num_special_tokens_to_add(is_pair=False))
        self.limit = stored_limit(tokenizer)

    def prompt_tokens(self, labels: Sequence[str], relations: Sequence[str]) -> int:
        """Tokens before the text: labels, relations and the special ones."""
        more = {"relations": [list(relations)]} if relations else {}
        [[*words]], _ = self._processor.prepare_inputs([[]], [list(labels)], **more)
        return int(self._counts(words).sum()) + self._special

    def split(
        self, text: str, wanted: Wanted, prompt: int, most_words: int, *, from_end: bool = False
    ) -> Words:
        """The words of a text, at most `most_words` and no more than the model has positions for after the prompt.

        Those at the beginning are kept, or those at the end.
        """
        found = list(self._processor.words_splitter(text))
        kept = found[-most_words:] if from_end else found[:most_words]
        counts = self._counts([word for word, _, _ in kept])
        if self.limit is not None:
            taken = np.cumsum(counts[::-1] if from_end else counts)
            fitting = int(np.searchsorted(taken, self.limit - prompt, side="right"))
            place = slice(len(kept) - fitting, None) if from_end else slice(fitting)
            kept, counts = kept[place], counts[place]
        return Words(
            text,
            [word for word, _, _ in kept],
            [start for _, start, _ in kept],
            [end for _, _, end in kept],
            prompt + int(counts.sum()),
            len(kept) < len(found),
            wanted,
        )

    def count(self, text: str) -> int:
        """Words of a text."""
        return sum(1 for _ in self._processor.words_splitter(text))

    def _counts(self, words: list[str]) -> np.ndarray:
        """int64 [words] tokens of each word."""
        if not words:
            return np.zeros(0, dtype=np.int64)
        # NOTE: `encode` keeps the interpreter's lock for as long as it takes, `encode_batch` does not.
        [encoding] = self._backend.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        places = [place for place in encoding.word_ids if place is not None]
        return np.bincount(np.asarray(places, dtype=np.int64), minlength=len(words))


def rectangles(items: Sequence[Words], width: int, hidden: int) -> Iterator[list[int]]:
    """Places of items with words, longest first, in groups to be padded together; `width` is the widest span."""
    order = sorted(
        (place for place, item in enumerate(items) if item.words), key=lambda place: -len(items[place].words)
    )
    group: list[int] = []
    for place in order:
        longest = len(items[(group or [place])[0]].words)
        labels = max(len(items[other].wanted.labels) for other in (*group, place))
        paired = _MOST_PAIRED**2 * len(items[place].wanted.relations) * hidden
        values = (len(group) + 1) * max(longest * width * max(labels, hidden), paired)
        if group and (len(items[place].words) < _LEAST_FILL * longest or values > _MOST_VALUES):
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def bound_candidates(
    logits: torch.Tensor, lengths: Sequence[int], wanted: Sequence[Wanted], at_ends: bool
) -> tuple[list[bool], torch.Tensor]:
    """Whether the scores of each item are finite, and the logits with all but the likeliest candidates taken out.

    `logits` are fp32 [items, words, widths, labels] of spans, or with `at_ends` [items, words, labels, 3] of starts,
    ends and insides; `lengths` counts the words of each item.  Where a span may have one label, the others go first.
    """
    finite, bounded = [], logits.clone()
    for row, length, one in zip(bounded, lengths, wanted, strict=True):
        labels = len(one.labels)
        known = row[:length, :labels] if at_ends else row[:length, :, :labels]
        finite.append(bool(torch.isfinite(known).all()))
        if at_ends:
            _keep(known[..., 0], _MOST_ENDS)
            _keep(known[..., 1], _MOST_ENDS)
            continue
        if not one.multi_label:
            best = known.amax(dim=-1, keepdim=True)
            known.masked_fill_(known < best, float("-inf"))
        _keep(known, _MOST_CANDIDATES)
    return finite, bounded


def _keep(logits: torch.Tensor, most: int) -> None:
    """Take out all but the `most` largest values, in place."""
    if logits.numel() > most:
        dropped = torch.ones(logits.numel(), dtype=torch.bool, device=logits.device)
        dropped[torch.topk(logits.flatten(), most).indices] = False
        logits.masked_fill_(dropped.view(logits.shape), float("-inf"))


def bound_pairs(core: Any) -> None:
    """Let a relation model pair only the likeliest entities of each text: pairs grow with their square."""
    select = core.select_span_target_embedding

    def bounded(
        rep: Any, scores: Any, mask: Any, labels: Any = None, threshold: float = 0.5, **more: Any
    ) -> Any:
        flat = mask.view(len(mask), -1).bool()
        if scores is not None and scores.size(-1) and flat.shape[1] > _MOST_PAIRED:
            best = scores.amax(dim=-1).view(len(mask), -1).masked_fill(~flat, float("-inf"))
            last = torch.topk(best, _MOST_PAIRED, dim=1).values[:, -1:]
            mask = (flat & (best >= last)).view(mask.shape).to(mask.dtype)
        return select(rep, scores, mask, labels, threshold, **more)

    core.select_span_target_embedding = bounded


def found_in(item: Words, spans: Sequence[Any], relations: Sequence[Any]) -> Extraction:
    """The library's spans (`start` and `end` are words) and relations of one item as an answer."""
    entities = []
    for span in spans:
        start, end = item.starts[span.start], item.ends[span.end]
        entities.append(Entity(item.text[start:end], span.entity_type, float(span.score), start, end))
    related = [
        Relation(entities[head].text, entities[tail].text, str(name), float(score))
        for head, name, tail, score in relations
        if head < len(entities) and tail < len(entities)
    ]
    if item.wanted.merge:
        entities = _merged(item.text, entities)
    return Extraction(entities=entities, relations=related, data=filled(item.wanted.fields, entities))


def _merged(text: str, entities: Sequence[Entity]) -> list[Entity]:
    """Neighbours of one label, with at most one character between them, as one; it has the score of the first.

    The rule is that of the NuNER Zero model card.
    """
    merged: list[Entity] = []
    for entity in entities:
        before = merged[-1] if merged else None
        near = before is not None and entity.start is not None and entity.start - (before.end or 0) in (0, 1)
        if before is not None and near and before.label == entity.label:
            piece = text[before.start : entity.end]
            merged[-1] = Entity(piece, before.label, before.score, before.start, entity.end)
        else:
            merged.append(entity)
    return merged
