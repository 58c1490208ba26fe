"""The layers after a transformer: pooling, and Dense, LayerNorm and Normalize of the sentence-transformers layout.

Pooling turns the token vectors of a packed row into one vector per sequence. Modes and names are those of
sentence-transformers' Pooling module (`pooling.py`, 6.2); vectors of several modes are concatenated in the order given.
Skipped tokens count as absent, but their positions count in the weights.

All of these layers run in fp32, whatever the dtype of the transformer. Keys and defaults of the other layers follow
sentence-transformers 6.2 (`dense.py`, `layer_norm.py`, `normalize.py`).

Sparse vectors on the host: made from weights per token or per term of the vocabulary, cut, and multiplied.

For rerankers that are language models: the output matrix, cut to the words "yes" and "no" (`answer_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from workers.adapters.base import SparseRows
from workers.adapters.shared.packing import Layout
from workers.loading.reading import load_file
from workers.loading.stored_files import is_plain

_SUMMING = frozenset({"mean", "mean_sqrt_len_tokens", "weightedmean", "max"})
Float32Array = npt.NDArray[np.float32]


def pool(
    rows: torch.Tensor, layout: Layout, modes: tuple[str, ...], skips: torch.Tensor | None = None
) -> torch.Tensor:
    """Pool rows [T, width] to fp32 [N, width * len(modes)], in the layout's order.

    `skips`, int64 [N], counts leading tokens of each sequence to leave out. A sequence that would lose all tokens keeps
    all.
    """
    first, last = layout.first, layout.last
    lengths = last + 1 - first
    if skips is not None:
        skips = torch.where(skips < lengths, skips, 0)
        first, lengths = first + skips, lengths - skips
    if not _SUMMING.intersection(modes):
        picked = {"cls": first, "lasttoken": last}
        return torch.cat([rows[picked[mode]].float() for mode in modes], dim=1)
    segments = _Segments(rows.float(), layout, first, lengths, skips)
    return torch.cat([segments.pooled(mode) for mode in modes], dim=1)


class _Segments:
    """The sequences of one row with their skipped tokens blanked out."""

    def __init__(
        self,
        rows: torch.Tensor,
        layout: Layout,
        first: torch.Tensor,
        kept: torch.Tensor,
        skips: torch.Tensor | None,
    ) -> None:
        self._rows = rows
        self._first, self._last, self._kept = first, layout.last, kept
        self._lengths = layout.last + 1 - layout.first
        self._layout = layout
        self._dropped: torch.Tensor | None = None
        if skips is not None:
            starts = torch.repeat_interleave(first, self._lengths, output_size=rows.shape[0])
            self._dropped = (torch.arange(rows.shape[0], device=rows.device) < starts)[:, None]

    def pooled(self, mode: str) -> torch.Tensor:
        """fp32 [N, width] for one mode."""
        count = self._kept[:, None].float()
        if mode == "cls":
            return self._rows[self._first]
        if mode == "lasttoken":
            return self._rows[self._last]
        if mode == "max":
            return self._reduce(self._blank(self._rows, float("-inf")), "max")
        if mode == "weightedmean":
            weights = self._blank(self._weights(), 0.0)
            return self._reduce(self._rows * weights, "sum") / self._reduce(weights, "sum")
        total = self._reduce(self._blank(self._rows, 0.0), "sum")
        return total / (count if mode == "mean" else count.sqrt())

    def _weights(self) -> torch.Tensor:
        """fp32 [T, 1]: 1 for a sequence's first token, 2 for its second, and so on."""
        tokens = self._rows.shape[0]
        starts = torch.repeat_interleave(self._layout.first, self._lengths, output_size=tokens)
        return (torch.arange(1, tokens + 1, device=starts.device) - starts)[:, None].float()

    def _blank(self, rows: torch.Tensor, value: float) -> torch.Tensor:
        """`rows` with skipped tokens set to `value`."""
        return rows if self._dropped is None else rows.masked_fill(self._dropped, value)

    def _reduce(self, rows: torch.Tensor, how: str) -> torch.Tensor:
        """Reduce each sequence's rows; deterministic on every device."""
        return torch.segment_reduce(rows, how, lengths=self._lengths, axis=0, unsafe=True)


class Normalize(nn.Module):
    """Scale vectors [..., width] to length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The scaled vectors; a zero vector stays zero."""
        return F.normalize(vectors, p=2, dim=-1)


