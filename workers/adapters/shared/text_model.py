"""The base of families over a text transformer: loading, prompts, tokenizing, and batches without padding.

1. `TextModel.build` reads tokenizer and weights, and compares the packed way of running with the padded one.
2. `payloads` puts the prompt around each text, tokenizes, and fits the text into the model's length as windows.
3. `collate` packs the windows of a batch into one row. A row knows the item of each window, and the token vectors that
   the items give back. Windows over the token budget make several rows.
4. `run` sends row after row through the model, as steps of the batch (`workers.device.stepping`).

`Prompts` chooses the prompt around a text by the first rule that applies:

1. The stored prompt that the request names. The names "query" and "document" choose a side, and so the rules below.
2. A template (`query_template`, `document_template`), which holds {text} and may hold {instruction}.
3. An instruction before the text, with a space in between unless the instruction ends in whitespace.
4. The stored prompt of the side: "query", or for documents the first of "document", "passage" and "corpus".
5. The stored default prompt (`default_prompt_name`), for texts of a request that states no side. Such texts are
   documents, and have the prompt of documents where the model stores one.

A query without an instruction has `default_instruction`. Rules 4 and 5 are those of `encode_query`, `encode_document`
and `encode` of sentence-transformers. A document never has the default prompt, which is mostly that of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, EncodeCall, InputItem
from workers.adapters.base import Adapter, Excess, LoadContext, Prepared
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import build_model, text_limit
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.linears import lay_out_linears
from workers.adapters.shared.long_texts import Tokens
from workers.adapters.shared.lora import LoraLayers
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import Int64Array, PackedBatch, TokenSequence, divided
from workers.adapters.shared.sentence_transformers_layout import ModelLayout
from workers.adapters.shared.tokenizing import TextTokenizer, as_ids
from workers.device import stepping

_DOCUMENT_NAMES = ("document", "passage", "corpus")
SIDES = ("query", "document")
"""Names of prompts that choose a side of the model."""


class Affixes(NamedTuple):
    """Text before and after every item."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts and templates of one model.  Raises ValueError for a template without {text}."""

    named: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    query_template: str | None = None
    document_template: str | None = None
    default_instruction: str | None = None

    def __post_init__(self) -> None:
        for template in (self.query_template, self.document_template):
            if template is not None and template.count("{text}") != 1:
                raise ValueError(f"a template needs {{text}} once: {template!r}")

    @property
    def names(self) -> list[str]:
        """The names that a request may give."""
        return list(dict.fromkeys((*SIDES, *self.named)))

    def affixes(self, instruction: str | None, is_query: bool | None, name: str = "") -> Affixes:
        """The text before and after each text of a request; `name` is one of `names`, or "".

        `is_query` is the side that the request states, None where the request states none.
        """
        if name in self.named and name not in SIDES:
            return Affixes(self.named[name], "")
        instruction = instruction or (self.default_instruction if is_query else None)
        template = self.query_template if is_query else self.document_template
        if template is not None:
            before, _, after = template.partition("{text}")
            filled = instruction or ""
            return Affixes(before.replace("{instruction}", filled), after.replace("{instruction}", filled))
        if instruction:
            return Affixes(instruction if instruction[-1].isspace() else instruction + " ", "")
        return Affixes(self._stored(is_query), "")

    def _stored(self, is_query: bool | None) -> str:
        """The stored prompt, or ""."""
        for name in ("query",) if is_query else _DOCUMENT_NAMES:
            if name in self.named:
                return self.named[name]
        return self.default if is_query is None else ""


