"""The operations of this build, those of the protocols and those of the server itself, and their OpenAPI document.

The tables of all protocols take as long to import as the rest of a frontend. A frontend imports this module at the
first request for the document.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus

import orjson

from frontend.openapi.document import document
from frontend.openapi.operation import HTML, JSON, TEXT, Operation, Parameter
from frontend.protocols.chat.operations import OPERATIONS as CHAT
from frontend.protocols.cohere.contract import OPERATIONS as COHERE
from frontend.protocols.foreign.shared_routes import OWNERS
from frontend.protocols.infinity.contract import OPERATIONS as INFINITY
from frontend.protocols.kserve_v2.operations import OPERATIONS as KSERVE
from frontend.protocols.messages.operations import OPERATIONS as MESSAGES
from frontend.protocols.ollama.operations import OPERATIONS as OLLAMA
from frontend.protocols.responses.operations import OPERATIONS as RESPONSES
from frontend.protocols.sie.operations import OPERATIONS as SIE
from frontend.protocols.sie.operations import ErrorResponse, faults
from frontend.protocols.tei.contract import OPERATIONS as TEI
from frontend.protocols.trtis_v1.operations import OPERATIONS as TRTIS
from frontend.protocols.vllm.contract import OPERATIONS as VLLM
from ipc.version import VERSION

_READY = Parameter("model", "query", "Ask for one model.")
SERVER = (
    Operation("get", "/", "Status page, or `OK`.", "server", media=(TEXT, HTML), closed=False),
    Operation("get", "/healthz", "Whether the process lives.", "server", media=(TEXT,), closed=False),
    Operation(
        "get",
        "/readyz",
        "Whether traffic is accepted; the second line of a 503 says why not.",
        "server",
        media=(TEXT,),
        errors={404: ErrorResponse, 503: None},
        parameters=(_READY,),
        closed=False,
    ),
    Operation(
        "get",
        "/ping",
        "The same as /readyz, under the name that SageMaker asks.",
        "server",
        media=(TEXT,),
        errors={404: ErrorResponse, 503: None},
        parameters=(_READY,),
        closed=False,
    ),
    Operation("get", "/livez", "Whether the process lives.", "server", media=(TEXT,), closed=False),
    Operation(
        "get",
        "/health",
        "`OK`; that this is a single server, for who asks for JSON.",
        "server",
        media=(TEXT, JSON),
        closed=False,
    ),
    Operation(
        "get",
        "/metrics",
        "Prometheus metrics of all processes.",
        "server",
        media=(TEXT,),
        errors=faults(401, 403, 429),
    ),
    Operation("get", "/openapi.json", "This document.", "server", closed=False),
    Operation("get", "/api-doc/openapi.json", "This document, under another name.", "server", closed=False),
    Operation("get", "/docs", "Swagger UI with this document.", "server", media=(HTML,), closed=False),
)


def operations() -> tuple[Operation, ...]:
    """All operations of this build."""
    return (
        *SIE,
        *COHERE,
        *CHAT,
        *RESPONSES,
        *MESSAGES,
        *TEI,
        *VLLM,
        *INFINITY,
        *OLLAMA,
        *KSERVE,
        *TRTIS,
        *SERVER,
    )


@cache
def schema() -> bytes:
    """The document as JSON. A path without a chosen server answers in the form of SIE."""
    unchosen = {path: {int(HTTPStatus.NOT_IMPLEMENTED): ErrorResponse} for path in OWNERS}
    return orjson.dumps(document(operations(), VERSION, unchosen), option=orjson.OPT_INDENT_2)
