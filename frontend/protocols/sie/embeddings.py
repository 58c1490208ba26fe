"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.engine.options import check_options, resolve
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.http.texts import check_count, check_texts
from frontend.protocols.sie import render
from frontend.protocols.sie.convert import check_dimensions, options_of, require_texts, usage_of
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.outputs import dense_of
from frontend.protocols.sie.schemas import EmbeddingsRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem, ModelStatus


def check_input(request: EmbeddingsRequest, limits: Limits) -> None:
    """Raise `InvalidInput` for an empty, mixed or over-long input."""
    given = _entries(request)
    if all(isinstance(entry, int) for entry in given):
        _check_ids(given, "input", limits)
        return
    check_count(len(given), "input", limits)
    if all(isinstance(entry, str) for entry in given):
        check_texts(given, "input[{}]", limits)
    elif all(isinstance(entry, list) for entry in given):
        for index, entry in enumerate(given):
            _check_ids(entry, f"input[{index}]", limits)
    else:
        raise InvalidInput("input: expected one kind of entry (str, int, or array of int), got a mix")


def inputs_of(request: EmbeddingsRequest) -> list[InputItem]:
    """One input per text or token list of a checked request."""
    given = _entries(request)
    if isinstance(given[0], int):
        return [InputItem(None, given)]
    return [InputItem(entry) if isinstance(entry, str) else InputItem(None, entry) for entry in given]


def _entries(request: EmbeddingsRequest) -> list[Any]:
    return [request.input] if isinstance(request.input, str) else request.input


def _check_ids(ids: list[int], where: str, limits: Limits) -> None:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")


@dataclass(frozen=True, slots=True)
class EmbeddingsPlan:
    """What to run and on which entry."""

    model: str
    call: EncodeCall


class EmbeddingsResource(InferenceResource[EmbeddingsRequest, EmbeddingsPlan]):
    """Dense vectors in the OpenAI form; always JSON."""

    operation = "embeddings"
    body = EmbeddingsRequest
    always_json = True

    def examine(self, request: EmbeddingsRequest) -> None:
        """A known encoding and overflow policy, and an input of one kind."""
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidInput(
                f"encoding_format: {request.encoding_format[:64]!r} is not one of float, base64"
            )
        check_input(request, self.services.settings.limits)
        check_options(options_of(request), _names(request))

    def check(self, request: EmbeddingsRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        require_texts(entry)
        return inputs_of(request)

    def plan(
        self,
        request: EmbeddingsRequest,
        entry: ModelEntry,
        inputs: list[InputItem],
        status: ModelStatus,
    ) -> EmbeddingsPlan:
        """A call for dense vectors with the options of the model's profile."""
        if "dense" not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no dense output")
        check_dimensions(request.dimensions, entry, status.dims.get("dense", 0), "dimensions")
        limits, names = self.services.settings.limits, _names(request)
        found = resolve(entry, options_of(request), None, self.services.catalog, len(inputs), limits, names)
        is_query = bool(found.options.get("is_query"))
        call = EncodeCall(
            inputs, ["dense"], found.instruction, is_query, found.options, found.overflow, found.lora, names
        )
        return EmbeddingsPlan(entry.id, call)

    async def render(
        self,
        reply: Answer,
        plan: EmbeddingsPlan,
        request: EmbeddingsRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        usage = usage_of(_tokens(plan.call.items, reply.tokens), reply.truncated)
        with reply:
            return await _body(reply, request, usage)


def _names(request: EmbeddingsRequest) -> FieldNames:
    single = isinstance(request.input, str) or isinstance(request.input[0], int)
    place = "input" if single else "input[{}]"
    return FieldNames(item=place, text=place, options="")


def _tokens(inputs: list[InputItem], tokens: list[int]) -> int:
    """True number of tokens: of ids the number sent, of texts what the tokenizer made, special tokens included."""
    return sum(
        len(item.ids) if item.ids is not None else used for item, used in zip(inputs, tokens, strict=True)
    )


async def _body(reply: Answer, request: EmbeddingsRequest, usage: dict[str, Any]) -> list[Buffer]:
    rows = (await dense_of(reply, "float32", request.dimensions)).quantized.values

    def entry_at(index: int) -> dict[str, Any]:
        vector = rows[index]
        if request.encoding_format == "base64":
            vector = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": vector}

    data = await render.json_array(len(rows), rows.shape[1] * rows.itemsize, entry_at)
    return [
        b'{"object":"list","data":',
        *data,
        b',"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(usage) + b"}",
    ]
