"""Entities of any type by GLiNER: labels go before the text, spans of words are scored against each label.

Words, collating, forward pass and decoding are those of the library (`gliner` 0.2.29). This module adds limits:

1. `prepare` splits words, counts their tokens and cuts the text to the model's words and positions, so that the library
   never cuts a label away.
2. `collate` makes rectangles of similar lengths, each within a bound of span scores.
3. `extract` decodes with each item's own options, and only the likeliest candidates, so that a threshold of 0 over many
   labels costs little.

Models with a relations layer also score relations between their entities (`options.relations`). Bi-encoders do not read
labels before the text: a second encoder makes a vector of each label (`shared.label_vectors`).

With an `output_schema` the names of its `properties` are labels to look for. A property of type "array" collects all
texts found under its name, any other property takes the likeliest text, or null.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ipc.errors import InputTooLong, InvalidInput
from ipc.extras import require
from ipc.wire.extraction import Entity, Extraction, Relation
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import BUILDING, parameter_bytes
from workers.adapters.shared.checkpoint import CheckpointError, stored_limit
from workers.adapters.shared.extracting import NOT_FINITE, ExtractAdapter, place_of, text_of
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.label_vectors import Ids, LabelEncoder
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.own_code import own_code
from workers.adapters.shared.packing import Int64Array, masked_share
from workers.adapters.shared.tokenizing import as_ids, rust_copy
from workers.loading.reading import safe_open

EXTRA = "gliner"
BI_ENCODERS = ("BiEncoderSpanGLiNER", "BiEncoderTokenGLiNER")
KINDS = ("UniEncoderSpanGLiNER", "UniEncoderTokenGLiNER", "UniEncoderSpanRelexGLiNER", *BI_ENCODERS)
MOST_RELATIONS = 50
LONGEST_RELATION = 200
Fields = Mapping[str, bool]
"""Field names in order, with whether a field collects many texts."""

MOST_FIELDS = 200
LONGEST_NAME = 200


_LEAST_FILL = 0.8
"""A rectangle ends at a text shorter than this share of the rectangle's longest text."""
_MOST_VALUES = 1 << 26
"""Most values of a rectangle: spans (words x widths x the larger of labels and hidden size) or paired entities."""
_MOST_CANDIDATES = 1000
"""Most spans of one text among which the decoder chooses."""
_MOST_ENDS = 100
"""Most first words, and most last words, of which a token-level decoder makes spans."""
_MOST_PAIRED = 50
"""Most entities of one text between which relations are looked for."""


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
    """The texts found for each field."""
    data: dict[str, Any] = {}
    for name, collects in fields.items():
        matching = [entity for entity in entities if entity.label == name]
        if collects:
            data[name] = [entity.text for entity in matching]
        else:
            data[name] = max(matching, key=lambda entity: entity.score).text if matching else None
    return data


@dataclass(frozen=True, slots=True)
class Wanted:
    """Labels and options of a request; thresholds are probabilities.

    `label_ids` are the token ids of the labels for a bi-encoder, none for other models.
    """

    labels: Sequence[str]
    relations: Sequence[str]
    fields: Fields
    threshold: float
    relation_threshold: float
    adjacency_threshold: float
    flat: bool
    multi_label: bool
    merge: bool
    label_ids: Sequence[Ids] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """One item: its text, the words with their places in characters, and whether words were cut.

    `tokens` counts the tokens of the words and of the labels before them; `ids` and `prompt_ids` are these tokens.
    """

    text: str
    words: list[str]
    starts: list[int]
    ends: list[int]
    tokens: int
    cut: bool
    wanted: Wanted
    ids: np.ndarray
    prompt_ids: np.ndarray


@dataclass(slots=True)
class Batch:
    """Items, and the collated rectangles, each with the places of its items in `items`."""

    items: list[Words]
    parts: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)


