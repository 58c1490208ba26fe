"""Qwen3-VL embedding and reranking: texts, pictures, or a picture with a text, read as a conversation.

Prompts, pooling and scores are those of the reference (github.com/QwenLM/Qwen3-VL-Embedding, arXiv 2601.04720).

1. `prepare` puts the instruction and the item, or query and document, into the checkpoint's own chat template. The end
   of a text that is too long is cut; pictures are never cut.
2. The vector of an item is that of the last token, normalised. The score of a pair is the probability of "yes" against
   "no" as the next token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLModel

from ipc.errors import from_code
from ipc.wire.messages import Call, EncodeCall, InputItem, ScoreCall
from workers.adapters.base import AdapterSpec, ItemFailure, LoadContext, Prepared, SparseRows
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.checkpoint import build_model
from workers.adapters.shared.heads import answer_rows
from workers.adapters.shared.pairs import activation, pair_excess
from workers.adapters.shared.vision_chat import Message, Part, PromptBatch, VisionChat, VisionChatModel

REPRESENT = "Represent the user's input."
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
PIXELS = {"min_pixels": 4 * 32 * 32, "max_pixels": 1800 * 32 * 32}
"""Least and most pixels of a picture, 4 to 1800 tokens."""
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


class Qwen3VlEmbeddingAdapter(VisionChatModel):
    """One vector per item."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="qwen3_vl_embedding",
        operations=("encode",),
        inputs=("text", "image"),
        outputs=("dense",),
    )

    @classmethod
    def load(cls, context: LoadContext) -> Qwen3VlEmbeddingAdapter:
        """Load tokenizer, image processor and weights; progress phases are "tokenizer" and "weights"."""
        chat = VisionChat.read(context, **PIXELS)
        return cls(build_model(context, Qwen3VLModel), chat, context)

    @property
    def dims(self) -> dict[str, int]:
        """Width of the space that texts and pictures share."""
        return {"dense": int(self._model.config.text_config.hidden_size)}

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """A conversation per item: the instruction, then the picture and the text."""
        assert isinstance(call, EncodeCall)
        instruction = _sentence(self.instruction_of(call, REPRESENT))
        return [self._prepared(item, instruction) for item in items]

    def _prepared(self, item: InputItem, instruction: str) -> Prepared | ItemFailure:
        parts = self.parts_of(item)
        if isinstance(parts, ItemFailure):
            return parts
        *pictures, text = parts
        return self.fitted(str(text), lambda kept: [("system", [instruction]), ("user", [*pictures, kept])])

    @torch.inference_mode()
    def encode(self, batch: PromptBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"dense": fp32 [n, dims]} on the device."""
        return {"dense": F.normalize(self.last_rows(batch), dim=-1)}


class Qwen3VlRerankerAdapter(VisionChatModel):
    """One score per pair of query and document, each a text, a picture, or both."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="qwen3_vl_reranker",
        operations=("score",),
        inputs=("text", "image"),
        outputs=("score",),
    )

    def __init__(
        self,
        model: Qwen3VLModel,
        chat: VisionChat,
        context: LoadContext,
        answers: nn.Linear,
    ) -> None:
        """Take over a model; `answers`, fp32 [2, width], holds the rows of the positive and the negative word."""
        super().__init__(model, chat, context)
        self._answers = answers
        self._function = activation(str(context.options.get("activation", "sigmoid")))

    @classmethod
    def load(cls, context: LoadContext) -> Qwen3VlRerankerAdapter:
        """Load tokenizer, image processor and weights; progress phases are "tokenizer" and "weights".

        Raises ValueError for answers that are no single tokens.
        """
        chat = VisionChat.read(context, **PIXELS)
        model = build_model(context, Qwen3VLForConditionalGeneration)
        return cls(model.model, chat, context, answer_rows(model, chat.tokenizer, context.options))

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model, self._answers)

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """A conversation per pair. Raises the failure of a query that cannot be used.

        A query text of more than half of the room keeps its beginning where its pair is too long.
        """
        assert isinstance(call, ScoreCall)
        instruction = self.instruction_of(call, RETRIEVE)
        query = self.parts_of(call.query)
        if isinstance(query, ItemFailure):
            raise from_code(query.code, f"query: {query.message}")
        return [self._prepared(query, self.parts_of(item), instruction) for item in items]

    def _prepared(
        self, query: Sequence[Part], document: list[Part] | ItemFailure, instruction: str
    ) -> Prepared | ItemFailure:
        if isinstance(document, ItemFailure):
            return document
        prompt = self._chat.prompt(_pair(instruction, query, document))
        if (tokens := len(prompt.ids)) <= self._limit:
            return Prepared(prompt, tokens)
        alone = self._chat.prompt(_pair(instruction, query, [""]))
        *pictures, text = document
        shorter = self._shorter(query, instruction)
        fitted = self.fitted(str(text), lambda kept: _pair(instruction, shorter, [*pictures, kept]))
        if isinstance(fitted, Prepared):
            fitted.truncated, fitted.excess = True, pair_excess(len(alone.ids), tokens, self._limit)
        return fitted

    def _shorter(self, query: Sequence[Part], instruction: str) -> list[Part]:
        """The query, of whose text the beginning is kept that leaves half of the room to a document."""
        *pictures, text = query
        bare = self._chat.prompt(_pair(instruction, [*pictures, ""], [""]))
        starts, most = self._chat.starts(str(text)), max(0, self._limit - len(bare.ids)) // 2
        return [*pictures, text if len(starts) <= most else str(text)[: starts[most]]]

    @torch.inference_mode()
    def score(self, batch: PromptBatch) -> torch.Tensor:
        """fp32 [pairs] on the device."""
        logits = self._answers(self.last_rows(batch))
        scores: torch.Tensor = self._function(logits[:, 0] - logits[:, 1])
        return scores


def _pair(instruction: str, query: Sequence[Part], document: Sequence[Part]) -> list[Message]:
    asked: list[Part] = [f"<Instruct>: {instruction}", "<Query>:", *query, "\n<Document>:", *document]
    return [("system", [JUDGE]), ("user", asked)]


def _sentence(instruction: str) -> str:
    """The instruction with a mark at its end, as in training."""
    instruction = instruction.strip()
    if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
        return instruction + "."
    return instruction
