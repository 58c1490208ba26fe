"""All operations of this build: those of the protocols, and those of the server itself."""

from __future__ import annotations

from functools import cache

import orjson

from frontend.openapi.document import document
from frontend.openapi.operation import HTML, JSON, TEXT, Operation, Parameter
from frontend.protocols.kserve_v2.operations import OPERATIONS as KSERVE
from frontend.protocols.sie.answers import ErrorResponse
from frontend.protocols.sie.operations import OPERATIONS as SIE
from frontend.protocols.sie.operations import faults
from frontend.protocols.trtis_v1.operations import OPERATIONS as TRTIS
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
    Operation("get", "/docs", "The page that shows this document.", "server", media=(HTML,), closed=False),
)


def operations() -> tuple[Operation, ...]:
    """All of them."""
    return (*SIE, *KSERVE, *TRTIS, *SERVER)


@cache
def schema() -> bytes:
    """The document as JSON."""
    return orjson.dumps(document(operations(), VERSION), option=orjson.OPT_INDENT_2)