@dataclass(frozen=True, slots=True)
class TextPayload:
    """One item ready for the device.

    windows  token sequences: one, several for a text that was split, none where no inference is needed
    picks    per window the places of the tokens whose vectors the item gives back; None for an item without
    extra    options that the family applies to this item after the forward pass
    excess   how much was cut, if the tokens were counted
    """

    windows: tuple[TokenSequence, ...]
    picks: tuple[Int64Array, ...] | None = None
    extra: Any = None
    excess: Excess | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(len(window.ids) for window in self.windows)

    def prepared(self, truncated: bool, cost: int | None = None) -> Prepared:
        """This payload as an item for the executor; `cost` is by default the token count."""
        rows = 1 if self.picks is None else sum(map(len, self.picks))
        return Prepared(self, self.tokens if cost is None else cost, truncated, rows, excess=self.excess)


@dataclass(frozen=True, slots=True)
class TextRow:
    """Neighbouring windows of a batch that run together. Tensors lie on the host; `TextModel.run` copies them.

    packed  the windows
    owners  int64 [windows], the item of each window
    picks   int64 [R], places in the row of the token vectors to give back, window after window; None without
    """

    packed: PackedBatch
    owners: Int64Array
    picks: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return int(self.packed.ids.shape[1])


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Payloads laid into rows: one, several where a single item is over the token budget, none without windows.

    owners  int64 [windows], the item of each window of all rows; None where every item has one
    """

    payloads: Sequence[TextPayload]
    rows: Sequence[TextRow]
    owners: Int64Array | None

    @property
    def picked(self) -> int:
        """How many token vectors the items give back."""
        return sum(0 if row.picks is None else len(row.picks) for row in self.rows)


@dataclass(slots=True, kw_only=True)
class TextReader:
    """The tokenizer and the prompts of a model over texts.

    `limit` is the longest sequence, `side_limits` that of queries and of documents where a request states the side, in
    tokens.
    """

    tokenizer: TextTokenizer
    prompts: Prompts
    limit: int
    include_prompt: bool = True
    side_limits: Mapping[bool | None, int] = field(default_factory=dict)

    def affixes(self, call: Call) -> Affixes:
        """The text before and after each text of a call."""
        return self.prompts.affixes(
            call.instruction, stated_side(call), OptionReader(call).text("prompt_name", "")
        )

    def payloads(
        self,
        items: Sequence[InputItem],
        call: Call,
        pick: Callable[[Tokens], Int64Array] | None = None,
        extra: Any = None,
    ) -> Iterator[tuple[TextPayload, bool]]:
        """Each item with its prompt as a payload, and whether the item was cut; `pick` chooses tokens of a window."""
        affixes = self.affixes(call)
        most = most_tokens(call, self.side_limits.get(stated_side(call), self.limit))
        skips = not self.include_prompt and bool(affixes.before)
        prefix = self.tokenizer.prefix_length(affixes.before) if skips else 0
        for (windows, truncated, tokens), frame in self.tokenizer.fitted(
            items, affixes, call.overflow, most if most < self.limit else None
        ):
            skip = max(0, prefix - self.tokenizer.frame.before + frame.before) if skips else 0
            sequences = tuple(sequence_of(one, skip if at == 0 else 0) for at, one in enumerate(windows))
            picks = None if pick is None else tuple(map(pick, windows))
            excess = Excess(tokens, most) if truncated and tokens else None
            yield TextPayload(sequences, picks, extra, excess), truncated


@dataclass(slots=True, kw_only=True)
class TextModel(TextReader):
    """A transformer over texts with its tokenizer and prompts. At most `batch_tokens` run together."""

    encoder: TextEncoder
    batch_tokens: int

    @classmethod
    def build(
        cls,
        context: LoadContext,
        layout: ModelLayout,
        *,
        build: Callable[..., Any] = build_model,
        backbone_of: Callable[[Any], Any] = lambda model: model,
    ) -> TextModel:
        """Build from a layout; progress phases are "tokenizer" and "weights".

        `build` takes the arguments of `build_model` and returns the model. `backbone_of` returns the part of the model
        that makes the token vectors.
        """
        tokenizer = TextTokenizer.read(
            layout.transformer,
            lower_case=layout.lower_case,
            trust_remote_code=context.trust_remote_code,
            arguments=layout.tokenizer_arguments,
        )
        context.progress("tokenizer", 1.0)
        model = build(
            context,
            directory=layout.transformer,
            config_arguments=layout.config_arguments,
            model_arguments=layout.model_arguments,
        )
        if context.device.type == "cpu":
            lay_out_linears(model, findings=context.findings)
        encoder = TextEncoder(backbone_of(model), **tokenizer.apart)
        tokenizer.knows(encoder.embeddings)
        stated = context.max_sequence_length or layout.max_sequence_length or tokenizer.stored_max_length
        limit = text_limit(encoder.model, stated)
        tokenizer.limit(limit)
        return cls(
            encoder=encoder,
            tokenizer=tokenizer,
            prompts=prompts_of(layout, context.options),
            limit=limit,
            include_prompt=layout.include_prompt,
            batch_tokens=context.batch_tokens,
            side_limits=layout.side_limits(limit),
        )

    def collate(self, payloads: Sequence[TextPayload]) -> TextBatch:
        """One batch on the host, in page-locked memory for CUDA.  Thread-safe."""
        windows = [window for payload in payloads for window in payload.windows]
        picks = [pick for payload in payloads for pick in payload.picks or ()]
        counts = [len(payload.windows) for payload in payloads]
        owners = np.repeat(np.arange(len(payloads)), counts)
        rows = [
            self._row(windows[part], owners[part], picks[part] if len(picks) == len(windows) else [])
            for part in divided([len(window.ids) for window in windows], self.batch_tokens)
        ]
        return TextBatch(payloads, rows, owners if set(counts) != {1} else None)

    def _row(self, windows: list[TokenSequence], owners: Int64Array, chosen: Sequence[Int64Array]) -> TextRow:
        packed = self.encoder.pack(windows)
        if not chosen:
            return TextRow(packed, owners, None)
        starts = packed.layout.first.numpy()[packed.restore.numpy()]
        places = np.concatenate([start + pick for start, pick in zip(starts, chosen, strict=True)])
        picks = torch.from_numpy(places)
        return TextRow(packed, owners, picks.pin_memory() if self.encoder.device.type == "cuda" else picks)

    def run(self, batch: TextBatch) -> Iterator[tuple[TextRow, PackedBatch, torch.Tensor]]:
        """Each row, its windows on the device, and its token vectors [T, width] in the model's dtype.

        Device thread only. The caller's work on a row belongs to the row's step.
        """
        for row in stepping.each(batch.rows, [row.tokens for row in batch.rows]):
            moved = row.packed.to(self.encoder.device)
            yield row, moved, self.encoder.token_rows(moved)

    @staticmethod
    def picked(row: TextRow, vectors: torch.Tensor) -> torch.Tensor:
        """The token vectors [R, width] of a row that its items give back, window after window."""
        assert row.picks is not None
        return vectors.index_select(0, row.picks.to(vectors.device, non_blocking=True))


class TokenVectors:
    """Collects the token vectors that the items of a batch give back, row by row, in one tensor."""

    def __init__(self, batch: TextBatch) -> None:
        self._count, self._done = batch.picked, 0
        self._whole: torch.Tensor | None = None

    def add(self, vectors: torch.Tensor) -> None:
        """[R, width] of the next row."""
        if len(vectors) == self._count:
            self._whole = vectors
            return
        if self._whole is None:
            self._whole = vectors.new_empty(self._count, vectors.shape[1])
        self._whole[self._done : self._done + len(vectors)] = vectors
        self._done += len(vectors)

    def whole(self) -> torch.Tensor:
        """[R of all rows, width], item after item."""
        assert self._whole is not None
        return self._whole


class ReadingAdapter(Adapter):
    """Base of the families over one `TextReader`. `max_tokens` of a call cuts texts before the model's own limit."""

    uses = frozenset(("max_tokens", "prompt_name"))

    def __init__(self, reader: TextReader) -> None:
        """Take over the tokenizer, which knows for how many ids the model has embeddings."""
        self._reader = reader
        self.tokenizer, self.known_ids = reader.tokenizer.wrapped, reader.tokenizer.known

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._reader.limit

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse also a prompt that the model lacks, and windows of any number of tokens."""
        super().refuse_unsupported(call)
        options = OptionReader(call)
        if options.text("prompt_name", ""):
            options.choice("prompt_name", "", self._reader.prompts.names)
        options.whole("max_tokens", 1, 1)
        divided = call.overflow == "chunk" or (isinstance(call, EncodeCall) and call.chunking is not None)
        if divided and call.options.get("max_tokens") is not None:
            raise InvalidInput(f"{call.names.options}max_tokens: does not go with chunks of a text")


class TextAdapter(ReadingAdapter):
    """Base of the families over one `TextModel`."""

    def __init__(
        self, text: TextModel, *heads: torch.nn.Module, whole: torch.nn.Module | None = None
    ) -> None:
        """Take over the loaded parts. `heads` are the layers after the transformer.

        `whole` is the model that LoRA adapters change, by default the transformer.
        """
        super().__init__(text)
        self._text, self._heads = text, heads
        self.loras = LoraLayers(whole or text.encoder.model) if self.spec.lora else None

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._text.encoder.model, *self._heads)

    @property
    def packed(self) -> bool:
        """Whether batches run without padding."""
        return self._text.encoder.packed

    def ids_of(self, payload: TextPayload) -> Sequence[Int64Array]:
        """The windows."""
        return [window.ids for window in payload.windows]

    def collate(self, prepared: Sequence[Prepared]) -> TextBatch:
        """One packed batch of host tensors."""
        return self._text.collate([item.payload for item in prepared])

    def padding_ratio(self, batch: TextBatch) -> float:
        """Share of padding in the encoder's forward passes."""
        return self._text.encoder.padding_ratio(row.packed for row in batch.rows)