class WordTokenizer:
    """Splits texts into words with the library's splitter, and counts tokens.  Thread-safe."""

    def __init__(self, processor: Any) -> None:
        """Take the splitter and a copy of the tokenizer's Rust object. Raises ValueError when it has none."""
        tokenizer = processor.transformer_tokenizer
        self._processor, self._backend = processor, rust_copy(tokenizer)
        self._special = as_ids(self._backend.encode("").ids)
        self.limit = stored_limit(tokenizer)

    def prompt_ids(self, labels: Sequence[str], relations: Sequence[str]) -> np.ndarray:
        """int64 [t] tokens of the labels and relations before the text, and special tokens."""
        if not labels:
            return self._special
        more = {"relations": [list(relations)]} if relations else {}
        [[*words]], _ = self._processor.prepare_inputs([[]], [list(labels)], **more)
        return np.concatenate((self._special, self._tokens(words)[0]))

    def split(
        self, text: str, wanted: Wanted, prompt: np.ndarray, most_words: int, *, from_end: bool = False
    ) -> Words:
        """The first words of a text, or with `from_end` the last ones.

        At most `most_words`, and no more than the model has positions for behind the tokens of a prompt.
        """
        words = list(self._processor.words_splitter(text))
        part = words[-most_words:] if from_end else words[:most_words]
        ids, owners = self._tokens([word for word, _, _ in part])
        if self.limit is not None:
            counts = np.bincount(owners, minlength=len(part))
            taken = np.cumsum(counts[::-1] if from_end else counts)
            fitting = int(np.searchsorted(taken, self.limit - len(prompt), side="right"))
            first, end = (len(part) - fitting, len(part)) if from_end else (0, fitting)
            part, ids = part[first:end], ids[(owners >= first) & (owners < end)]
        return Words(
            text,
            [word for word, _, _ in part],
            [start for _, start, _ in part],
            [end for _, _, end in part],
            len(prompt) + len(ids),
            len(part) < len(words),
            wanted,
            ids,
            prompt,
        )

    def count(self, text: str) -> int:
        """Words of a text."""
        return sum(1 for _ in self._processor.words_splitter(text))

    def _tokens(self, words: list[str]) -> tuple[Int64Array, Int64Array]:
        """int64 [t] tokens of the words, and the place of each token's word."""
        if not words:
            return as_ids([]), as_ids([])
        # NOTE: `encode` keeps the interpreter's lock for as long as it takes, `encode_batch` does not.
        [encoding] = self._backend.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.word_ids, strict=True)
        owned = [(token, word) for token, word in pairs if word is not None]
        return as_ids([token for token, _ in owned]), as_ids([word for _, word in owned])


