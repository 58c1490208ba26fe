"""Entities of any type by GLiNER: labels go before the text, spans of words are scored against each label.

Words, collating, forward pass and decoding are those of the library (`gliner` 0.2.29); here are its limits:

1. `prepare` splits words, counts their tokens and cuts the text to the model's words and positions, so that the library
   never cuts a label away;
2. `collate` makes rectangles of similar lengths, each within a bound of span scores;
3. `extract` decodes with each item's own options, of the likeliest candidates only, so that a threshold of 0 over many
   labels costs no more than a little.

Models with a relations layer also score relations between their entities (`options.relations`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.errors import InputTooLong, InvalidInput
from ipc.extras import require
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import BUILDING, parameter_bytes
from workers.adapters.shared.checkpoint import CheckpointError
from workers.adapters.shared.extracting import NOT_FINITE, ExtractAdapter, place_of, text_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import masked_share
from workers.adapters.shared.word_spans import (
    Batch,
    Wanted,
    Words,
    WordTokenizer,
    bound_candidates,
    bound_pairs,
    fields_of,
    found_in,
    rectangles,
)

EXTRA = "gliner"
KINDS = ("UniEncoderSpanGLiNER", "UniEncoderTokenGLiNER", "UniEncoderSpanRelexGLiNER")
MOST_RELATIONS = 50
LONGEST_RELATION = 200


class GlinerAdapter(ExtractAdapter):
    """One GLiNER with its words splitter."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="gliner",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
        options=FAMILY_OPTIONS["gliner"],
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
        config = model.config
        self._markers = [config.ent_token, config.sep_token, getattr(config, "rel_token", config.ent_token)]
        if self._relational:
            bound_pairs(model.model)

    @classmethod
    def load(cls, context: LoadContext) -> GlinerAdapter:
        """Load with the library. Raises ImportError that names the extra, ValueError for other kinds of GLiNER."""
        library = require("gliner", EXTRA, "pip install --no-deps gliner")
        with BUILDING:
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
        """Relation models choose their entities within the forward pass, so thresholds and relations separate them."""
        if not self._relational or not isinstance(call, ExtractCall):
            return None
        wanted = self.wanted_of(call)
        return wanted.threshold, wanted.adjacency_threshold, tuple(wanted.relations)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Split, count and cut.

        Raises `InputTooLong` for labels that leave no room for a word, and for a text that is too long where the caller
        asked for an error.
        """
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        prompt = self._words.prompt_tokens(wanted.labels, wanted.relations)
        prepared: list[Prepared | ItemFailure] = []
        for item in items:
            words = self._words.split(
                text_of(item), wanted, prompt, self._limit, from_end=call.overflow == "truncate_left"
            )
            if not words.words and words.cut:
                raise InputTooLong(
                    f"params.labels: they take {prompt} tokens, the model takes {self._words.limit} with the text"
                )
            if words.cut and call.overflow == "error":
                count, tokens = self._words.count(words.text), self._words.limit or "any"
                raise InputTooLong(
                    f"{call.names.text.format(place_of(item, call))}: {count} words, this model takes "
                    f"{self._limit} words or {tokens} tokens with its labels"
                )
            prepared.append(Prepared(words, words.tokens, words.cut))
        return prepared

    def collate(self, prepared: Sequence[Prepared]) -> Batch:
        """Rectangles of items with words, as the library's collator makes them."""
        items: list[Words] = [item.payload for item in prepared]
        batch = Batch(items)
        width = max(int(getattr(self._model.config, "max_width", 1) or 1), 1)
        for places in rectangles(items, width, int(self._model.config.hidden_size)):
            chosen = [items[place] for place in places]
            # NOTE: a transformers tokenizer is not safe in two threads, and a retry collates beside the next batch.
            with self._collating:
                collated = self._model.collate_batch(
                    [{"tokenized_text": item.words, "ner": None} for item in chosen],
                    [list(item.wanted.labels) for item in chosen],
                    self._collator,
                    **({"relation_types": list(chosen[0].wanted.relations)} if self._relational else {}),
                )
            batch.parts.append((places, collated))
        return batch

    def padding_ratio(self, batch: Batch) -> float:
        """What the collator filled the rectangles up with."""
        return masked_share(collated["attention_mask"] for _, collated in batch.parts)

    def extract(self, batch: Batch) -> list[Extraction | ItemFailure]:
        """The entities (and relations) of each item, by place."""
        found: list[Extraction | ItemFailure] = [Extraction() for _ in batch.items]
        for places, collated in batch.parts:
            wanted = [batch.items[place].wanted for place in places]
            spans, relations, finite = self._run(collated, wanted)
            for at, place in enumerate(places):
                item = batch.items[place]
                found[place] = found_in(item, spans[at], relations[at]) if finite[at] else NOT_FINITE
        return found

    @torch.inference_mode()
    def _run(
        self, collated: dict[str, Any], wanted: Sequence[Wanted]
    ) -> tuple[list[Any], list[Any], list[bool]]:
        """Spans and relations of each item of a rectangle, and whether its scores are finite."""
        first, arguments = wanted[0], {}
        if self._relational:
            arguments["adjacency_threshold"] = first.adjacency_threshold
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
    """Raise CheckpointError where safetensors lack a weight: the library leaves it random and says nothing."""
    from safetensors import safe_open

    stored: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            stored.update(file.keys(), file.metadata() or {})
    missing = sorted(name for name, _ in model.named_parameters() if name not in stored)
    if stored and missing:
        raise CheckpointError(f"the checkpoint lacks weights: {', '.join(missing[:3])} and others")