def stated_side(call: Call) -> bool | None:
    """Whether the texts of a call are queries: by the side that `prompt_name` chooses, else by the call.

    None where the request states no side.
    """
    name = call.options.get("prompt_name")
    return name == SIDES[0] if name in SIDES else call.is_query if isinstance(call, EncodeCall) else None


def is_query(call: Call) -> bool:
    """Whether the texts of a call are queries; else they are documents."""
    return bool(stated_side(call))


def most_tokens(call: Call, limit: int) -> int:
    """Tokens to which a call wants texts cut, special tokens included; at most `limit`."""
    return min(OptionReader(call).whole("max_tokens", limit, 1), limit)


def sequence_of(window: Tokens, skip: int = 0) -> TokenSequence:
    """A window as arrays."""
    return TokenSequence(as_ids(window.ids), None if window.types is None else as_ids(window.types), skip)


def mean_of_windows(found: Sequence[torch.Tensor], batch: TextBatch) -> torch.Tensor:
    """[windows, width] of each row to [items, width]: the mean of each item's windows, weighted by tokens."""
    vectors = found[0] if len(found) == 1 else torch.cat(list(found))
    if batch.owners is None:
        return vectors
    tokens = [len(window.ids) for payload in batch.payloads for window in payload.windows]
    weights = torch.tensor(tokens, dtype=vectors.dtype, device=vectors.device)[:, None]
    owners = torch.from_numpy(batch.owners).to(vectors.device)
    sums = vectors.new_zeros(len(batch.payloads), vectors.shape[1]).index_add_(0, owners, vectors * weights)
    totals = vectors.new_zeros(len(batch.payloads), 1).index_add_(0, owners, weights)
    return sums / totals


def prompts_of(layout: ModelLayout, options: Mapping[str, Any]) -> Prompts:
    """The stored prompts with the catalog's laid over them."""
    return Prompts(
        named={**layout.prompts, **options.get("prompts", {})},
        default=layout.default_prompt,
        query_template=options.get("query_template"),
        document_template=options.get("document_template"),
        default_instruction=options.get("default_instruction"),
    )