def rectangles(items: Sequence[Words], width: int, hidden: int) -> Iterator[list[int]]:
    """Groups of items to pad together, as places in `items`, longest text first.

    Items without words are left out, and items of whose words and labels the tokenizer makes nothing.

    `width` is the widest span in words, `hidden` the width of the model.
    """
    order = sorted(
        (place for place, item in enumerate(items) if item.words and item.tokens),
        key=lambda place: -len(items[place].words),
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
    """Whether the scores of each item are finite, and the logits with minus infinity for the unlikely candidates.

    `logits` are fp32 [items, words, widths, labels] of spans, or with `at_ends` [items, words, labels, 3] of starts,
    ends and insides; `lengths` counts the words of each item. Where a span has one label, its other labels go first.
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
    """Set all but the `most` largest values to minus infinity, in place."""
    if logits.numel() > most:
        dropped = torch.ones(logits.numel(), dtype=torch.bool, device=logits.device)
        dropped[torch.topk(logits.flatten(), most).indices] = False
        logits.masked_fill_(dropped.view(logits.shape), float("-inf"))


def bound_pairs(core: Any) -> None:
    """Let a relation model pair only the likeliest entities of each text, as pairs grow with the square of entities."""
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
    """Join neighbours of one label with at most one character between them; the first one's score holds.

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


class GlinerAdapter(ExtractAdapter):
    """One GLiNER."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="gliner",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "required"
    overflows = ("truncate", "truncate_left", "error")
    schema = True

    def __init__(self, model: Any, words: WordTokenizer, limit: int) -> None:
        """Take over a library model (eval mode, on its device); `limit` counts words."""
        self._model, self._words, self._limit = model, words, limit
        self._relational = getattr(model.config, "relations_layer", None) is not None
        self._by_words = model.config.span_mode == "token_level"
        self._collator = model.create_collator()
        self._collating = threading.Lock()
        self._labels = LabelEncoder(model) if type(model).__name__ in BI_ENCODERS else None
        config = model.config
        self._markers = [config.ent_token, config.sep_token, getattr(config, "rel_token", config.ent_token)]
        if self._labels is not None:
            self._collator.prepare_entities, self._markers = False, []
        if self._relational:
            bound_pairs(model.model)
        encoder, tokenizer = model.model.token_rep_layer, model.data_processor.transformer_tokenizer
        self.known_ids = KnownIds(embedding_rows(encoder), tokenizer)
        self._filler = filler_of(encoder.bert_layer.model, tokenizer.pad_token_id)

    @classmethod
    def load(cls, context: LoadContext) -> GlinerAdapter:
        """Load with the library. Raises ImportError that names the extra, ValueError for other kinds of GLiNER."""
        library = require("gliner", EXTRA, "pip install --no-deps gliner")
        with BUILDING, own_code(allowed=context.trust_remote_code):
            model = library.GLiNER.from_pretrained(
                str(context.directory), map_location=str(context.device), dtype=context.dtype
            )
        if type(model).__name__ not in KINDS:
            raise ValueError(f"{type(model).__name__} is not supported, only {', '.join(KINDS)}")
        _require_weights(context.directory, model.model)
        context.progress("weights", 1.0)
        model.eval().requires_grad_(False)
        longest = int(model.config.max_len)
        words = WordTokenizer(model.data_processor)
        return cls(model, words, min(context.max_sequence_length or longest, longest))

    @property
    def max_sequence_length(self) -> int:
        """Longest text in words."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model.model)

    def labels_of(self, call: ExtractCall) -> list[str]:
        """The caller's labels, then the fields of the schema."""
        return list(dict.fromkeys([*call.labels, *fields_of(call)]))

    def wanted_of(self, call: ExtractCall) -> Wanted:
        """Options, labels and fields of a call.

        Raises `InvalidInput` for relations where the model has no layer for relations, and for labels that hold the
        model's own markers.
        """
        options = OptionReader(call)
        threshold = options.threshold("threshold", 0.5)
        wanted = Wanted(
            labels=self.labels_of(call),
            relations=options.texts("relations", MOST_RELATIONS, LONGEST_RELATION),
            fields=fields_of(call),
            threshold=threshold,
            relation_threshold=options.threshold("relation_threshold", threshold),
            adjacency_threshold=options.threshold("adjacency_threshold", threshold),
            flat=options.flag("flat_ner", True),
            multi_label=options.flag("multi_label", False),
            merge=options.flag("merge_adjacent_entities", False),
        )
        if wanted.relations and not self._relational:
            raise InvalidInput("params.options.relations: this model finds no relations")
        for text in (*wanted.labels, *wanted.relations):
            marker = next((one for one in self._markers if one in text), None)
            if marker is not None:
                raise InvalidInput(
                    f"params.labels: {text[:64]!r} holds {marker!r}, which marks labels in this model"
                )
        return wanted

    def group(self, call: Call) -> Hashable:
        """Thresholds and relations of a relation model, whose forward pass depends on them; else None."""
        if not self._relational or not isinstance(call, ExtractCall):
            return None
        wanted = self.wanted_of(call)
        return wanted.threshold, wanted.adjacency_threshold, tuple(wanted.relations)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Split texts into words and cut them to the model's limits.

        Raises `InputTooLong` for labels that leave no room for a word, and with the policy "error" for a text that is
        too long.
        """
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        if self._labels is None:
            prompt, apart = self._words.prompt_ids(wanted.labels, wanted.relations), 0
        else:
            wanted = replace(wanted, label_ids=self._labels.tokenize(wanted.labels))
            prompt, apart = self._words.prompt_ids([], []), sum(map(len, wanted.label_ids))
        prepared: list[Prepared | ItemFailure] = []
        for item in items:
            words = self._words.split(
                text_of(item), wanted, prompt, self._limit, from_end=call.overflow == "truncate_left"
            )
            if not words.words and words.cut:
                raise InputTooLong(
                    f"params.labels: they take {len(prompt)} tokens, the model takes {self._words.limit} with the text"
                )
            if words.cut and call.overflow == "error":
                count, tokens = self._words.count(words.text), self._words.limit or "any"
                raise InputTooLong(
                    f"{call.names.text.format(place_of(item, call))}: {count} words, this model takes "
                    f"{self._limit} words or {tokens} tokens with its labels"
                )
            prepared.append(Prepared(words, words.tokens + apart, words.cut))
        return prepared

    def ids_of(self, payload: Words) -> list[np.ndarray]:
        """Labels and words."""
        return [payload.prompt_ids, payload.ids]

    def collate(self, prepared: Sequence[Prepared]) -> Batch:
        """Rectangles of items with words, as the library's collator makes them."""
        items: list[Words] = [item.payload for item in prepared]
        batch = Batch(items)
        width = max(int(getattr(self._model.config, "max_width", 1) or 1), 1)
        for places in rectangles(items, width, int(self._model.config.hidden_size)):
            chosen = [items[place] for place in places]
            # NOTE: a transformers tokenizer is not thread-safe, and a retry may collate while the next batch does.
            with self._collating:
                collated = self._model.collate_batch(
                    [{"tokenized_text": item.words, "ner": None} for item in chosen],
                    [list(item.wanted.labels) for item in chosen],
                    self._collator,
                    **({"relation_types": list(chosen[0].wanted.relations)} if self._relational else {}),
                )
            # The tokenizer pads with a token of its own, for which the model may have no embedding.
            collated["input_ids"].masked_fill_(collated["attention_mask"] == 0, self._filler)
            batch.parts.append((places, collated))
        return batch

    def padding_ratio(self, batch: Batch) -> float:
        """Share of padding in the collated rectangles."""
        return masked_share(collated["attention_mask"] for _, collated in batch.parts)

    def extract(self, batch: Batch) -> list[Extraction | ItemFailure]:
        """The entities and relations of each item."""
        extractions: list[Extraction | ItemFailure] = [Extraction() for _ in batch.items]
        for places, collated in batch.parts:
            wanted = [batch.items[place].wanted for place in places]
            spans, relations, finite = self._run(collated, wanted)
            for at, place in enumerate(places):
                item = batch.items[place]
                extractions[place] = found_in(item, spans[at], relations[at]) if finite[at] else NOT_FINITE
        return extractions

    @torch.inference_mode()
    def _run(
        self, collated: dict[str, Any], wanted: Sequence[Wanted]
    ) -> tuple[list[Any], list[Any], list[bool]]:
        """Spans and relations of each item of a rectangle, and whether its scores are finite."""
        first = wanted[0]
        arguments: dict[str, Any] = {}
        if self._relational:
            arguments["adjacency_threshold"] = first.adjacency_threshold
        if self._labels is not None:
            arguments = self._labels.inputs([one.label_ids for one in wanted])
        output = self._model.run_batch(collated, threshold=first.threshold, **arguments)
        lengths = [len(words) for words in collated["tokens"]]
        finite, output.logits = bound_candidates(output.logits.float(), lengths, wanted, self._by_words)
        choices = {
            "threshold": [one.threshold for one in wanted],
            "flat_ner": [one.flat for one in wanted],
            "multi_label": [one.multi_label for one in wanted],
        }
        if not self._relational:
            return self._model.decode_batch(output, collated, **choices), [[] for _ in wanted], finite
        choices["relation_threshold"] = [one.relation_threshold for one in wanted]
        spans, relations = self._model.decode_batch(output, collated, **choices)
        return spans, relations, finite


def _require_weights(directory: Path, model: torch.nn.Module) -> None:
    """Raise CheckpointError where safetensors lack a weight, which the library would leave random without a word."""
    stored: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            stored.update(file.keys(), file.metadata() or {})
    missing = sorted(name for name, _ in model.named_parameters() if name not in stored)
    if stored and missing:
        raise CheckpointError(f"the checkpoint lacks weights: {', '.join(missing[:3])} and others")
