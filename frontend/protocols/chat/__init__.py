"""Chat and plain completions in the form of OpenAI, and the control of models and the system beside them.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from frontend.generation.errors import ErrorAnswer, generating
from frontend.generation.protocol import TextProtocol
from frontend.protocols.chat import adapters, management
from frontend.protocols.chat.chat import PROTOCOL, ChatRequest, ChatResource
from frontend.protocols.chat.completions import CompletionAnswer, CompletionRequest, CompletionsResource
from frontend.protocols.chat.management import (
    ControlAnswer,
    Examination,
    ModelRequest,
    NotBuilt,
    OtherCategory,
    SystemInfo,
)
from frontend.protocols.chat.mcp import McpResource
from frontend.protocols.chat.output import ChatAnswer
from frontend.route_rows import JSON, MCP, TEXT, Need, Route
from frontend.services import Services

FOLDERS = ("/v1/chat", "/v1/images", "/v1/audio", "/v1/system", "/calibration")
"""Folders of the contract: unknown paths in them are refused in its form."""


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


def _adapter_change(
    path: str, resource: Any, summary: str, body: type[msgspec.Struct], example: dict[str, Any]
) -> Route:
    statuses = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 502, 503, 504)
    return Route(
        "post",
        path,
        resource,
        summary,
        "models",
        body=body,
        answer_text="A line that says what was done.",
        media=(TEXT,),
        errors=dict.fromkeys(statuses, ErrorAnswer),
        error_code_header=False,
        request_media=(JSON,),
        example=example,
        need="admin",
        switch="admin",
    )


def _not_built(feature: str, *paths: str) -> Iterator[Route]:
    """Paths of a feature that is not built."""

    def resource(services: Services) -> NotBuilt:
        return NotBuilt(feature)

    for path in paths:
        yield Route("get", path, resource)
        yield Route("post", path, resource)


_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQV"
    "R42mM4ISdHEmIY1TCqYfhqAADkYgQQ6ZuA8QAAAABJRU5ErkJggg=="
)
"""A red square."""
ROUTES = (
    generating(
        "/v1/chat/completions",
        ChatResource,
        "Continue a conversation, in the form of OpenAI.",
        "chat",
        ChatRequest,
        ChatAnswer,
        {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
        variants={
            "picture": {
                "model": "default",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": _PICTURE}},
                            {"type": "text", "text": "Which colour is this?"},
                        ],
                    }
                ],
                "max_tokens": 64,
            }
        },
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
    Route("post", MCP, McpResource, switch="mcp_port"),
    Route("post", "/v1/images/generations", lambda _: OtherCategory("pictures")),
    Route("post", "/v1/audio/speech", lambda _: OtherCategory("speech")),
    *_not_built("tuning by request", "/v1/models/tune"),
    *_not_built("quantizing a loaded model again", "/re_isq"),
    *_not_built("calibration", "/calibration/start", "/calibration/status", "/calibration/apply"),
    _adapter_change(
        "/v1/load_lora_adapter",
        adapters.LoadAdapterResource,
        "Load a LoRA adapter of a generating model.",
        adapters.LoadAdapterRequest,
        {"lora_name": "legal", "lora_path": "legal"},
    ),
    _adapter_change(
        "/v1/unload_lora_adapter",
        adapters.UnloadAdapterResource,
        "Unload a LoRA adapter that a request has loaded.",
        adapters.UnloadAdapterRequest,
        {"lora_name": "legal"},
    ),
    Route(
        "get",
        "/v1/lora_adapters",
        adapters.AdaptersResource,
        "The LoRA adapters of generating models.",
        "models",
        answer=adapters.AdapterList,
        errors=dict.fromkeys((401, 403, 429), ErrorAnswer),
        error_code_header=False,
    ),
)


class ChatProtocol(TextProtocol):
    """Routes of chat and completions."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES, FOLDERS)