class Dense(nn.Module):
    """A linear layer with an activation and an optional residual connection."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build from the module's config.json."""
        super().__init__()
        inner, outer = int(config["in_features"]), int(config["out_features"])
        self.linear = nn.Linear(inner, outer, bias=bool(config.get("bias", True)))
        self.activation = stored_activation(
            str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        )
        self._residual = bool(config.get("use_residual", False))
        if self._residual and inner != outer:
            self.residual = nn.Linear(inner, outer, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: torch.Tensor = self.activation(self.linear(vectors))
        if not self._residual:
            return out
        return out + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class LayerNorm(nn.Module):
    """Layer normalisation of vectors [..., dimension]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build from the module's config.json."""
        super().__init__()
        self.norm = nn.LayerNorm(int(config["dimension"]))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The normalised vectors."""
        normed: torch.Tensor = self.norm(vectors)
        return normed


HEADS: dict[str, type[Dense | LayerNorm]] = {"Dense": Dense, "LayerNorm": LayerNorm}


def build_head(kind: str, directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """A Dense, LayerNorm or Normalize with its weights from `directory`, in fp32 on CPU.

    Raises FileNotFoundError without weights and RuntimeError where the weights do not fit the config.
    """
    if kind == "Normalize":
        return Normalize()
    head = HEADS[kind](config)
    head.load_state_dict(_head_weights(directory))
    return head.float()


def _head_weights(directory: Path) -> dict[str, torch.Tensor]:
    """model.safetensors, or pytorch_model.bin if torch reads the file as nothing but tensors."""
    weights, pickled = directory / "model.safetensors", directory / "pytorch_model.bin"
    if weights.is_file():
        return load_file(weights)
    if pickled.is_file() and is_plain(pickled):
        tensors: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
        return tensors
    raise FileNotFoundError(f"module {directory.name} has no model.safetensors")


def stored_activation(name: str) -> nn.Module:
    """The module of torch.nn with this dotted name. Raises ValueError for any other name."""
    kind = getattr(nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"unsupported activation {name!r}: only modules of torch.nn are loaded")
    activation: nn.Module = kind()
    return activation


def max_per_id(
    ids: npt.NDArray[np.int64],
    weights: Float32Array,
    owners: npt.NDArray[np.int64],
    items: int,
    dropped: npt.NDArray[np.bool_],
) -> SparseRows:
    """The largest weight of each token id in each item; ids in `dropped` [vocabulary] and weights of 0 are left out.

    ids, weights and owners (the item of each token) are [T].
    """
    is_counted = (weights > 0) & ~dropped[ids]
    keys = owners[is_counted] * len(dropped) + ids[is_counted]
    order = np.argsort(keys, kind="stable")
    keys, weights = keys[order], weights[is_counted][order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    values = np.maximum.reduceat(weights, starts) if starts.size else weights
    return _split(keys[starts] // len(dropped), keys[starts] % len(dropped), values, items)


def nonzero_terms(matrix: torch.Tensor) -> SparseRows:
    """The positive values of each row of fp32 [items, vocabulary]."""
    places = torch.nonzero(matrix > 0)
    values = matrix[places[:, 0], places[:, 1]].cpu().numpy()
    indices = places.cpu().numpy()
    return _split(indices[:, 0], indices[:, 1], values, matrix.shape[0])


def strongest(indices: np.ndarray, values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The `limit` largest values of one sparse vector, still in ascending order of their indices."""
    if len(values) <= limit:
        return indices, values
    places = np.sort(np.argpartition(values, len(values) - limit)[len(values) - limit :])
    return indices[places], values[places]


def paired_dots(
    queries: SparseRows, documents: SparseRows, owners: npt.NDArray[np.int64], vocabulary: int
) -> Float32Array:
    """float32 [pairs]: the dot product of each document with its query. `owners` is the query of each document."""

    def keys_of(rows: SparseRows, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        spread = np.repeat(numbers, [len(indices) for indices in rows.indices])
        return spread * vocabulary + np.concatenate(rows.indices)

    asked = keys_of(queries, np.arange(len(queries.indices)))
    if not asked.size:
        return np.zeros(len(owners), np.float32)
    document_keys = keys_of(documents, owners)
    places = np.minimum(np.searchsorted(asked, document_keys), asked.size - 1)
    shared = asked[places] == document_keys
    products = np.concatenate(documents.values)[shared] * np.concatenate(queries.values)[places[shared]]
    pairs = np.repeat(np.arange(len(owners)), [len(indices) for indices in documents.indices])
    return np.bincount(pairs[shared], products, minlength=len(owners)).astype(np.float32)


def _split(owners: np.ndarray, ids: np.ndarray, values: np.ndarray, items: int) -> SparseRows:
    """Terms in the order of their items, cut into one pair of arrays per item."""
    cuts = np.cumsum(np.bincount(owners, minlength=items))[:-1]
    return SparseRows(np.split(ids.astype(np.int32), cuts), np.split(values, cuts))


def answer_rows(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> nn.Linear:
    """The rows of the options `positive_token` and `negative_token`, "yes" and "no" by default, in fp32.

    Raises ValueError for a word that is no single token.
    """
    words = [str(options.get("positive_token", "yes")), str(options.get("negative_token", "no"))]
    numbers = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{word!r} is not one token of this model but {len(ids)}")
        numbers.append(ids[0])
    whole = model.get_output_embeddings()
    rows = nn.Linear(whole.in_features, len(words), bias=whole.bias is not None, device=whole.weight.device)
    rows.weight.data = whole.weight.data[numbers].float()
    if whole.bias is not None:
        rows.bias.data = whole.bias.data[numbers].float()
    return rows.eval().requires_grad_(False)
