"""Dense text embeddings: one vector per text.

Serves any directory in the sentence-transformers layout and plain transformers checkpoints.

1. `prepare` puts the prompt around each text and tokenizes.
2. `collate` packs the sequences into one row without padding.
3. `encode` runs the transformer, pools each sequence in fp32, applies the layers that follow (Dense, LayerNorm,
   Normalize) in fp32 and brings the rows back into the order given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ipc.messages import Call, EncodeCall, InputItem
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.checkpoint import attends_causally, load_transformer
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.heads import Normalize, load_head
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.packing import PackedBatch, TokenSequence
from workers.adapters.shared.pooling import pool, resolve_modes
from workers.adapters.shared.precision import parameter_bytes
from workers.adapters.shared.prompting import Prompts
from workers.adapters.shared.sentence_transformers_layout import ModelLayout, ModuleConfig, read_layout
from workers.adapters.shared.tokenizing import TextTokenizer, as_ids
from workers.adapters.spec import AdapterSpec


class DenseAdapter(Adapter):
    """A transformer, a pooling and the layers after it."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="dense",
        operations=("encode",),
        inputs=("text",),
        outputs=("dense",),
        options=(
            "query_template",
            "document_template",
            "default_instruction",
            "pooling",
            "normalize",
            "prompts",
        ),
    )

    def __init__(
        self,
        encoder: TextEncoder,
        tokenizer: TextTokenizer,
        layout: ModelLayout,
        prompts: Prompts,
        limit: int,
    ) -> None:
        """Put the parts together; `layout.pooling` is resolved and `limit` is the longest sequence in tokens."""
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._include_prompt = layout.include_prompt
        self._pooling = layout.pooling or ("mean",)
        self._token_head = _stack(layout.token_modules, encoder.device)
        self._vector_head = _stack(layout.vector_modules, encoder.device)
        self._limit = limit
        tokenizer.limit(limit)
        self._width = self._proof_width()

    @classmethod
    def load(cls, context: LoadContext) -> DenseAdapter:
        """Load layout, tokenizer and weights; progress phases are "tokenizer", "weights" and "proof"."""
        options = context.options
        layout = read_layout(context.directory)
        tokenizer = TextTokenizer.load(
            layout.transformer,
            lower_case=layout.lower_case,
            trust_remote_code=context.trust_remote_code,
            arguments=layout.tokenizer_arguments,
        )
        context.progress("tokenizer", 1.0)
        model = load_transformer(
            layout.transformer,
            device=context.device,
            dtype=context.dtype,
            trust_remote_code=context.trust_remote_code,
            config_arguments=layout.config_arguments,
            model_arguments=layout.model_arguments,
        )
        context.progress("weights", 1.0)
        if context.device.type == "cpu":
            lay_out_linears(model)
        layout = _with_options(layout, options, causal=attends_causally(model))
        encoder = TextEncoder(model, special_ids=tokenizer.special_ids, pad_id=tokenizer.pad_id)
        limit = _length_limit(
            context.max_sequence_length or layout.max_sequence_length or tokenizer.stored_max_length,
            encoder.position_limit,
        )
        prompts = Prompts(
            named={**layout.prompts, **options.get("prompts", {})},
            default_name=layout.default_prompt_name,
            query_template=options.get("query_template"),
            document_template=options.get("document_template"),
            default_instruction=options.get("default_instruction"),
        )
        adapter = cls(encoder, tokenizer, layout, prompts, limit)
        context.progress("proof", 1.0)
        return adapter

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._limit

    @property
    def dims(self) -> dict[str, int]:
        """Width of the dense output."""
        return {"dense": self._width}

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._encoder.model, self._token_head, self._vector_head)

    @property
    def packed(self) -> bool:
        """Whether batches run without padding."""
        return self._encoder.packed

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize with prompts; raises ValueError for an item with neither text nor ids."""
        is_query = isinstance(call, EncodeCall) and call.is_query
        before, after = self._prompts.affixes(call.instruction, is_query)
        texts = [f"{before}{self._text(item)}{after}" for item in items]
        skip = 0 if self._include_prompt or not before else self._tokenizer.prefix_length(before)
        prepared: list[Prepared | ItemFailure] = []
        for ids, types, truncated in self._tokenizer.encode(texts):
            sequence = TokenSequence(as_ids(ids), None if types is None else as_ids(types), skip)
            prepared.append(Prepared(payload=sequence, cost=len(ids), truncated=truncated))
        return prepared

    def collate(self, prepared: Sequence[Prepared]) -> PackedBatch:
        """One packed batch of host tensors."""
        return self._encoder.pack([item.payload for item in prepared])

    def encode(self, batch: PackedBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"dense": fp32 [n, dims]} on the device; raises ValueError for any other output."""
        if outputs != frozenset({"dense"}):
            raise ValueError(
                f"this model gives dense vectors only, not {', '.join(sorted(outputs)) or 'nothing'}"
            )
        return {"dense": self._vectors(batch)}

    @torch.inference_mode()
    def _vectors(self, batch: PackedBatch) -> torch.Tensor:
        batch = batch.to(self._encoder.device)
        rows = self._encoder.token_rows(batch)
        if len(self._token_head):
            rows = self._token_head(rows.float())
        vectors: torch.Tensor = self._vector_head(pool(rows, batch.layout, self._pooling, batch.skips))
        return vectors.index_select(0, batch.restore)

    def _text(self, item: InputItem) -> str:
        """The item's text; ids are turned back into text without their special tokens."""
        if item.text is not None:
            return item.text
        if item.ids is None:
            raise ValueError("an item needs text or token ids")
        return self._tokenizer.decode(item.ids)

    def _proof_width(self) -> int:
        """Encode an empty text; its width is the model's.  Raises RuntimeError for values that are not finite."""
        [(ids, types, _)] = self._tokenizer.encode([""])
        batch = self._encoder.pack([TokenSequence(as_ids(ids), None if types is None else as_ids(types))])
        vectors = self._vectors(batch)
        if not bool(torch.isfinite(vectors).all()):
            raise RuntimeError("the model's first vector is not finite")
        return vectors.shape[1]


def _with_options(layout: ModelLayout, options: Mapping[str, Any], *, causal: bool) -> ModelLayout:
    """The layout with the catalog's `pooling` and `normalize`, and with defaults for a plain checkpoint."""
    plain = layout.pooling is None
    if options.get("pooling") is not None:
        layout = replace(layout, pooling=resolve_modes(options["pooling"]))
    elif plain:
        layout = replace(layout, pooling=("lasttoken" if causal else "mean",))
    others = tuple(module for module in layout.vector_modules if module.kind != "Normalize")
    stored = len(others) != len(layout.vector_modules)
    wanted = bool(options.get("normalize", True if plain else stored))
    if wanted == stored:
        return layout
    normalize = (ModuleConfig("Normalize", layout.transformer, {}),) if wanted else ()
    return replace(layout, vector_modules=(*others, *normalize))


def _stack(modules: Sequence[ModuleConfig], device: torch.device) -> nn.Sequential:
    """The layers of one stage in fp32 on `device`."""
    heads = [
        Normalize() if m.kind == "Normalize" else load_head(m.kind, m.directory, m.config) for m in modules
    ]
    return nn.Sequential(*heads).to(device).eval().requires_grad_(False)


def _length_limit(wanted: int | None, positions: int | None) -> int:
    """The longest sequence, clipped to the model's positions; 512 tokens where nothing says anything."""
    known = [limit for limit in (wanted, positions) if limit is not None]
    return min(known) if known else 512
