"""The routes of vLLM beside the routes of OpenAI: vectors, classes, scores and tokens.

1. POST /pooling: one vector for each input, or one for each token, whichever the model has.
2. POST /classify: the likeliest class of each text, and the probabilities of all classes.
3. POST /score, /v1/score and /rerank: how well texts answer another text, in their order or best first.
4. POST /tokenize and /detokenize: a text to its tokens, and token ids to their text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.protocols.foreign.scoring import (
    ClassesPlan,
    ClassifyResource,
    ScoreBody,
    TextRankingResource,
    TextScoringResource,
    classes_of,
)
from frontend.protocols.foreign.tokens import (
    TokensPlan,
    TokensResource,
    check_ids_together,
    check_texts_together,
)
from frontend.protocols.sie.encode import VectorsResource, Wishes
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import check_inputs, inputs_of
from frontend.protocols.sie.render import base64_of, json_list
from frontend.protocols.sie.score import Pairs
from frontend.protocols.vllm.contract import (
    ClassifyRequest,
    DocumentsRequest,
    PairScoreRequest,
    PoolingRequest,
    PromptRequest,
    TokenIdsRequest,
)
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput, NoReplica
from ipc.wire import tokens
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, GenerateCall, InputItem, ModelStatus, ScoreCall


def envelope(kind: str, scope: RequestScope) -> dict[str, Any]:
    """What an answer begins with."""
    identity = f"{kind}-{random.getrandbits(128):032x}"
    return {"id": identity, "object": "list", "created": int(time.time()), "model": scope.model}


def usage_of(reply: Answer) -> dict[str, Any]:
    """Tokens of a request."""
    used = sum(reply.tokens)
    return {
        "prompt_tokens": used,
        "total_tokens": used,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def around(kind: str, scope: RequestScope, data: list[bytes], reply: Answer) -> list[bytes]:
    """The body around a list that is JSON already."""
    head = orjson.dumps(envelope(kind, scope))[:-1] + b',"data":'
    return [head, *data, b',"usage":' + orjson.dumps(usage_of(reply)) + b"}"]


_OUTPUTS = {"embed": "dense", "token_embed": "multivector"}


class PoolingResource(VectorsResource[PoolingRequest]):
    """Vectors in the order of the inputs."""

    operation = "pooling"
    body = PoolingRequest

    def model_of(self, request: PoolingRequest) -> str:
        """The model that the request names, else the model that has the output."""
        outputs = (_OUTPUTS[request.task],) if request.task else tuple(_OUTPUTS.values())
        return model_named(request, self.services.catalog, self.services.settings, outputs)

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
            write = base64_of if request.encoding_format == "base64" else np.asarray
            entries = (
                {"index": index, "object": "pooling", "data": write(vector)}
                for index, vector in enumerate(vectors)
            )
            return around("pool", scope, await json_list(entries, values.nbytes), reply)


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
        found = await classes_of(reply)
        if any({one.label for one in classes} != set(plan.labels) for classes in found):
            raise NoReplica(f"model '{plan.model}' was replaced by another during this request")
        entries = (
            {
                "index": index,
                "label": classes[0].label,
                "probs": [scores[label] for label in plan.labels],
                "num_classes": len(plan.labels),
            }
            for index, classes in enumerate(found)
            for scores in ({one.label: one.score for one in classes},)
        )
        nbytes = _NUMBER_NBYTES * sum(map(len, found))
        return around("classify", scope, await json_list(entries, nbytes), reply)


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
    entries = "data"

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
    ) -> dict[str, Any]:
        """`data` with a score for each text."""
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())
        ]
        return {**envelope("score", scope), "data": data, "usage": usage_of(reply)}


class DocumentsResource(_CuttingResource[DocumentsRequest], TextRankingResource[DocumentsRequest]):
    """Documents best first, each with its text."""

    body = DocumentsRequest
    entries = "results"

    def entry(self, index: int, score: float, text: str | None) -> dict[str, Any]:
        """Index, document and score."""
        return {"index": index, "document": {"text": text}, "relevance_score": score}

    def around(self, best: list[dict[str, Any]], scope: RequestScope, reply: Answer) -> dict[str, Any]:
        """`results` beside id, model and usage."""
        used = sum(reply.tokens)
        return {
            "id": f"rerank-{random.getrandbits(128):032x}",
            "model": scope.model,
            "usage": {"prompt_tokens": used, "total_tokens": used},
            "results": best,
        }


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
        body = {
            "count": len(read.ids),
            "max_model_len": plan.longest,
            "tokens": read.ids,
            "token_strs": strings,
        }
        return [orjson.dumps(body)]


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
        return [orjson.dumps({"prompt": results[0].decode()})]
