"""Static embeddings: the vector of a text is the mean of its tokens' rows in one table. No transformer runs.

1. `prepare` puts the prompt around each text and tokenizes without special tokens.
2. `encode` takes the rows of a batch, weighs them if the file has weights, and takes the mean of each text, in fp32.
   The vector of a text without tokens is 0.
3. The layers after the table follow (Dense, LayerNorm, Normalize). A stored `truncate_dim` cuts the vectors last.

The table stays in the type in which it is stored: float32, float16, bfloat16 or int8. Two forms are read, each as the
library reads it that has written the file:

sentence-transformers  `embedding.weight` [ids, width]. Every token counts, and a text has any length, unless
                       tokenizer.json states one (sentence-transformers 6.2, `static_embedding.py`).
model2vec              `embeddings` [rows, width]. Tokens may share rows: `mapping` [ids] has the row of each token, and
                       `weights` [ids] its weight. The unknown token is left out. A text is cut to as many tokens as
                       `max_length` in config.json says, 512 by default, and before that to as many characters as these
                       tokens have if each has the median length of the vocabulary (model2vec 0.10, `model.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from ipc.wire.messages import Call, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import CheckpointError, refuse_without_words
from workers.adapters.shared.heads import Normalize, build_head
from workers.adapters.shared.packing import Int64Array
from workers.adapters.shared.sentence_transformers_layout import ModelLayout, read_static_layout
from workers.adapters.shared.text_model import ReadingAdapter, TextReader, most_tokens, prompts_of
from workers.adapters.shared.tokenizing import TextTokenizer
from workers.adapters.shared.transformer_settings import read_json, whole
from workers.device import stepping
from workers.loading.reading import load_file

_THEIRS, _MODEL2VEC = "embedding.weight", "embeddings"
_STORED = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8)
_DEFAULT_LENGTH = 512
_ANY_LENGTH = 1 << 20
"""Tokens of the longest text of a model that states no length: more than a request may bring."""
_NO_TOKEN = -1
"""Stands for a text without any token, and is left out."""


class StaticBatch(NamedTuple):
    """int64 [tokens] ids of all texts, one text after another, and int64 [texts] how many tokens each text has."""

    ids: torch.Tensor
    counts: torch.Tensor


class Table(nn.Module):
    """The rows of all token ids: `rows` [rows, width], and by id the row and its weight where a file has these."""

    rows: torch.Tensor
    mapping: torch.Tensor | None
    weights: torch.Tensor | None

    def __init__(self, stored: dict[str, torch.Tensor], name: str) -> None:
        """Take the tensors of a file. Raises CheckpointError that names a tensor, its shape and the expected one."""
        super().__init__()
        self.model2vec = _THEIRS not in stored
        rows = stored.get(_MODEL2VEC if self.model2vec else _THEIRS)
        if rows is None:
            raise CheckpointError(f"{name}: neither {_THEIRS} nor {_MODEL2VEC} is among the tensors")
        if rows.ndim != 2 or rows.dtype not in _STORED:
            raise CheckpointError(
                f"{name}: the table is {rows.dtype} {list(rows.shape)}, expected two dimensions of floats or int8"
            )
        mapping = stored.get("mapping") if self.model2vec else None
        weights = stored.get("weights") if self.model2vec else None
        self.ids = len(rows) if mapping is None else len(mapping)
        if mapping is not None and (mapping.ndim != 1 or not len(mapping) or mapping.dtype.is_floating_point):
            raise CheckpointError(
                f"{name}: mapping is {mapping.dtype} {list(mapping.shape)}, expected one row number for each token id"
            )
        if mapping is not None and not all(0 <= row < len(rows) for row in mapping.aminmax()):
            raise CheckpointError(f"{name}: mapping names rows beyond the {len(rows)} of {_MODEL2VEC}")
        if weights is not None and list(weights.shape) != [self.ids]:
            raise CheckpointError(
                f"{name}: weights has the shape {list(weights.shape)}, expected [{self.ids}]: one for each token id"
            )
        self.register_buffer("rows", rows.float() if rows.dtype == torch.float64 else rows)
        self.register_buffer("mapping", None if mapping is None else mapping.long())
        self.register_buffer("weights", None if weights is None else weights.float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, width] of int64 [tokens]."""
        places = ids if self.mapping is None else self.mapping.index_select(0, ids)
        vectors = self.rows.index_select(0, places).float()
        return vectors if self.weights is None else vectors * self.weights.index_select(0, ids)[:, None]


