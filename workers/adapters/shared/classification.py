"""Classification heads of transformers over packed batches: of whole sequences, and of single tokens.

The transformer runs as one packed row (`TextEncoder`). The head is the model's own code: a stand-in takes the place of
the base model and hands the hidden states of the row to the head. At load the divided model is compared with the
untouched one, and the first of these ways that gives the same logits is used:

1. for whole sequences the head over the first tokens alone, then the head over all tokens, padded; for tokens the head
   over the row;
2. the untouched model over padded rectangles. Models with a decoder always run this way.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from workers.adapters.base import LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import (
    load_model,
    load_tokenizer,
    position_limit,
    stored_limit,
    text_limit,
)
from workers.adapters.shared.encoder import (
    TextEncoder,
    agree,
    padded,
    random_sequences,
    rectangle_padding,
)
from workers.adapters.shared.extracting import ExtractAdapter
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.packing import PackedBatch, TokenSequence, divided, pack
from workers.adapters.shared.sentence_transformers_layout import read_classifier
from workers.adapters.shared.tokenizing import add_lower_casing
from workers.device.oom import is_out_of_memory
from workers.strategies import stepping

log = logging.getLogger(__name__)

_PROOF_LENGTHS = (3, 40, 17, 17, 1)


class _Given(nn.Module):
    """Stands in for a base model and answers every call with the hidden states in `hidden`."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.config = base.config
        self.pooler = getattr(base, "pooler", None)
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        """The hidden states, pooled where the base model pools."""
        pooled = None if self.pooler is None else self.pooler(self.hidden)
        return BaseModelOutputWithPooling(last_hidden_state=self.hidden, pooler_output=pooled)


class _Classifier(ABC):
    """A packed transformer, a classification head, and the comparison with the untouched model."""

    factory: ClassVar[Any]
    batch_tokens = 16384
    """Most tokens of a forward pass."""

    def __init__(self, model: Any, *, special_ids: frozenset[int] = frozenset(), pad_id: int = 0) -> None:
        """Take over `model` (eval mode, on its device) and prove the packed way."""
        self.model = model
        self.config: Any = model.config
        self.device: torch.device = model.device
        self._pad_id = pad_id
        self._base = model.base_model
        self._encoder: TextEncoder | None = None
        self._given: _Given | None = None
        if self._base is not model and not self.config.is_encoder_decoder:
            self._divide(special_ids)

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
        return pack(sequences, pin=self.device.type == "cuda")

    def rows(self, sequences: list[TokenSequence]) -> list[PackedBatch]:
        """`pack` in several rows where the sequences have more than `batch_tokens`."""
        tokens = [len(sequence.ids) for sequence in sequences]
        return [self.pack(sequences[part]) for part in divided(tokens, self.batch_tokens)]

    def padding_ratio(self, rows: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in the forward passes of these rows."""
        return 0.0 if self.packed else rectangle_padding(rows)

    @torch.inference_mode()
    def _divide(self, special_ids: frozenset[int]) -> None:
        """Divide base model and head; after a difference or an error put the model together again.

        Raises the error of memory that is short.
        """
        name, model = self.model.base_model_prefix, self.model
        attention = model.config._attn_implementation
        batch = self._proof_batch(special_ids)
        wanted = self._whole(batch)
        try:
            self._encoder = TextEncoder(self._base, special_ids=special_ids, pad_id=self._pad_id)
            self._given = _Given(self._base)
            setattr(model, name, self._given)
            if self._prove(self._encoder.pack(_sequences(batch)).to(self.device), wanted):
                return
            reason = "the head gives other values over packed rows"
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

    def _head(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [n, tokens, width] by the model's own head."""
        assert self._given is not None
        self._given.hidden = hidden
        try:
            ids = torch.zeros(mask.shape, dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
            return logits
        finally:
            self._given.hidden = None

    def _whole(self, batch: PackedBatch) -> torch.Tensor:
        """Logits of the untouched model, in packed order: per sequence, or per token of the row."""
        found = []
        for part in padded(batch, self._pad_id):
            logits = self.model(**part.inputs()).logits
            found.append(logits[part.mask] if logits.dim() == 3 else logits)
        return torch.cat(found)

    def _proof_batch(self, special_ids: frozenset[int]) -> PackedBatch:
        """Random sequences of ordinary tokens."""
        vocabulary, limit = min(self.config.vocab_size, 1000), self.position_limit
        return pack(random_sequences(vocabulary, special_ids, _PROOF_LENGTHS, limit)).to(self.device)


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
            hidden = rows[batch.layout.first][:, None]
            return self._head(hidden, torch.ones(hidden.shape[:2], dtype=torch.long, device=self.device))
        found = []
        for part in padded(batch, self._pad_id):
            hidden = rows.new_zeros((*part.mask.shape, rows.shape[1]))
            hidden[part.mask] = rows[part.place]
            found.append(self._head(hidden, part.mask.long()))
        return torch.cat(found)

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
        return self._head(rows, torch.ones(rows.shape[:2], dtype=torch.long, device=self.device))[0]

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
        self.packed = classifier.packed

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return self._classifier.memory_bytes

    def collate(self, prepared: Sequence[Prepared]) -> ClassifierBatch:
        """All sequences of all items in packed rows."""
        items: list[ClassifierItem] = [item.payload for item in prepared]
        return ClassifierBatch(
            items, self._classifier.rows([sequence for item in items for sequence in item.sequences])
        )

    def padding_ratio(self, batch: ClassifierBatch) -> float:
        """Share of padding in the forward passes of the classifier."""
        return self._classifier.padding_ratio(batch.rows)


def load_classifier(context: LoadContext, kind: type[K]) -> Loaded[K]:
    """Tokenizer and model of `context.directory`; progress phases are "tokenizer" and "weights"."""
    layout = read_classifier(context.directory)
    tokenizer = load_tokenizer(context, layout.transformer, layout.tokenizer_arguments)
    if layout.lower_case:
        add_lower_casing(tokenizer)
    model = load_model(
        context,
        kind.factory,
        layout.transformer,
        config_arguments=layout.config_arguments,
        model_arguments=layout.model_arguments,
    )
    if context.device.type == "cpu":
        lay_out_linears(model)
    pad_id = int(tokenizer.pad_token_id or 0)
    classifier = kind(model, special_ids=frozenset(tokenizer.all_special_ids), pad_id=pad_id)
    classifier.batch_tokens = context.batch_tokens
    stated = context.max_sequence_length or layout.max_sequence_length or stored_limit(tokenizer)
    return Loaded(classifier, tokenizer, classifier.text_limit(stated))


def in_steps(rows: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
    """The rows of a batch, each as a step of its own (`workers.strategies.stepping`)."""
    return stepping.each(rows, [int(row.ids.shape[1]) for row in rows])


def _sequences(batch: PackedBatch) -> list[TokenSequence]:
    """The sequences of a packed batch, in packed order."""
    first, last = batch.layout.first.tolist(), batch.layout.last.tolist()
    row = batch.ids[0].cpu().numpy()
    return [TokenSequence(row[start : stop + 1]) for start, stop in zip(first, last, strict=True)]
