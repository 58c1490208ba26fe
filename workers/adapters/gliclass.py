"""Zero-shot classes by GLiClass: all labels go before the text, and one forward pass scores each of them.

The prompt and the model are those of the library (`gliclass` 0.1.21, uni-encoder). `options.overflow_policy` decides
about a text that does not fit beside its labels: "default" and "error" refuse the text with `InputTooLong`,
"truncate_text" cuts the end of the text and keeps the labels whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.utils import logging as transformers_logging

from ipc.errors import InputTooLong, InvalidInput
from ipc.extras import require
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.building import BUILDING, parameter_bytes
from workers.adapters.shared.checkpoint import refuse_unfitting, text_limit, tokenizer_of
from workers.adapters.shared.extracting import NOT_FINITE, ExtractAdapter, place_of, ranked, text_of
from workers.adapters.shared.known_ids import KnownIds, embedding_rows, filler_of
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.own_code import own_code
from workers.adapters.shared.packing import Int64Array, PackedBatch, TokenSequence, pack
from workers.adapters.shared.rectangles import EQUAL, PADDED, padded
from workers.adapters.shared.rope import LengthClasses
from workers.adapters.shared.tokenizing import as_ids, rust_copy

EXTRA = "gliclass"
LABEL, SEPARATOR = "<<LABEL>>", "<<SEP>>"
KINDS = ("single-label", "multi-label")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Labels and options of a request."""

    labels: Sequence[str]
    kind: str
    threshold: float


@dataclass(frozen=True, slots=True)
class _Text:
    """One tokenized item."""

    sequence: TokenSequence
    wanted: _Wanted


