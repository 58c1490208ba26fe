"""The routes of this protocol for the API's description, one row each. Routes that only say no are left out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from frontend.generation.described import ErrorAnswer, Usage, generating
from frontend.openapi.operation import JSON, Operation
from frontend.protocols.chat.chat_requests import ChatRequest
from frontend.protocols.chat.completion_requests import CompletionRequest
from frontend.protocols.chat.control import ControlAnswer, ModelRequest


class CalledFunctionInfo(msgspec.Struct):
    """Name and arguments of a call; the arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunctionInfo


class AnswerMessage(msgspec.Struct):
    """What the model says, calls and thinks."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice of an answer."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "canceled"]
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    stop_sequence: str | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct):
    """A whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct):
    """One choice of a completion."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None


class CompletionAnswer(msgspec.Struct):
    """A whole completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


def _control(path: str, summary: str, *also: int) -> Operation:
    errors: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
        (401, 403, 408, 413, 415, 422, 429, *also), ErrorAnswer
    )
    return Operation(
        "post",
        path,
        summary,
        "models",
        body=ModelRequest,
        answer=ControlAnswer,
        errors={**errors, 400: (ControlAnswer, ErrorAnswer), 404: ControlAnswer},
        error_code_header=False,
        request_media=(JSON,),
        example={"model_id": "Qwen/Qwen3-0.6B"},
    )


class SystemInfo(msgspec.Struct):
    """Facts of the machine, of the workers' devices, and of the build."""

    os: str
    kernel: str
    cpu: dict[str, Any]
    memory: dict[str, int]
    devices: list[dict[str, Any]]
    build: dict[str, str]
    hf_cache_path: str


class Check(msgspec.Struct):
    """One check; `suggestion` says what to do."""

    name: str
    status: Literal["ok", "warn", "error"]
    message: str
    suggestion: str | msgspec.UnsetType = msgspec.UNSET


class Examination(msgspec.Struct):
    """Facts, and all checks."""

    system: SystemInfo
    checks: list[Check]


def _system(
    method: Literal["get", "post"], path: str, summary: str, answer: type[msgspec.Struct]
) -> Operation:
    errors: dict[int, type[msgspec.Struct] | None] = dict.fromkeys((401, 403, 429), ErrorAnswer)
    return Operation(method, path, summary, "system", answer=answer, errors=errors, error_code_header=False)


OPERATIONS = (
    generating(
        "/v1/chat/completions",
        "Continue a conversation, in the form of OpenAI.",
        "chat",
        ChatRequest,
        ChatAnswer,
        {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
    ),
    generating(
        "/v1/completions",
        "Continue texts, in the form of OpenAI.",
        "chat",
        CompletionRequest,
        CompletionAnswer,
        {"model": "default", "prompt": "Once upon a time", "max_tokens": 64},
    ),
    _control("/v1/models/unload", "Take a generating model out of memory."),
    _control("/v1/models/reload", "Load a generating model; a recorded failure is forgotten."),
    _control("/v1/models/status", "In which state a generating model is."),
    _system("get", "/v1/system/info", "What this machine is.", SystemInfo),
    _system("post", "/v1/system/doctor", "Whether the server can do its work.", Examination),
)