class StaticEmbeddingAdapter(ReadingAdapter):
    """A table, the mean over the tokens of a text, and the layers after it."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="static_embedding",
        operations=("encode",),
        inputs=("text",),
        outputs=("dense",),
    )

    def __init__(
        self, reader: TextReader, table: Table, layout: ModelLayout, context: LoadContext, unknown: int | None
    ) -> None:
        """Put the parts together; `unknown` is the id for what the vocabulary lacks."""
        super().__init__(reader)
        self._unknown = self._characters = None
        if table.model2vec:
            lengths = [len(token) for token in reader.tokenizer.wrapped.get_vocab()]
            self._unknown, self._characters = unknown, int(np.median(lengths))
        self._table = table.to(context.device)
        self._head = _head_of(layout, context.options.get("normalize")).to(context.device)
        self._device, self._part, self._kept = context.device, context.batch_tokens, layout.truncate_dim
        nothing = StaticBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        self._width = self._means(nothing).shape[1]

    @classmethod
    def load(cls, context: LoadContext) -> StaticEmbeddingAdapter:
        """Load layout, tokenizer and table; progress phases are "tokenizer" and "weights"."""
        layout = read_static_layout(context.directory)
        backend, unknown = _read_tokenizer(layout.transformer / "tokenizer.json")
        stated = (backend.truncation or {}).get("max_length")
        tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), no_token=_NO_TOKEN)
        refuse_without_words(tokenizer.wrapped)
        context.progress("tokenizer", 1.0)
        table = _read_table(layout.transformer)
        context.progress("weights", 1.0)
        if table.model2vec:
            stated = _model2vec_length(context.directory)
        tokenizer.knows(table.ids)
        limit = min(context.max_sequence_length or _ANY_LENGTH, stated or _ANY_LENGTH)
        tokenizer.limit(limit)
        reader = TextReader(tokenizer=tokenizer, prompts=prompts_of(layout, context.options), limit=limit)
        return cls(reader, table, layout, context, unknown)

    @property
    def dims(self) -> dict[str, int]:
        """Width of the dense output."""
        return {"dense": self._width}

    @property
    def memory_bytes(self) -> int:
        """Bytes held by the table and the layers."""
        return parameter_bytes(self._table, self._head)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize with prompts; raises ValueError for an item with neither text nor ids."""
        shortened = [self._shortened(item, call) for item in items]
        prepared: list[Prepared | ItemFailure] = []
        for given, item, (payload, cut) in zip(
            items, shortened, self._reader.payloads(shortened, call), strict=True
        ):
            ids = np.concatenate([window.ids for window in payload.windows])
            ids = ids[ids != _NO_TOKEN]
            if self._unknown is not None:
                ids = ids[ids != self._unknown]
            cut = cut or item is not given
            prepared.append(Prepared(ids, max(1, len(ids)), cut, excess=payload.excess))
        return prepared

    def _shortened(self, item: InputItem, call: Call) -> InputItem:
        """The item with at most the characters that model2vec reads; the same object if nothing is cut."""
        if self._characters is None or item.text is None or call.overflow != "truncate":
            return item
        most = most_tokens(call, self._reader.limit) * self._characters
        return item if len(item.text) <= most else msgspec.structs.replace(item, text=item.text[:most])

    def ids_of(self, payload: Int64Array) -> Sequence[Int64Array]:
        """The ids that count."""
        return [payload]

    def collate(self, prepared: Sequence[Prepared]) -> StaticBatch:
        """The ids of all texts in one row."""
        payloads: list[Int64Array] = [item.payload for item in prepared]
        counts = torch.tensor([len(ids) for ids in payloads])
        return StaticBatch(torch.from_numpy(np.concatenate(payloads)), counts)

    def encode(self, batch: StaticBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"dense": fp32 [n, dims]} on the device; raises ValueError for any other output."""
        if outputs != frozenset({"dense"}):
            raise ValueError(
                f"this model gives dense vectors only, not {', '.join(sorted(outputs)) or 'nothing'}"
            )
        return {"dense": self._means(batch)}

    @torch.inference_mode()
    def _means(self, batch: StaticBatch) -> torch.Tensor:
        """fp32 [texts, dims]. The rows of a long text are taken in parts, as they take memory."""
        owners = torch.repeat_interleave(torch.arange(len(batch.counts)), batch.counts)
        sums = torch.zeros((len(batch.counts), self._table.rows.shape[1]), device=self._device)
        starts = range(0, len(batch.ids), self._part)
        for start in stepping.each(starts, [min(self._part, len(batch.ids) - start) for start in starts]):
            part = slice(start, start + self._part)
            lengths = torch.bincount(owners[part], minlength=len(batch.counts)).to(self._device)
            rows = self._table(batch.ids[part].to(self._device))
            sums += torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, unsafe=True)
        vectors: torch.Tensor = self._head(sums / batch.counts.clamp(min=1)[:, None].to(self._device))
        return vectors[:, : self._kept]


def _read_tokenizer(path: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer of a file, without the special tokens around a text, and the id for what its vocabulary lacks.

    The id is that which model2vec leaves out; None without one. Raises CheckpointError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        stored = json.loads(text)
        model = stored["model"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing, which says which row of the table a token has"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error
    bare = stored.get("post_processor") is None
    backend = Tokenizer.from_str(text if bare else json.dumps(stored | {"post_processor": None}))
    if model.get("type") == "Unigram":
        return backend, model.get("unk_id")
    unknown = model.get("unk_token")
    return backend, None if unknown is None else backend.token_to_id(unknown)


def _read_table(directory: Path) -> Table:
    """The table in a directory, pickled or not. Raises CheckpointError."""
    safe, pickled = directory / "model.safetensors", directory / "pytorch_model.bin"
    if safe.is_file():
        return Table(load_file(safe), safe.name)
    if not pickled.is_file():
        raise CheckpointError(f"{safe.name} is missing, which holds the table")
    return Table(torch.load(pickled, map_location="cpu", weights_only=True), pickled.name)


def _model2vec_length(directory: Path) -> int | None:
    """Tokens to which model2vec cuts a text; None for any number."""
    config = read_json(directory / "config.json")
    return whole(config, "max_length", "config.json") if "max_length" in config else _DEFAULT_LENGTH


def _head_of(layout: ModelLayout, normalize: Any) -> nn.Sequential:
    """The layers after the table in fp32. `normalize`, if stated, adds or takes away the Normalize at their end."""
    modules = list(layout.vector_modules)
    ends = bool(modules) and modules[-1].kind == "Normalize"
    if ends and normalize is False:
        modules.pop()
    heads = [
        Normalize() if m.kind == "Normalize" else build_head(m.kind, m.directory, m.config) for m in modules
    ]
    last = [Normalize()] if normalize and not ends else []
    return nn.Sequential(*heads, *last).eval().requires_grad_(False)
