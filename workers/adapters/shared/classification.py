"""Classification heads of transformers over packed batches: of whole sequences, and of single tokens.

The transformer runs as one packed row (`TextEncoder`). The head is the model's own code: a stand-in takes the place of
the base model and hands the hidden states of the row to the head. At load the divided model is compared with the
untouched one, and the first of these ways is used that gives every sequence the logits of that sequence alone:

1. for whole sequences the head over the first tokens alone, then the head over all tokens, padded; for tokens the head
   over the row;
2. the untouched model over padded rectangles, over sequences of one length, over each sequence alone. Models with a
   decoder always run in one of these ways.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from workers.adapters.base import LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import (
    build_model,
    position_limit,
    stored_limit,
    text_limit,
    tokenizer_of,
)
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.extracting import ExtractAdapter
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.packing import Int64Array, PackedBatch, TokenSequence, divided, pack
from workers.adapters.shared.proving import (
    agree,
    odd_ids,
    possible,
    proof_sequences,
    proven_cut,
    zeros_count,
)
from workers.adapters.shared.rectangles import ALONE, PADDED, Cut, Rectangle, padded
from workers.adapters.shared.rope import LengthClasses
from workers.adapters.shared.sentence_transformers_layout import read_classifier
from workers.adapters.shared.tokenizing import add_lower_casing, apart_ids
from workers.device import stepping
from workers.device.oom import is_out_of_memory

log = logging.getLogger(__name__)


class _Given(nn.Module):
    """Stands in for a base model and answers every call with the hidden states in `hidden`."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.config = base.config
        self.pooler = getattr(base, "pooler", None)
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """The hidden states, pooled where the base model pools."""
        pooled = None if self.pooler is None else self.pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.hidden, pooler_output=pooled
        )


