"""Classification heads of transformers over packed batches: of whole sequences, and of single tokens.

The transformer runs as one packed row (`TextEncoder`). Its classification head is the model's own code: the base model
in it is replaced by a stand-in that hands over hidden states which are there already. At load this has to prove itself
against the untouched model:

1. whole sequences: the head over their first tokens alone; else over all their tokens, padded;
2. else, and for models with a decoder, the untouched model over padded rectangles.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from workers.adapters.base import LoadContext
from workers.adapters.shared.attention import HALF
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import load_transformer
from workers.adapters.shared.encoder import TextEncoder, rectangle_padding, rectangles
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.packing import PackedBatch, TokenSequence, divided, pack
from workers.strategies import stepping

log = logging.getLogger(__name__)

_PROOF_LENGTHS = (3, 40, 17, 17, 1)
# transformers marks "no limit stored" with a huge number.
_NO_LIMIT = 10**9


class _Given(nn.Module):
    """Stands in the place of a base model: answers every call with the hidden states that were put into it."""

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
    """What both kinds of heads share: the packed transformer, the head, and their proof."""

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
        """How many tokens the model has positions for, or None where that is not known."""
        if self._encoder is not None:
            return self._encoder.position_limit
        positions = getattr(self.config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def limit(self, wanted: int | None, stored: int | None) -> int:
        """The longest sequence in tokens: as the catalog or else the tokenizer says, within the model's positions."""
        chosen = wanted or (stored if stored and stored < _NO_LIMIT else None)
        known = [length for length in (chosen, self.position_limit) if length is not None]
        return min(known) if known else 512

    def pack(self, sequences: list[TokenSequence]) -> PackedBatch:
        """One batch of host tensors; thread-safe."""
        if self._encoder is not None:
            return self._encoder.pack(sequences)
        return pack(sequences, pin=self.device.type == "cuda")

    def rows(self, sequences: list[TokenSequence]) -> list[PackedBatch]:
        """The same in several rows where an item alone (many labels, many windows) is over the token budget."""
        tokens = [len(sequence.ids) for sequence in sequences]
        return [self.pack(sequences[part]) for part in divided(tokens, self.batch_tokens)]

    def padding_ratio(self, rows: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in what the transformer runs for these rows."""
        return 0.0 if self.packed else rectangle_padding(rows)

    @torch.inference_mode()
    def _divide(self, special_ids: frozenset[int]) -> None:
        """Part base model and head; a difference or an error puts the model together again."""
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
            # NOTE: model code outside ours may raise anything; the whole model remains.
            reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        log.warning("%s runs whole and padded: %s", type(model).__name__, reason)
        setattr(model, name, self._base)
        model.set_attn_implementation(attention)
        self._encoder = self._given = None

    @abstractmethod
    def _prove(self, batch: PackedBatch, wanted: torch.Tensor) -> bool:
        """Whether the divided model gives the `wanted` logits, in packed order."""

    def _agrees(self, got: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Whether two results agree within the precision of the model."""
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))
        return error <= (5e-2 if self.model.dtype in HALF else 1e-3)

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
        parts = []
        for start, lens in rectangles(batch):
            mask, stop = self._mask(lens), start + sum(lens)
            ids = torch.full(mask.shape, self._pad_id, device=self.device)
            ids[mask] = batch.ids[0, start:stop]
            arguments = {"input_ids": ids, "attention_mask": mask.long()}
            if batch.types is not None:
                arguments["token_type_ids"] = torch.zeros_like(ids)
                arguments["token_type_ids"][mask] = batch.types[0, start:stop]
            logits = self.model(**arguments).logits
            parts.append(logits[mask] if logits.dim() == 3 else logits)
        return torch.cat(parts)

    def _mask(self, lens: list[int]) -> torch.Tensor:
        """bool [n, longest]: which places of a rectangle hold tokens."""
        sizes = torch.tensor(lens, device=self.device)
        return torch.arange(lens[0], device=self.device) < sizes[:, None]

    def _proof_batch(self, special_ids: frozenset[int]) -> PackedBatch:
        """Random sequences of ordinary tokens that end as the model's own do."""
        generator = torch.Generator().manual_seed(0)
        ordinary = [token for token in range(min(self.config.vocab_size, 1000)) if token not in special_ids]
        limit = self.position_limit or max(_PROOF_LENGTHS)
        drawn = [
            torch.randint(len(ordinary), (min(length, limit),), generator=generator)
            for length in _PROOF_LENGTHS
        ]
        sequences = [TokenSequence(torch.tensor(ordinary)[places].numpy()) for places in drawn]
        return pack(sequences).to(self.device)


