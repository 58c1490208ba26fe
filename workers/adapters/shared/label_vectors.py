"""Labels of a bi-encoder GLiNER: a second encoder turns each label into one vector, apart from the text.

1. `tokenize` makes token ids of the labels of a request, on any preparing thread.
2. `inputs` encodes the distinct labels of a rectangle once, in slices of similar lengths within a bound of tokens, and
   lays their vectors out for the library's model, one row of labels per text.

A label takes no room of the text, so a request may bring hundreds of labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ipc.errors import InvalidInput
from workers.adapters.shared.checkpoint import position_limit, shortest, stored_limit
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.tokenizing import rust_copy, without_token

Ids = tuple[int, ...]

_SLICE_TOKENS = 4096
"""Most tokens of labels that are encoded together, padding included."""


class LabelEncoder:
    """The label side of one bi-encoder of the library."""

    def __init__(self, model: Any) -> None:
        """Take the encoder and a copy of the tokenizer's Rust object. Raises ValueError when it has none."""
        self._layer = model.model.token_rep_layer
        tokenizer = model.data_processor.labels_tokenizer
        self._backend = rust_copy(tokenizer)
        limit = shortest(stored_limit(tokenizer), position_limit(self._layer.labels_encoder.model))
        self._backend.enable_truncation(limit)
        encoder = self._layer.labels_encoder.model
        self._known = KnownIds(embedding_rows(encoder), tokenizer)
        self._filler = filler_of(encoder, tokenizer.pad_token_id)

    def tokenize(self, labels: Sequence[str]) -> list[Ids]:
        """Token ids of each label, cut to the encoder's length.  Thread-safe.

        Raises `InvalidInput` for a label without a token, or with one for which the encoder has no embedding.
        """
        sequences = [tuple(encoding.ids) for encoding in self._backend.encode_batch(list(labels))]
        if () in sequences:
            raise without_token(labels, sequences.index(()))
        refusal = None if self._known.all_known else self._known.refusal(sequences)
        if refusal is not None:
            raise InvalidInput(f"params.labels: {refusal}")
        return sequences

    def inputs(self, rows: Sequence[Sequence[Ids]]) -> dict[str, torch.Tensor]:
        """`labels_embeds` [texts, labels, width] and their mask for labels tokenized by `tokenize`.  Device thread."""
        distinct = sorted({label for row in rows for label in row}, key=len)
        places = {label: place for place, label in enumerate(distinct)}
        vectors = torch.cat([self._encode(part) for part in _slices(distinct)])
        chosen = pad_sequence(
            [torch.tensor([places[label] for label in row]) for row in rows],
            batch_first=True,
            padding_value=-1,
        ).to(vectors.device)
        return {"labels_embeds": vectors[chosen.clamp(min=0)], "prompts_embedding_mask": chosen >= 0}

    def _encode(self, labels: Sequence[Ids]) -> torch.Tensor:
        """Vectors [labels, width]."""
        device = next(self._layer.parameters()).device
        ids = [torch.tensor(label) for label in labels]
        padded = pad_sequence(ids, batch_first=True, padding_value=self._filler).to(device)
        lengths = torch.tensor([len(label) for label in labels], device=device)
        mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]
        vectors: torch.Tensor = self._layer.encode_labels(padded, mask.long())
        return vectors


def _slices(labels: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
    """Labels, the shortest first, in parts of at most `_SLICE_TOKENS` tokens, or of one label."""
    first = 0
    for at in range(1, len(labels) + 1):
        if at == len(labels) or (at + 1 - first) * len(labels[at]) > _SLICE_TOKENS:
            yield labels[first:at]
            first = at
