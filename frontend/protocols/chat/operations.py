"""The routes of this protocol, one row each, and the answers that the API's description tells of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.generation.described import Usage, generating
from frontend.generation.errors import ErrorAnswer
from frontend.protocols.chat import management
from frontend.protocols.chat.chat import ChatRequest, ChatResource
from frontend.protocols.chat.completions import CompletionRequest, CompletionsResource
from frontend.protocols.chat.management import (
    ControlAnswer,
    Examination,
    ModelRequest,
    NotBuilt,
    OtherCategory,
    SystemInfo,
)
from frontend.routes import JSON, Need, Route
from frontend.services import Services

FOLDERS = ("/v1/chat", "/v1/images", "/v1/audio", "/v1/system", "/calibration")
"""Folders of the contract: unknown paths in them are refused in its form."""


class CalledFunctionInfo(msgspec.Struct):
    """Name and arguments of a call; the arguments are JSON text."""

    name: Annotated[str, Meta(description="The name.")]
    arguments: Annotated[str, Meta(description="The arguments as JSON text.")]


class ToolCall(msgspec.Struct):
    """A call of a function."""

    id: Annotated[str, Meta(description="Id of the call, to which the result of the tool refers.")]
    type: Annotated[Literal["function"], Meta(description="Kind of the tool.")]
    function: Annotated[CalledFunctionInfo, Meta(description="Name and arguments of a called function.")]


class AnswerMessage(msgspec.Struct):
    """What the model says, calls and thinks."""

    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[str | None, Meta(description="What is said: a text or parts.")]
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="Functions that the model calls.")]
    reasoning_content: Annotated[
        str | msgspec.UnsetType, Meta(description="What the model thought before its answer.")
    ] = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice of an answer."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    finish_reason: Annotated[
        Literal["stop", "length", "tool_calls", "canceled"], Meta(description="Why the text ended.")
    ]
    message: Annotated[AnswerMessage, Meta(description="What is said.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities of the tokens.")]
    stop_sequence: Annotated[
        str | msgspec.UnsetType, Meta(description="The stop text that ended the answer.")
    ] = msgspec.UNSET


class ChatAnswer(msgspec.Struct):
    """A whole answer to a conversation."""

    id: Annotated[str, Meta(description="Id of the answer: `chatcmpl-` and 32 digits.")]
    object: Annotated[Literal["chat.completion"], Meta(description="Names the form of this object.")]
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    system_fingerprint: Annotated[str, Meta(description="Always `local`.")]
    choices: Annotated[list[ChatChoice], Meta(description="The texts, by their index.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]


class CompletionChoice(msgspec.Struct):
    """One choice of a completion."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    text: Annotated[str, Meta(description="The text.")]
    finish_reason: Annotated[str, Meta(description="Why the text ended.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities of the tokens.")]


class CompletionAnswer(msgspec.Struct):
    """A whole completion."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    object: Annotated[Literal["text_completion"], Meta(description="Names the form of this object.")]
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    system_fingerprint: Annotated[str, Meta(description="Always `local`.")]
    choices: Annotated[list[CompletionChoice], Meta(description="The texts, by their index.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]


def _control(
    path: str, act: management.Act, summary: str, need: Need, switch: Literal["", "admin"] = ""
) -> Route:
    errors: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
        (401, 403, 408, 413, 415, 422, 429), ErrorAnswer
    )
    return Route(
        "post",
        path,
        lambda services: management.ControlResource(services, act),
        summary,
        "models",
        body=ModelRequest,
        answer=ControlAnswer,
        errors={**errors, 400: (ControlAnswer, ErrorAnswer), 404: ControlAnswer},
        error_code_header=False,
        request_media=(JSON,),
        example={"model_id": "Qwen/Qwen3-0.6B"},
        need=need,
        switch=switch,
    )


def _system(
    method: Literal["get", "post"], path: str, resource: Any, summary: str, answer: type[msgspec.Struct]
) -> Route:
    errors: dict[int, type[msgspec.Struct] | None] = dict.fromkeys((401, 403, 429), ErrorAnswer)
    return Route(
        method,
        path,
        resource,
        summary,
        "system",
        answer=answer,
        errors=errors,
        error_code_header=False,
        need="admin",
    )


def _not_built(feature: str, *paths: str) -> Iterator[Route]:
    """Paths of a feature that is not built."""

    def resource(services: Services) -> NotBuilt:
        return NotBuilt(feature)

    for path in paths:
        yield Route("get", path, resource)
        yield Route("post", path, resource)


ROUTES = (
    generating(
        "/v1/chat/completions",
        ChatResource,
        "Continue a conversation, in the form of OpenAI.",
        "chat",
        ChatRequest,
        ChatAnswer,
        {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
    ),
    generating(
        "/v1/completions",
        CompletionsResource,
        "Continue texts, in the form of OpenAI.",
        "chat",
        CompletionRequest,
        CompletionAnswer,
        {"model": "default", "prompt": "Once upon a time", "max_tokens": 64},
    ),
    _control(
        "/v1/models/unload", management.unload, "Take a generating model out of memory.", "admin", "admin"
    ),
    _control(
        "/v1/models/reload",
        management.reload,
        "Load a generating model; a recorded failure is forgotten.",
        "admin",
        "admin",
    ),
    _control("/v1/models/status", management.status, "In which state a generating model is.", "infer"),
    _system("get", "/v1/system/info", management.InfoResource, "What this machine is.", SystemInfo),
    _system(
        "post",
        "/v1/system/doctor",
        management.DoctorResource,
        "Whether the server can do its work.",
        Examination,
    ),
    Route("post", "/v1/images/generations", lambda _: OtherCategory("pictures")),
    Route("post", "/v1/audio/speech", lambda _: OtherCategory("speech")),
    *_not_built("tuning by request", "/v1/models/tune"),
    *_not_built("quantizing a loaded model again", "/re_isq"),
    *_not_built("calibration", "/calibration/start", "/calibration/status", "/calibration/apply"),
    *_not_built("loading LoRA adapters by name", "/v1/load_lora_adapter"),
    *_not_built("unloading LoRA adapters by name", "/v1/unload_lora_adapter"),
    *_not_built("LoRA adapters of generating models", "/v1/lora_adapters"),
)
