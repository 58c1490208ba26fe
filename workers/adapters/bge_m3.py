"""BGE-M3: dense, sparse and token vectors from one forward pass (arXiv 2402.03216, FlagEmbedding's `M3Embedder`).

dense        the first token's vector, normalised
sparse       relu of a linear layer per token; the largest weight per token id; special tokens have none
multivector  a linear layer over every token but the first, each vector normalised

A score compares two texts by one of these outputs, or by the weighted mean of all three (FlagEmbedding's
`compute_score`): the dot product, the dot product over shared tokens, or MaxSim over the number of query vectors.

The two heads lie beside the transformer's weights as `sparse_linear.pt` and `colbert_linear.pt`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ipc.wire.messages import Call, InputItem, ScoreCall
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.checkpoint import CheckpointError
from workers.adapters.shared.heads import Float32Array, max_per_id, paired_dots
from workers.adapters.shared.late_interaction import PairBatch, PairedAdapter, max_sim
from workers.adapters.shared.long_texts import Tokens
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import Int64Array
from workers.adapters.shared.sentence_transformers_layout import ModelLayout, read_layout
from workers.adapters.shared.text_model import (
    TextAdapter,
    TextBatch,
    TextModel,
    TextRow,
    TokenVectors,
    mean_of_windows,
)
from workers.adapters.shared.transformer_settings import UnsupportedLayoutError

COMPARISONS = ("dense", "sparse", "colbert")
"""Parts of a score, in the order of the weights."""
_OUTPUTS = ("dense", "sparse", "multivector")
"""The output of each part."""


class BgeM3Adapter(PairedAdapter, TextAdapter):
    """An XLM-R encoder with three heads."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="bge_m3",
        operations=("encode", "score"),
        inputs=("text",),
        outputs=("dense", "sparse", "multivector", "score"),
        lora=True,
    )
    uses = TextAdapter.uses | {"score_mode", "score_weights"}

    def __init__(self, text: TextModel, sparse: nn.Linear, tokens: nn.Linear) -> None:
        """Put the parts together; `sparse` is in fp32, `tokens` in the transformer's dtype."""
        super().__init__(text, sparse, tokens)
        self._sparse, self._tokens = sparse, tokens
        config = text.encoder.model.config
        self._width = int(config.hidden_size)
        self._dropped = np.zeros(int(config.vocab_size), dtype=bool)
        self._dropped[sorted(text.tokenizer.marker_ids("cls", "eos", "pad", "unk"))] = True

    @classmethod
    def load(cls, context: LoadContext) -> BgeM3Adapter:
        """Load transformer and heads; raises CheckpointError where a head is missing or does not fit."""
        layout = read_layout(context.directory)
        _refuse_other_layers(layout)
        text = TextModel.build(context, layout)
        device, dtype = context.device, context.dtype
        sparse = _read_head(context.directory / "sparse_linear.pt").to(device)
        tokens = _read_head(context.directory / "colbert_linear.pt").to(device, dtype)
        return cls(text, sparse, tokens)

    @property
    def dims(self) -> dict[str, int]:
        """Widths; of the sparse output the size of the vocabulary."""
        return {
            "dense": self._width,
            "sparse": len(self._dropped),
            "multivector": self._tokens.out_features,
        }

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse an unknown score mode, and weights that cannot be used."""
        super().refuse_unsupported(call)
        if isinstance(call, ScoreCall):
            _weights_of(call)

    def extra_of(self, call: ScoreCall) -> Float32Array:
        """Weights of the three comparisons, float32 [3]."""
        return _weights_of(call)

    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize; every token but the first gives a token vector."""
        payloads = self._text.payloads(items, call, _all_but_first)
        return [payload.prepared(truncated) for payload, truncated in payloads]

    def encode(self, batch: TextBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """The wanted heads over one forward pass."""
        representations = self._representations(batch, outputs)
        results: dict[str, torch.Tensor | SparseRows] = {}
        if "dense" in outputs:
            results["dense"] = representations.dense()
        if "multivector" in outputs:
            results["multivector"] = representations.tokens.whole()
        if "sparse" in outputs:
            results["sparse"] = representations.sparse(self._dropped)
        return results

    @torch.inference_mode()
    def score(self, batch: PairBatch) -> torch.Tensor:
        """fp32 [pairs] on the device. Only heads that some pair of the batch asks for run."""
        queries = len(batch.query_rows)
        weights = torch.from_numpy(np.stack(batch.extras))
        weighted = weights.any(dim=0).tolist()
        representations = self._representations(
            batch.sides, [name for name, any_of in zip(_OUTPUTS, weighted, strict=True) if any_of]
        )
        device = self._text.encoder.device
        dense, sparse, tokens = weights.to(device).unbind(dim=1)
        scores = torch.zeros(len(batch.owners), device=device)
        if weighted[0]:
            vectors = representations.dense()
            asked = vectors.index_select(0, torch.from_numpy(batch.owners).to(device))
            scores += dense * (asked * vectors[queries:]).sum(dim=1)
        if weighted[1]:
            terms = representations.sparse(self._dropped)
            asking = SparseRows(terms.indices[:queries], terms.values[:queries])
            asked_of = SparseRows(terms.indices[queries:], terms.values[queries:])
            dots = paired_dots(asking, asked_of, batch.owners, len(self._dropped))
            scores += sparse * torch.from_numpy(dots).to(device)
        if weighted[2]:
            counts = torch.from_numpy(batch.query_rows[batch.owners]).to(device)
            scores += tokens * max_sim(representations.tokens.whole(), batch) / counts.clamp(min=1)
        return batch.given_order(scores)

    @torch.inference_mode()
    def _representations(self, batch: TextBatch, outputs: Collection[str]) -> _Representations:
        """The results of the heads of `outputs` for a batch."""
        representations = _Representations(batch)
        for row, packed, rows in self._text.run(batch):
            if "dense" in outputs:
                first = packed.layout.first.index_select(0, packed.restore)
                representations.first.append(rows.index_select(0, first).float())
            if "multivector" in outputs:
                representations.tokens.add(
                    F.normalize(self._tokens(self._text.picked(row, rows)).float(), dim=-1)
                )
            if "sparse" in outputs:
                weights = torch.relu(self._sparse(rows.float())).squeeze(-1).cpu().numpy()
                representations.terms.append((row.packed.ids[0].numpy(), weights, _token_owners(row)))
        return representations


class _Representations:
    """Results of the heads for a batch, row by row, and the outputs of the batch.

    first   fp32 [windows, width], the vector of each window's first token
    tokens  the normalised token vectors
    terms   ids, weights and owners [T] of the tokens of a row, on the host
    """

    def __init__(self, batch: TextBatch) -> None:
        self._batch = batch
        self.first: list[torch.Tensor] = []
        self.tokens = TokenVectors(batch)
        self.terms: list[tuple[Int64Array, Float32Array, Int64Array]] = []

    def dense(self) -> torch.Tensor:
        """fp32 [items, width]."""
        return F.normalize(mean_of_windows(self.first, self._batch), dim=-1)

    def sparse(self, dropped: np.ndarray) -> SparseRows:
        """Weights per token id of every item, on the host; windows of one item share their maximum."""
        ids, weights, owners = (np.concatenate(column) for column in zip(*self.terms, strict=True))
        return max_per_id(ids, weights, owners, len(self._batch.payloads), dropped)


def _token_owners(row: TextRow) -> Int64Array:
    """int64 [T], the item of each token of a row."""
    layout, restore = row.packed.layout, row.packed.restore.numpy()
    owners = np.empty_like(restore)
    owners[restore] = row.owners
    token_owners: Int64Array = np.repeat(owners, (layout.last - layout.first + 1).numpy())
    return token_owners


def _weights_of(call: ScoreCall) -> Float32Array:
    """Weights of dense, sparse and colbert in a call's score, together 1.

    Raises `InvalidInput` for an unknown mode and for weights that are negative, not numbers, or all 0.
    """
    options = OptionReader(call)
    mode = options.choice("score_mode", "dense", (*COMPARISONS, "hybrid"))
    given = options.numbers("score_weights", COMPARISONS)
    if mode != "hybrid":
        given = {mode: 1.0}
    elif given is None:
        given = dict.fromkeys(COMPARISONS, 1.0)
    weights = np.array([given.get(name, 0.0) for name in COMPARISONS])
    return (weights / weights.sum()).astype(np.float32)


def _all_but_first(window: Tokens) -> Int64Array:
    return np.arange(1, len(window.ids))


def _refuse_other_layers(layout: ModelLayout) -> None:
    """Raise UnsupportedLayoutError for a stored layout that makes another dense vector than BGE-M3 does."""
    kinds = [module.kind for module in (*layout.token_modules, *layout.vector_modules)]
    if layout.pooling not in (None, ("cls",)) or kinds not in ([], ["Normalize"]) or layout.truncate_dim:
        raise UnsupportedLayoutError(
            "BGE-M3 has the normalised vector of the first token; modules.json, its pooling or truncate_dim state "
            "another. Serve such a model as adapter: dense"
        )


def _read_head(path: Path) -> nn.Linear:
    """A linear layer stored as {"weight", "bias"} tensors; nothing but tensors is read from the file."""
    if not path.is_file():
        raise CheckpointError(f"the checkpoint lacks {path.name}")
    stored = torch.load(path, map_location="cpu", weights_only=True)
    if set(stored) != {"weight", "bias"}:
        raise CheckpointError(f"{path.name} holds {sorted(stored)}, not a weight and a bias")
    outer, inner = stored["weight"].shape
    head = nn.Linear(inner, outer)
    head.load_state_dict(stored)
    return head.float().eval().requires_grad_(False)
