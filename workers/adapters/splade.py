"""SPLADE: one weight per term of the vocabulary, from the head of a masked language model (arXiv 2109.10086).

The weight of a term is log(1 + relu(x)), x being the term's largest logit over the text. Reads the
sentence-transformers layout of sparse encoders and plain ...ForMaskedLM checkpoints. Models whose queries need no
inference (`query_encoding: idf`) look up the weights of a query's tokens in `idf.json`.

The logits of a batch (tokens x vocabulary) would be the largest tensor by far, and only the maximum per sequence is
needed. So the head runs over a bounded number of tokens at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForMaskedLM

from ipc.wire.messages import Call, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.checkpoint import CheckpointError, build_model
from workers.adapters.shared.heads import nonzero_terms, strongest
from workers.adapters.shared.options import NO_LIMIT, OptionReader
from workers.adapters.shared.packing import Layout, Run
from workers.adapters.shared.sentence_transformers_layout import (
    PROMPTS_FILE,
    ModelLayout,
    read_modules,
    read_transformer,
)
from workers.adapters.shared.text_model import TextAdapter, TextBatch, TextModel, TextPayload, is_query
from workers.adapters.shared.transformer_settings import UnsupportedLayoutError, read_json, whole

Head = Callable[[torch.Tensor], torch.Tensor]

CHUNK_TOKENS = 1024
_WHOLE_HEADS = ("cls", "lm_head", "predictions")
_ACTIVATIONS = ("relu", "log1p_relu")


def head_of(model: Any) -> Head:
    """The head of a ...ForMaskedLM model: [T, width] to logits [T, vocabulary].

    Raises UnsupportedLayoutError where the head does not give the model's own logits.
    """
    head = _find(model)
    ids = torch.arange(5, 10, device=model.device)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0].float()
        got = head(model.base_model(input_ids=ids).last_hidden_state[0]).float()
    if got.shape != expected.shape or float((got - expected).norm()) > 5e-2 * float(expected.norm()):
        raise UnsupportedLayoutError(f"the head of {type(model).__name__} is of an unknown kind")
    return head


def _find(model: Any) -> Head:
    for name in _WHOLE_HEADS:
        whole = getattr(model, name, None)
        if whole is not None:
            return whole
    if hasattr(model, "vocab_projector"):
        return lambda rows: model.vocab_projector(
            model.vocab_layer_norm(model.activation(model.vocab_transform(rows)))
        )
    if hasattr(model, "decoder") and hasattr(model, "head"):
        return lambda rows: model.decoder(model.head(rows))
    raise UnsupportedLayoutError(f"the head of {type(model).__name__} is of an unknown kind")


def largest_logits(head: Head, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The largest logit of each term in each sequence: fp32 [N, vocabulary], in the layout's order."""
    parts: list[torch.Tensor] = []
    for start, runs in _chunks(layout.runs):
        tokens = sum(run.rows * run.length for run in runs)
        if tokens > CHUNK_TOKENS:
            parts.append(_largest_of_one(head, rows[start : start + tokens]))
            continue
        logits = head(rows[start : start + tokens])
        for run in runs:
            at = run.start - start
            part = logits[at : at + run.rows * run.length].view(run.rows, run.length, -1)
            parts.append(part.amax(1).float())
    return torch.cat(parts)


def _largest_of_one(head: Head, rows: torch.Tensor) -> torch.Tensor:
    """[1, vocabulary] for one sequence longer than a chunk."""
    pieces = [head(piece).amax(0, keepdim=True).float() for piece in rows.split(CHUNK_TOKENS)]
    return torch.cat(pieces).amax(0, keepdim=True)