class GliclassAdapter(ExtractAdapter):
    """One GLiClass with a single encoder for labels and text."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="gliclass",
        operations=("extract",),
        inputs=("text",),
        outputs=("json",),
    )
    labels = "required"

    def __init__(self, model: Any, tokenizer: Any, context: LoadContext) -> None:
        """Take over a library model (eval mode, on its device). Raises ValueError for a slow tokenizer."""
        self._model, self._name = model, context.model_id
        self._backend = rust_copy(tokenizer)
        encoder = model.model.encoder_model
        self._filler = filler_of(encoder, int(tokenizer.pad_token_id or 0))
        self.known_ids = KnownIds(embedding_rows(encoder), tokenizer)
        self._kind = str(context.options.get("classification_type") or KINDS[1])
        self._prompt_first = bool(model.config.prompt_first)
        self._lengths = LengthClasses(model)
        # NOTE: the library pools without a mask; only pooling of the first token bears padding.
        self._together = self._lengths.within(PADDED if model.config.pooling_strategy == "first" else EQUAL)
        self._limit = text_limit(encoder, context.max_sequence_length)

    @classmethod
    def load(cls, context: LoadContext) -> GliclassAdapter:
        """Load with the library. Raises ImportError that names the extra, ValueError for other architectures."""
        library = require("gliclass", EXTRA)
        tokenizer = tokenizer_of(context)
        transformers_logging.disable_progress_bar()
        with BUILDING, own_code(allowed=context.trust_remote_code):
            model, report = library.GLiClassModel.from_pretrained(
                str(context.directory),
                dtype=context.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        if model.config.architecture_type != "uni-encoder":
            raise ValueError(f"GLiClass models of type {model.config.architecture_type!r} are not supported")
        refuse_unfitting(model, report)
        context.progress("weights", 1.0)
        return cls(model.to(context.device).eval().requires_grad_(False), tokenizer, context)

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, labels and special tokens included."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model)

    def wanted_of(self, call: ExtractCall) -> _Wanted:
        """Options and labels of a call. Raises `InvalidInput` for labels that hold the model's own markers."""
        options = OptionReader(call)
        kind = options.choice("classification_type", self._kind, KINDS)
        question = _Wanted(call.labels, kind, options.threshold("threshold", 0.0))
        for label in call.labels:
            if LABEL in label or SEPARATOR in label:
                raise InvalidInput(
                    f"params.labels: {label[:64]!r} holds a mark that parts labels in this model"
                )
        return question

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize labels and text together; raises `InputTooLong` for a text that may not be cut."""
        assert isinstance(call, ExtractCall)
        wanted = self.wanted_of(call)
        prompt = "".join(LABEL + label for label in wanted.labels) + SEPARATOR
        # NOTE: `encode` keeps the interpreter's lock for as long as it takes, `encode_batch` does not.
        [alone] = self._backend.encode_batch_fast([prompt])
        overhead = len(alone.ids)
        cuts = call.options.get("overflow_policy") == "truncate_text"
        # NOTE: a mark inside a text would count as another label.
        texts = [
            text_of(item).replace(LABEL, "<< LABEL >>").replace(SEPARATOR, "<< SEP >>") for item in items
        ]
        whole = [prompt + text if self._prompt_first else text + prompt for text in texts]
        prepared: list[Prepared | ItemFailure] = []
        for item, encoding in zip(items, self._backend.encode_batch_fast(whole), strict=True):
            ids = encoding.ids
            budget, excess = self._limit - overhead, len(ids) - self._limit
            truncated = excess > 0 and cuts and budget > 0
            if truncated:
                ids = self._cut(ids, excess, len(ids) - overhead)
            elif excess > 0 or budget <= 0:
                raise self._too_long(place_of(item, call), len(ids), overhead)
            prepared.append(Prepared(_Text(TokenSequence(as_ids(ids)), wanted), len(ids), truncated))
        return prepared

    def ids_of(self, payload: _Text) -> list[Int64Array]:
        """Labels and text."""
        return [payload.sequence.ids]

    def collate(self, prepared: Sequence[Prepared]) -> tuple[list[_Wanted], PackedBatch]:
        """Labels and options of each item, and the sequences sorted by length."""
        texts: list[_Text] = [item.payload for item in prepared]
        return [text.wanted for text in texts], pack([text.sequence for text in texts])

    def padding_ratio(self, batch: tuple[list[_Wanted], PackedBatch]) -> float:
        """Share of padding in the rectangles; 0 where all texts of a rectangle have one length."""
        return self._together.padding([batch[1]])

    def extract(self, batch: tuple[list[_Wanted], PackedBatch]) -> list[Extraction | ItemFailure]:
        """The labels of each item, the likeliest first."""
        wanted, packed = batch
        logits = self._logits(packed.to(self._model.device), [len(one.labels) for one in wanted])
        return [self._classes(row, one) for row, one in zip(logits, wanted, strict=True)]

    def _classes(self, logits: torch.Tensor, wanted: _Wanted) -> Extraction | ItemFailure:
        """The classes of one item from fp32 [labels]."""
        if not bool(torch.isfinite(logits).all()):
            return NOT_FINITE
        single = wanted.kind == KINDS[0]
        scores = torch.softmax(logits, dim=-1) if single else torch.sigmoid(logits)
        return Extraction(classifications=ranked(wanted.labels, scores.tolist(), wanted.threshold))

    @torch.inference_mode()
    def _logits(self, batch: PackedBatch, labels: Sequence[int]) -> list[torch.Tensor]:
        """fp32 [labels of the item] of each item, on the host, in the order given."""
        rows: list[torch.Tensor] = []
        counts = [0] * len(labels)
        for given, packed in enumerate(batch.restore.tolist()):
            counts[packed] = labels[given]
        for part in padded(batch, self._filler, self._together):
            self._lengths.reset()
            most = max(counts[part.first : part.first + len(part.ids)])
            output = self._model(**part.inputs(), max_num_classes=most)
            rows.extend(output.logits.float().cpu())
        return [rows[packed][: labels[given]] for given, packed in enumerate(batch.restore.tolist())]

    def _cut(self, ids: list[int], excess: int, text_tokens: int) -> list[int]:
        """`ids` without the last `excess` of their text tokens."""
        bare = self._backend.encode("").ids
        before, after = (1, len(bare) - 1) if bare else (0, 0)
        end = len(ids) - after if self._prompt_first else before + text_tokens
        return [*ids[: end - excess], *ids[end:]]

    def _too_long(self, index: int, total: int, overhead: int) -> InputTooLong:
        parts = f"(text={total - overhead}, label_prompt={overhead})"
        return InputTooLong(
            f"Item {index}: observed {total} tokens {parts} exceeds context cap {self._limit} for {self._name}",
            model=self._name,
        )