class SequenceClassifier(_Classifier):
    """A transformer that gives each sequence a row of logits."""

    factory = AutoModelForSequenceClassification
    _first_only = True

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """fp32 [n, labels] on the device, in the order in which the sequences were given.  Device thread only."""
        batch = batch.to(self.device)
        rows = self._whole(batch) if self._encoder is None else self._divided(batch)
        return rows.float().index_select(0, batch.restore)

    def _divided(self, batch: PackedBatch) -> torch.Tensor:
        assert self._encoder is not None
        rows = self._encoder.token_rows(batch)
        if self._first_only:
            hidden = rows[batch.layout.first][:, None]
            return self._head(hidden, torch.ones(hidden.shape[:2], dtype=torch.long, device=self.device))
        parts = []
        for start, lens in rectangles(batch):
            mask = self._mask(lens)
            hidden = rows.new_zeros((*mask.shape, rows.shape[1]))
            hidden[mask] = rows[start : start + sum(lens)]
            parts.append(self._head(hidden, mask.long()))
        return torch.cat(parts)

    def _prove(self, batch: PackedBatch, wanted: torch.Tensor) -> bool:
        self._first_only = True
        if self._agrees(self._divided(batch), wanted):
            return True
        self._first_only = False
        return self._agrees(self._divided(batch), wanted)


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
        return self._agrees(self._divided(batch), wanted)


K = TypeVar("K", bound=_Classifier)


class Loaded(NamedTuple, Generic[K]):
    """A classifier with its transformers tokenizer, and the longest sequence in tokens."""

    classifier: K
    tokenizer: Any
    limit: int


def load_classifier(context: LoadContext, kind: type[K]) -> Loaded[K]:
    """Tokenizer and model of `context.directory`; progress phases are "tokenizer" and "weights"."""
    tokenizer = AutoTokenizer.from_pretrained(
        str(context.directory), local_files_only=True, trust_remote_code=context.trust_remote_code
    )
    context.progress("tokenizer", 1.0)
    model = load_transformer(
        context.directory,
        device=context.device,
        dtype=context.dtype,
        trust_remote_code=context.trust_remote_code,
        factory=kind.factory,
    )
    if context.device.type == "cpu":
        lay_out_linears(model)
    context.progress("weights", 1.0)
    pad_id = int(tokenizer.pad_token_id or 0)
    classifier = kind(model, special_ids=frozenset(tokenizer.all_special_ids), pad_id=pad_id)
    classifier.batch_tokens = context.batch_tokens
    limit = classifier.limit(context.max_sequence_length, tokenizer.model_max_length)
    return Loaded(classifier, tokenizer, limit)


def in_steps(rows: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
    """The rows of a batch, one step each."""
    return stepping.each(rows, [int(row.ids.shape[1]) for row in rows])


def _sequences(batch: PackedBatch) -> list[TokenSequence]:
    """The sequences of a packed batch, in packed order."""
    first, last = batch.layout.first.tolist(), batch.layout.last.tolist()
    row = batch.ids[0].cpu().numpy()
    return [TokenSequence(row[start : stop + 1]) for start, stop in zip(first, last, strict=True)]
