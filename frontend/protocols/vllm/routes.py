"""The routes of vLLM beside the routes of OpenAI: vectors, classes, scores and tokens.

1. POST /pooling: one vector for each input, or one for each token, whichever the model has.
2. POST /classify: the likeliest class of each text, and the probabilities of all classes.
3. POST /score, /v1/score and /rerank: how well texts answer another text, in their order or best first.
4. POST /tokenize and /detokenize: a text to its tokens, and token ids to their text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.protocols.foreign.scoring import (
    ClassesPlan,
    ClassifyResource,
    ScoreBody,
    TextRankingResource,
    TextScoringResource,
    TokensPlan,
    TokensResource,
    check_ids_together,
    check_texts_together,
    classes_of,
)
from frontend.protocols.sie.encode import VectorsResource, Wishes
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import check_inputs, inputs_of
from frontend.protocols.sie.render import HOLE, base64_of, filled, json_list
from frontend.protocols.sie.score import Pairs
from frontend.protocols.vllm.contract import (
    ClassifiedText,
    ClassifyAnswer,
    ClassifyRequest,
    DocumentsAnswer,
    DocumentsRequest,
    PairScoreAnswer,
    PairScoreRequest,
    PooledInput,
    PoolingAnswer,
    PoolingRequest,
    PoolingUsage,
    PromptRequest,
    PromptText,
    PromptTokens,
    RankedDocument,
    RankedText,
    RankUsage,
    ScoredText,
    TokenIdsRequest,
)
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput, NoReplica
from ipc.wire import tokens
from ipc.wire.extraction import Classification
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, GenerateCall, InputItem, ModelStatus, ScoreCall


def new_id(kind: str) -> str:
    """An id of an answer that no other process gives."""
    return f"{kind}-{random.getrandbits(128):032x}"


def listed(form: type[L], kind: str, data: list[Any], scope: RequestScope, reply: Answer) -> L:
    """The answer around a list."""
    used = sum(reply.tokens)
    return form(new_id(kind), "list", int(time.time()), scope.model, data, PoolingUsage(used, used, 0, None))


L = TypeVar("L", PoolingAnswer, PairScoreAnswer, ClassifyAnswer)
_OUTPUTS = {"embed": "dense", "token_embed": "multivector"}


class PoolingResource(VectorsResource[PoolingRequest]):
    """Vectors in the order of the inputs."""

    operation = "pooling"
    body = PoolingRequest

    def model_of(self, request: PoolingRequest) -> str:
        """The model that the request names, else the model that has the output."""
        outputs = (_OUTPUTS[request.task],) if request.task else tuple(_OUTPUTS.values())
        return model_named(request, self.services.directory, self.services.settings, outputs)

    def check(self, request: PoolingRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        if self.output_of(request, entry) not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no vectors for the task {request.task or 'embed'}")
        return super().check(request, entry)

    def output_of(self, request: PoolingRequest, entry: ModelEntry) -> str:
        """The output that the task means; without a task dense vectors, if the model has them."""
        if request.task:
            return _OUTPUTS[request.task]
        return next((name for name in _OUTPUTS.values() if name in entry.outputs), "dense")

    def wishes_of(self, request: PoolingRequest) -> Wishes:
        """Where texts are cut."""
        return Wishes(**request.cut)

    def width_of(self, request: PoolingRequest) -> int | None:
        """The wanted width."""
        return request.dimensions

    def plan(
        self, request: PoolingRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> Plan[EncodeCall]:
        """The call. Raises `InvalidInput` for a width of token vectors, and for a cut that the model cannot make."""
        request.check_cut(entry, status)
        if self.output_of(request, entry) == "multivector" and request.dimensions is not None:
            raise InvalidInput("dimensions: vectors of tokens cannot be cut")
        return super().plan(request, entry, inputs, status)

    async def render(
        self, reply: Answer, plan: Plan[EncodeCall], request: PoolingRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        [output] = plan.call.outputs
        with reply:
            values = reply.tensors()[output]
            if output == "dense":
                vectors = [row[: request.dimensions] for row in values]
            else:
                vectors = [values[span] for span in reply.spans(output)]
            write: Callable[[np.ndarray], Any] = (
                base64_of if request.encoding_format == "base64" else np.asarray
            )
            entries = (PooledInput(index, "pooling", write(vector)) for index, vector in enumerate(vectors))
            pieces = await json_list(entries, values.nbytes)
        return filled(listed(PoolingAnswer, "pool", HOLE, scope, reply), pieces)


_NUMBER_NBYTES = 20
"""About how long a number is."""


class VllmClassifyResource(ClassifyResource[ClassifyRequest]):
    """Probabilities in the order of the model's classes."""

    operation = "classify"
    body = ClassifyRequest

    def examine(self, request: ClassifyRequest) -> None:
        """Inputs of one kind."""
        check_inputs(request.input, "input", self.services.settings.limits)

    def check(self, request: ClassifyRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        return inputs_of(request.input, "input", entry)

    def plan(
        self, request: ClassifyRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes."""
        request.check_cut(entry, status)
        return super().plan(request, entry, inputs, status)

    async def render(
        self, reply: Answer, plan: ClassesPlan, request: ClassifyRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body; the likeliest class comes first from the worker. Raises `NoReplica` for classes of another plan."""
        results = await classes_of(reply)
        if any({one.label for one in classes} != set(plan.labels) for classes in results):
            raise NoReplica(f"model '{plan.model}' was replaced by another during this request")
        entries = (_classified(index, classes, plan.labels) for index, classes in enumerate(results))
        pieces = await json_list(entries, _NUMBER_NBYTES * sum(map(len, results)))
        return filled(listed(ClassifyAnswer, "classify", HOLE, scope, reply), pieces)


def _classified(index: int, classes: list[Classification], labels: list[str]) -> ClassifiedText:
    scores = {one.label: one.score for one in classes}
    return ClassifiedText(index, classes[0].label, [scores[label] for label in labels], len(labels))


class _CutBody(ScoreBody, Protocol):
    """A request that may cut texts at a number of tokens."""

    def check_cut(self, entry: ModelEntry, status: ModelStatus) -> None:
        """Raise `InvalidInput` where the loaded model cannot."""


S = TypeVar("S", bound=_CutBody)


class _CuttingResource(TextScoringResource[S]):
    """What both routes check of a loaded model."""

    def plan(self, request: S, entry: ModelEntry, inputs: Pairs, status: ModelStatus) -> Plan[ScoreCall]:
        """The call."""
        request.check_cut(entry, status)
        return super().plan(request, entry, inputs, status)


class PairScoreResource(_CuttingResource[PairScoreRequest]):
    """Scores in the order of the texts."""

    operation = "score"
    body = PairScoreRequest

    def names_of(self, request: PairScoreRequest) -> FieldNames:
        """The fields that the request has."""
        first, second = request.fields
        query = f"{first}[{{}}]" if request.firsts else first
        return FieldNames(f"{second}[{{}}]", f"{second}[{{}}]", query=query, options="")

    def firsts_of(self, request: PairScoreRequest) -> list[str]:
        """The first texts, where each text has one of its own."""
        return request.firsts

    def answer(
        self, request: PairScoreRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> PairScoreAnswer:
        """A score for each text."""
        data = [ScoredText(index, "score", score) for index, score in enumerate(scores.tolist())]
        return listed(PairScoreAnswer, "score", data, scope, reply)


class DocumentsResource(_CuttingResource[DocumentsRequest], TextRankingResource[DocumentsRequest]):
    """Documents best first, each with its text."""

    body = DocumentsRequest

    def entry(self, index: int, score: float, text: str | None) -> RankedDocument:
        """Index, document and score."""
        return RankedDocument(index, RankedText(text or ""), score)

    def around(self, best: list[RankedDocument], scope: RequestScope, reply: Answer) -> DocumentsAnswer:
        """The documents beside id, model and usage."""
        used = sum(reply.tokens)
        return DocumentsAnswer(new_id("rerank"), scope.model, RankUsage(used, used), best)


class PromptResource(TokensResource[PromptRequest]):
    """The tokens of one text, or of a conversation in the template of its model."""

    operation = "tokenize"
    body = PromptRequest
    names = FieldNames("prompt", "prompt")

    def reading(self, request: PromptRequest) -> Sequence[str]:
        """Conversations are read by models that answer them."""
        return super().reading(request) if request.messages is None else ("chat",)

    def examine(self, request: PromptRequest) -> None:
        """A text within its limit, or a conversation."""
        limits = self.services.settings.limits
        check_texts_together([request.text], "prompt", limits)
        request.conversation(limits)

    def check(self, request: PromptRequest, entry: ModelEntry) -> list[InputItem]:
        """The text. Raises `InvalidInput` for a conversation with a model that answers none."""
        if request.messages is not None and "chat" not in entry.outputs:
            raise InvalidInput(
                f"messages: model '{entry.id}' answers no conversations, send a text as prompt"
            )
        return [InputItem(request.text)]

    def prompt(self, request: PromptRequest) -> GenerateCall | None:
        """The conversation."""
        return request.conversation(self.services.settings.limits)

    def special(self, request: PromptRequest) -> bool:
        """Special tokens are added unless the request says otherwise."""
        return request.add_special_tokens is not False

    def write(self, request: PromptRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """Count, length of the model, ids, and strings where they were asked for."""
        read = tokens.unpack(results[0])
        strings = read.strings if request.return_token_strs else None
        return [msgspec.json.encode(PromptTokens(len(read.ids), plan.longest, read.ids, strings))]


class TokenIdsResource(TokensResource[TokenIdsRequest]):
    """The text of token ids, special tokens included."""

    operation = "detokenize"
    body = TokenIdsRequest
    names = FieldNames("tokens", "tokens")

    def examine(self, request: TokenIdsRequest) -> None:
        """Token ids within their limit."""
        if not request.tokens:
            raise InvalidInput("tokens: may not be empty")
        check_ids_together([request.tokens], "tokens", self.services.settings.limits)

    def check(self, request: TokenIdsRequest, entry: ModelEntry) -> list[InputItem]:
        """The ids."""
        return [InputItem(None, request.tokens)]

    def special(self, request: TokenIdsRequest) -> bool:
        """vLLM shows special tokens."""
        return True

    def write(self, request: TokenIdsRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """The text."""
        return [msgspec.json.encode(PromptText(results[0].decode()))]