def _chunks(runs: tuple[Run, ...]) -> Iterator[tuple[int, list[Run]]]:
    """(first token, runs) of neighbouring whole sequences of at most CHUNK_TOKENS; a longer sequence stands alone."""
    held: list[Run] = []
    room = CHUNK_TOKENS
    for start, count, length in runs:
        done = 0
        while done < count:
            fitting = min(count - done, room // length)
            if not fitting:
                if held:
                    yield held[0].start, held
                    held, room = [], CHUNK_TOKENS
                    continue
                yield start + done * length, [Run(start + done * length, 1, length)]
                done += 1
                continue
            held.append(Run(start + done * length, fitting, length))
            done += fitting
            room -= fitting * length
    if held:
        yield held[0].start, held


class _Extra(NamedTuple):
    """The number of terms that an item keeps, and the vector of an item that needs no inference."""

    max_terms: int
    looked_up: tuple[np.ndarray, np.ndarray] | None = None


class SpladeAdapter(TextAdapter):
    """A masked language model, its maximum over the text, and a logarithm."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="splade",
        operations=("encode",),
        inputs=("text",),
        outputs=("sparse",),
        lora=True,
    )
    uses = TextAdapter.uses | {"max_terms"}

    def __init__(
        self, text: TextModel, model: Any, head: Head, activation: str, idf: np.ndarray | None, terms: int
    ) -> None:
        """Put the parts together; `idf` is fp32 [vocabulary] where queries are looked up.

        A vector keeps `terms` terms where a request says nothing.
        """
        super().__init__(text, model, whole=model)
        self._head, self._activation, self._idf, self._terms = head, activation, idf, terms
        self._vocabulary = int(model.config.vocab_size)

    @classmethod
    def load(cls, context: LoadContext) -> SpladeAdapter:
        """Load tokenizer, transformer and head; raises UnsupportedLayoutError for another pooling or activation."""
        layout, stored = _read_layout(context.directory)
        settings = {**stored, **context.options}
        activation = str(settings.get("activation_function") or "relu")
        strategy = str(settings.get("pooling_strategy") or "max")
        if activation not in _ACTIVATIONS or strategy != "max":
            raise UnsupportedLayoutError(f"unsupported SPLADE pooling {strategy!r} with {activation!r}")
        parts: list[Any] = []

        def build(context: LoadContext, **arguments: Any) -> Any:
            model = build_model(context, AutoModelForMaskedLM, **arguments)
            parts.extend((model, head_of(model)))
            return model

        text = TextModel.build(context, layout, build=build, backbone_of=lambda model: model.base_model)
        model, head = parts
        idf = None
        if context.options.get("query_encoding", "model") == "idf":
            idf = _read_idf(context.directory / "idf.json", text, int(model.config.vocab_size))
        terms = whole(read_json(context.directory / PROMPTS_FILE), "max_active_dims", PROMPTS_FILE)
        return cls(text, model, head, activation, idf, terms or NO_LIMIT)

    @property
    def dims(self) -> dict[str, int]:
        """Size of the vocabulary."""
        return {"sparse": self._vocabulary}

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse a `max_terms` that is no positive number."""
        super().refuse_unsupported(call)
        self._max_terms(call)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize. In a model that looks up queries a query is finished here."""
        payloads = self._text.payloads(items, call, extra=_Extra(self._max_terms(call)))
        if is_query(call) and self._idf is not None:
            return [self._looked_up(payload, truncated) for payload, truncated in payloads]
        return [payload.prepared(truncated) for payload, truncated in payloads]

    def _max_terms(self, call: Call) -> int:
        return OptionReader(call).whole("max_terms", self._terms, 1)

    def _looked_up(self, payload: TextPayload, truncated: bool) -> Prepared:
        assert self._idf is not None
        ids = np.unique(np.concatenate([window.ids for window in payload.windows]))
        ids = ids[self._idf[ids] > 0]
        extra = payload.extra._replace(looked_up=(ids.astype(np.int32), self._idf[ids]))
        return TextPayload((), None, extra, payload.excess).prepared(truncated, payload.tokens)

    @torch.inference_mode()
    def encode(self, batch: TextBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"sparse": terms and weights of each item}."""
        items = len(batch.payloads)
        terms = SparseRows([np.empty(0, np.int32)] * items, [np.empty(0, np.float32)] * items)
        if batch.rows:
            terms = nonzero_terms(self._weights(batch))
        for at, payload in enumerate(batch.payloads):
            indices, values = payload.extra.looked_up or (terms.indices[at], terms.values[at])
            terms.indices[at], terms.values[at] = strongest(indices, values, payload.extra.max_terms)
        return {"sparse": terms}

    def _weights(self, batch: TextBatch) -> torch.Tensor:
        """fp32 [items, vocabulary]; a text in several windows has the largest weight of each term."""
        largest: torch.Tensor | None = None
        for row, packed, rows in self._text.run(batch):
            logits = largest_logits(self._head, rows, packed.layout).index_select(0, packed.restore)
            weights = torch.log1p(torch.relu(logits))
            if self._activation == "log1p_relu":
                weights = torch.log1p(weights)
            if batch.owners is None and len(batch.rows) == 1:
                return weights
            if largest is None:
                largest = weights.new_zeros(len(batch.payloads), weights.shape[1])
            owners = torch.from_numpy(row.owners).to(weights.device)[:, None].expand_as(weights)
            largest.scatter_reduce_(0, owners, weights, "amax")
        assert largest is not None
        return largest


def _read_layout(directory: Path) -> tuple[ModelLayout, dict[str, Any]]:
    """Where the transformer lies, and the stored settings of the pooling."""
    modules = read_modules(directory, ("Transformer", "MLMTransformer", "SpladePooling", "Router"))
    by_kind = {module.kind.removeprefix("MLM"): module for module in modules}
    transformer = by_kind["Transformer"].directory if "Transformer" in by_kind else directory
    pooling = dict(by_kind["SpladePooling"].config) if "SpladePooling" in by_kind else {}
    within = directory / "document_0_MLMTransformer"
    if "Router" in by_kind and (within / "config.json").is_file():
        transformer = within
        pooling = read_json(directory / "document_1_SpladePooling" / "config.json")
    return read_transformer(directory, transformer, "fill-mask"), pooling


def _read_idf(path: Path, text: TextModel, vocabulary: int) -> np.ndarray:
    """fp32 [vocabulary] weights by token id, from a map of token to weight. Raises CheckpointError without a file."""
    if not path.is_file():
        raise CheckpointError(f"queries are looked up in {path.name}, which the model lacks")
    weights = np.zeros(vocabulary, dtype=np.float32)
    for token, weight in json.loads(path.read_text(encoding="utf-8")).items():
        number = text.tokenizer.id_of(token)
        if number is not None:
            weights[number] = weight
    return weights