class _Classifier(ABC):
    """A packed transformer, a classification head, and the comparison with the untouched model."""

    factory: ClassVar[Any]
    batch_tokens = 16384
    """Most tokens of a forward pass."""
    known_ids: KnownIds | None = None
    """The ids for which the model has embeddings."""

    def __init__(
        self,
        model: Any,
        *,
        special_ids: frozenset[int] = frozenset(),
        pad_id: int = 0,
        types: bool = False,
    ) -> None:
        """Take over `model` (eval mode, on its device) and find its way of running; see `TextEncoder`."""
        self.model = model
        self.config: Any = model.config
        self.device: torch.device = model.device
        self._filler = filler_of(model, pad_id)
        self._base = model.base_model
        self._encoder: TextEncoder | None = None
        self._given: _Given | None = None
        self._lengths = LengthClasses(model)
        self._cut, self._types = self._lengths.within(PADDED), False
        self._find_way(frozenset({*special_ids, pad_id}), types)

    @property
    def packed(self) -> bool:
        """Whether batches run without padding."""
        return self._encoder is not None and self._encoder.packed

    @property
    def labels(self) -> list[str]:
        """The model's labels in the order of its logits."""
        return [str(self.config.id2label[index]) for index in range(self.config.num_labels)]

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self.model, self._base)

    @property
    def position_limit(self) -> int | None:
        """How many tokens the model has positions for, or None where the number is not known."""
        return position_limit(self._base)

    def text_limit(self, stated: int | None) -> int:
        """The longest sequence in tokens where the files state `stated`."""
        return text_limit(self._base, stated)

    def pack(self, sequences: list[TokenSequence]) -> PackedBatch:
        """One batch of host tensors; thread-safe."""
        if self._encoder is not None:
            return self._encoder.pack(sequences)
        return pack(sequences, types=self._types, pin=self.device.type == "cuda")

    def rows(self, sequences: list[TokenSequence]) -> list[PackedBatch]:
        """`pack` in several rows where the sequences have more than `batch_tokens`."""
        tokens = [len(sequence.ids) for sequence in sequences]
        return [self.pack(sequences[part]) for part in divided(tokens, self.batch_tokens)]

    def padding_ratio(self, rows: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in the forward passes of these rows."""
        return 0.0 if self.packed else self._cut.padding(rows)

    @torch.inference_mode()
    def _find_way(self, special_ids: frozenset[int], types: bool) -> None:
        """Divide the model, or choose which sequences run together through the whole model.

        Raises the error of memory that is short.
        """
        odd = odd_ids(self.model, special_ids)
        given = proof_sequences(embedding_rows(self.model), odd, self.position_limit)
        self._types = types and zeros_count(lambda types: self._logits_alone(given[2], types))
        alone = sorted(possible(given, self._logits_alone), key=lambda pair: -len(pair[0].ids))
        sequences, expected = [sequence for sequence, _ in alone], torch.cat([logits for _, logits in alone])
        if self._base is not self.model and not self.config.is_encoder_decoder:
            self._divide(sequences, expected, partial(TextEncoder, special_ids=special_ids, types=types))
        if self._encoder is not None:
            return
        batch, name = self.pack(sequences).to(self.device), type(self.model).__name__
        self._cut = proven_cut(name, partial(self._whole, batch), expected, self._lengths)

    def _logits_alone(self, sequence: TokenSequence, types: bool | None = None) -> torch.Tensor:
        """Logits of one sequence by the untouched model; `types` as in `pack`, by default those of the model."""
        batch = pack([sequence], types=self._types if types is None else types)
        [part] = padded(batch.to(self.device), self._filler, ALONE)
        return self._run(part)

    def _divide(
        self, sequences: list[TokenSequence], wanted: torch.Tensor, encoder: Callable[[Any], TextEncoder]
    ) -> None:
        """Divide base model and head; after a difference or an error put the model together again."""
        name, model = self.model.base_model_prefix, self.model
        attention = model.config._attn_implementation

        def proved() -> str | None:
            self._encoder = encoder(self._base)
            self._given = _Given(self._base)
            setattr(model, name, self._given)
            batch = self._encoder.pack(sequences).to(self.device)
            return "the head gives other values over packed rows" if not self._prove(batch, wanted) else None

        try:
            reason = proved()
            if reason is None:
                return
        except Exception as failure:
            if is_out_of_memory(failure):
                raise
            # NOTE: model code outside ours may raise anything; the whole model still works.
            reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        log.warning("%s runs whole and padded: %s", type(model).__name__, reason)
        setattr(model, name, self._base)
        model.set_attn_implementation(attention)
        self._encoder = self._given = None

    @abstractmethod
    def _prove(self, batch: PackedBatch, wanted: torch.Tensor) -> bool:
        """Whether the divided model gives the `wanted` logits, in packed order."""

    def _head(self, hidden: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [n, tokens, width] by the model's own head, which may read the ids too."""
        assert self._given is not None
        self._given.hidden = hidden
        try:
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
            return logits
        finally:
            self._given.hidden = None

    def _whole(self, batch: PackedBatch, cut: Cut | None = None) -> torch.Tensor:
        """Logits of the untouched model, in packed order: per sequence, or per token of the row."""
        return torch.cat(
            [logits for part in padded(batch, self._filler, self._cut) for logits in self._logits(part)]
        )

    def _logits(self, part: Rectangle) -> Iterator[torch.Tensor]:
        """Logits of a rectangle, or of its sequences alone where the model refuses them in this company."""
        try:
            rows = self._run(part)
        except Exception as failure:
            if len(part.ids) == 1 or is_out_of_memory(failure):
                raise
            # NOTE: BART asks that all texts of a pass have equal numbers of end markers.
            yield from map(self._run, part.alone())
        else:
            yield rows

    def _run(self, part: Rectangle) -> torch.Tensor:
        self._lengths.reset()
        logits: torch.Tensor = self.model(**part.inputs()).logits
        return logits[part.mask] if logits.dim() == 3 else logits


class SequenceClassifier(_Classifier):
    """A transformer that gives each sequence a row of logits."""

    factory = AutoModelForSequenceClassification
    _first_only = True

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 [n, labels] on the device, in the order in which the sequences were given.  Device thread only."""
        batch = batch.to(self.device)
        rows = self._whole(batch) if self._encoder is None else self._divided(batch)
        return rows.float().index_select(0, batch.restore)

    def logits_of_rows(self, rows: Sequence[PackedBatch]) -> torch.Tensor:
        """fp32 [n of all rows, labels] on the host, row after row, each row a step.  Device thread only."""
        return torch.cat([self.logits(row) for row in in_steps(rows)]).cpu()

    def _divided(self, batch: PackedBatch) -> torch.Tensor:
        assert self._encoder is not None
        rows = self._encoder.token_rows(batch)
        if self._first_only:
            hidden, ids = rows[batch.layout.first][:, None], batch.ids[0, batch.layout.first][:, None]
            return self._head(hidden, ids, torch.ones_like(ids))
        logits = []
        for part in padded(batch, self._filler, self._cut):
            hidden = rows.new_zeros((*part.mask.shape, rows.shape[1]))
            hidden[part.mask] = rows[part.place]
            logits.append(self._head(hidden, part.ids, part.mask.long()))
        return torch.cat(logits)

    def _prove(self, batch: PackedBatch, wanted: torch.Tensor) -> bool:
        self._first_only = True
        if agree(self._divided(batch), wanted):
            return True
        self._first_only = False
        return agree(self._divided(batch), wanted)


class TokenClassifier(_Classifier):
    """A transformer that gives each token a row of logits."""

    factory = AutoModelForTokenClassification

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 [tokens of the row, labels] on the device, in packed order.  Device thread only."""
        batch = batch.to(self.device)
        return (self._whole(batch) if self._encoder is None else self._divided(batch)).float()

    def _divided(self, batch: PackedBatch) -> torch.Tensor:
        assert self._encoder is not None
        rows = self._encoder.token_rows(batch)[None]
        return self._head(rows, batch.ids, torch.ones_like(batch.ids))[0]

    def _prove(self, batch: PackedBatch, wanted: torch.Tensor) -> bool:
        return agree(self._divided(batch), wanted)


K = TypeVar("K", SequenceClassifier, TokenClassifier)


class Loaded(NamedTuple, Generic[K]):
    """A classifier with its transformers tokenizer, and the longest sequence in tokens."""

    classifier: K
    tokenizer: Any
    limit: int


@dataclass(frozen=True, slots=True)
class ClassifierItem:
    """One item: the token sequences to classify, and labels and options of the request in the family's form."""

    sequences: Sequence[TokenSequence]
    wanted: Any


@dataclass(frozen=True, slots=True)
class ClassifierBatch:
    """Items, and the sequences of all items in packed rows."""

    items: list[Any]
    rows: list[PackedBatch]


class ClassifierAdapter(ExtractAdapter, Generic[K]):
    """Base of the extract families around a classification head; payloads are `ClassifierItem`."""

    def __init__(self, classifier: K, limit: int) -> None:
        """`limit` is the longest sequence in tokens."""
        self._classifier: K = classifier
        self._limit = limit
        self.packed, self.known_ids = classifier.packed, classifier.known_ids

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return self._classifier.memory_bytes

    def ids_of(self, payload: ClassifierItem) -> list[Int64Array]:
        """The sequences."""
        return [sequence.ids for sequence in payload.sequences]

    def collate(self, prepared: Sequence[Prepared]) -> ClassifierBatch:
        """All sequences of all items in packed rows."""
        items: list[ClassifierItem] = [item.payload for item in prepared]
        return ClassifierBatch(
            items, self._classifier.rows([sequence for item in items for sequence in item.sequences])
        )

    def padding_ratio(self, batch: ClassifierBatch) -> float:
        """Share of padding in the forward passes of the classifier."""
        return self._classifier.padding_ratio(batch.rows)


def build_classifier(context: LoadContext, kind: type[K]) -> Loaded[K]:
    """Tokenizer and model of `context.directory`; progress phases are "tokenizer" and "weights"."""
    layout = read_classifier(context.directory)
    tokenizer = tokenizer_of(context, layout.transformer, layout.tokenizer_arguments)
    if layout.lower_case:
        add_lower_casing(tokenizer)
    model = build_model(
        context,
        kind.factory,
        layout.transformer,
        config_arguments=layout.config_arguments,
        model_arguments=layout.model_arguments,
    )
    if context.device.type == "cpu":
        lay_out_linears(model, findings=context.findings)
    classifier = kind(model, **apart_ids(tokenizer))
    classifier.batch_tokens = context.batch_tokens
    classifier.known_ids = KnownIds(embedding_rows(model), tokenizer)
    stated = context.max_sequence_length or layout.max_sequence_length or stored_limit(tokenizer)
    return Loaded(classifier, tokenizer, classifier.text_limit(stated))


def in_steps(rows: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
    """The rows of a batch, each as a step of its own (`workers.device.stepping`)."""
    return stepping.each(rows, [int(row.ids.shape[1]) for row in rows])


def _sequences(batch: PackedBatch) -> list[TokenSequence]:
    """The sequences of a packed batch, in packed order."""
    first, last = batch.layout.first.tolist(), batch.layout.last.tolist()
    row = batch.ids[0].cpu().numpy()
    return [TokenSequence(row[start : stop + 1]) for start, stop in zip(first, last, strict=True)]
