"""The routes of this protocol for the API's description, one row each.

Names of models may hold slashes. Binary tensors, of which the schema knows nothing, are described in docs/kserve.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.openapi.operation import JSON, Operation, Parameter
from frontend.protocols.kserve_v2 import management, schemas

MODEL = "/v2/models/{model}"


class KserveError(msgspec.Struct):
    """An error."""

    error: Annotated[str, Meta(description="What went wrong.")]
    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    request_id: Annotated[str, Meta(description="Id of the request, as in the log.")]
    retryable: Annotated[bool, Meta(description="Whether the same request may succeed later.")]


class InferredOutput(msgspec.Struct):
    """One output: `data`, or the size of its bytes behind the JSON."""

    name: Annotated[str, Meta(description="The name.")]
    datatype: Annotated[str, Meta(description="Type of the elements.")]
    shape: Annotated[list[int], Meta(description="Sizes of the dimensions; -1: any.")]
    parameters: Annotated[dict[str, int] | msgspec.UnsetType, Meta(description="Options, by name.")] = (
        msgspec.UNSET
    )
    data: Annotated[list[Any] | msgspec.UnsetType, Meta(description="The elements in row-major order.")] = (
        msgspec.UNSET
    )


class InferResponse(msgspec.Struct):
    """The answer to an infer request."""

    id: Annotated[str, Meta(description="Id of what is told here.")]
    model_name: Annotated[str, Meta(description="Name of the model.")]
    model_version: Annotated[str, Meta(description="Version that answered.")]
    outputs: Annotated[list[InferredOutput], Meta(description="The outputs.")]


EMPTY: tuple[str, ...] = ()
"""Media types of an answer without a body."""
CLIENT_FAULTS = (400, 401, 403, 404, 408, 413, 429)
SERVER_FAULTS = (500, 501, 503, 504)
_LENGTH = Parameter(
    "Inference-Header-Content-Length",
    "header",
    "Bytes of JSON in front of binary tensors.",
    {"type": "integer", "minimum": 0},
)
_EXAMPLE = {"inputs": [{"name": "INPUT", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


def _operation(
    method: Literal["get", "post"],
    path: str,
    summary: str,
    tag: str,
    answer: type[msgspec.Struct] | None = None,
    **more: Any,
) -> Operation:
    faults = (*CLIENT_FAULTS, *SERVER_FAULTS)
    return Operation(
        method,
        path,
        summary,
        f"kserve {tag}",
        answer=answer,
        errors=dict.fromkeys(faults, KserveError),
        error_code_header=False,
        request_media=(JSON,),
        **more,
    )


def _for_versions(
    path: str, summary: str, tag: str, answer: type[msgspec.Struct] | None = None, **more: Any
) -> list[Operation]:
    """A GET of a model, and of one of its versions."""
    return [
        _operation("get", f"{MODEL}{version}{path}", summary, tag, answer, **more)
        for version in ("", "/versions/{version}")
    ]


def _inferring(path: str, summary: str, answer: type[msgspec.Struct] | None, **more: Any) -> list[Operation]:
    """A POST to a model, and to one of its versions."""
    return [
        _operation("post", f"{MODEL}{version}{path}", summary, "inference", answer, **more)
        for version in ("", "/versions/{version}")
    ]


def _shared_memory(kind: str, body: type[msgspec.Struct], region: type[msgspec.Struct]) -> list[Operation]:
    folder = f"/v2/{kind}sharedmemory"
    one, tag = f"{folder}/region/{{region}}", "shared memory"
    return [
        _operation("get", f"{folder}/status", "All regions.", tag, region, many=True),
        _operation("get", f"{one}/status", "One region.", tag, region, many=True),
        _operation("post", f"{one}/register", "Register a region.", tag, body=body, media=EMPTY),
        _operation("post", f"{one}/unregister", "Forget a region.", tag, media=EMPTY),
        _operation("post", f"{folder}/unregister", "Forget all regions of the kind.", tag, media=EMPTY),
    ]


def _settings(path: str, what: str) -> list[Operation]:
    return [
        _operation("get", path, f"Show {what}.", "settings"),
        _operation("post", path, f"Change {what}.", "settings"),
    ]


OPERATIONS: tuple[Operation, ...] = (
    _operation("get", "/v2", "Name, version and extensions.", "server", management.ServerMetadata),
    _operation(
        "get", "/v2/health/live", "Whether the process lives.", "server", management.Live, closed=False
    ),
    _operation(
        "get", "/v2/health/ready", "Whether requests are answered.", "server", management.Ready, closed=False
    ),
    *_for_versions("", "A model and its tensors.", "models", management.ModelMetadata),
    *_for_versions("/ready", "Whether a model answers.", "models", management.Ready),
    *_for_versions("/config", "The configuration of a model.", "models"),
    *_for_versions("/stats", "Statistics of a model.", "models", management.ModelsStatistics),
    _operation("get", "/v2/models/stats", "Statistics of all models.", "models", management.ModelsStatistics),
    *_inferring(
        "/infer",
        "Run a model over named tensors.",
        InferResponse,
        media=(JSON, "application/octet-stream"),
        body=schemas.Infer,
        parameters=(_LENGTH,),
        example=_EXAMPLE,
    ),
    *_inferring("/generate", "Run a model over plain JSON.", None),
    *_inferring("/generate_stream", "The same, as Server-Sent Events.", None, media=("text/event-stream",)),
    _operation(
        "post",
        "/v2/repository/index",
        "All models and their states.",
        "repository",
        management.IndexEntry,
        many=True,
        body=schemas.Index,
        body_required=False,
    ),
    *(
        _operation(
            "post",
            f"/v2/repository/models/{{model}}/{action}",
            summary,
            "repository",
            body=schemas.Control,
            body_required=False,
            media=EMPTY,
            retry_header=False,
        )
        for action, summary in (("load", "Load a model."), ("unload", "Begin to unload a model."))
    ),
    *_shared_memory("system", schemas.RegisterSystem, management.SystemRegion),
    *_shared_memory("cuda", schemas.RegisterCuda, management.CudaRegion),
    *_settings("/v2/logging", "what the server logs"),
    *_settings("/v2/trace/setting", "what is traced"),
    *_settings(f"{MODEL}/trace/setting", "what is traced of a model"),
    _operation(
        "get", "/v1/config", "States of all models, as OpenVINO Model Server shows them.", "repository"
    ),
    _operation(
        "post",
        "/v1/config/reload",
        "Read the model files again.",
        "repository",
        also={201: "Something was new."},
    ),
)
