"""The routes of this contract for the schema, one row each.

Bodies are raw tensors and protobuf messages, which JSON Schema cannot describe, most without a media type;
docs/trtis.md describes them.
"""

from __future__ import annotations

from typing import Any

from frontend.openapi.operation import Operation, Parameter
from frontend.protocols.trtis_v1.management import MODES

OCTETS = "application/octet-stream"
_FORMAT = Parameter(
    "format",
    "query",
    "`binary`: messages in the wire format instead of text; `json`, but for infer: as JSON.",
)
_REQUEST = Parameter("NV-InferRequest", "header", "InferRequestHeader as protobuf text, on one line.")
_ID = Parameter("X-Request-ID", "header", "Id to echo and log.")


def _get(path: str, summary: str, *parameters: Parameter, **more: Any) -> Operation:
    return Operation(
        "get",
        path,
        summary,
        "trtis v1",
        media=(),
        errors={400: None},
        error_media=(),
        parameters=(_ID, *parameters),
        error_code_header=False,
        **more,
    )


def _post(path: str, summary: str, *parameters: Parameter, media: tuple[str, ...] = ()) -> Operation:
    return Operation(
        "post",
        path,
        summary,
        "trtis v1",
        media=media,
        errors={400: None, 401: None, 403: None, 429: None},
        error_media=(),
        parameters=(_ID, *parameters),
        error_code_header=False,
    )


OPERATIONS = (
    _get("/api/health", "Answers 400: the mode is missing."),
    _get(
        "/api/health/{mode}",
        "Whether the server is live or ready; the HTTP status is the answer.",
        closed=False,
        choices={"mode": MODES},
    ),
    _get("/api/status", "The server and all its models, a ServerStatus.", _FORMAT),
    _get("/api/status/{model}", "The server and one model, a ServerStatus.", _FORMAT),
    _post(
        "/api/infer/{target}",
        "Inference: `MODEL` by the latest version that is ready, `MODEL/VERSION` by this version.",
        _REQUEST,
        _FORMAT,
        media=(OCTETS,),
    ),
    _get("/api/profile", "Answers 400: profiling is not offered."),
    _post("/api/modelcontrol/load/{model}", "Load a model and wait for it."),
    _post("/api/modelcontrol/unload/{model}", "Begin to unload a model."),
    _get("/api/repository/index", "Names of all models.", _FORMAT),
    _get("/api/sharedmemorycontrol/status", "All shared memory regions.", _FORMAT),
    _post("/api/sharedmemorycontrol/{rest}", "Register or unregister a shared memory region."),
)
"""All operations of this contract."""
