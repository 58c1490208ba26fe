"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.openapi.operation import JSON, Operation
from frontend.protocols.tei.info import Info
from frontend.protocols.tei.schemas import EmbedRequest, TextsRequest


class TeiError(msgspec.Struct):
    """An error in the form of TEI."""

    error: Annotated[str, Meta(description="What went wrong.")]
    error_type: Annotated[
        Literal["Backend", "Overloaded", "Unhealthy", "Validation"], Meta(description="Kind of the error.")
    ]


class TeiRank(msgspec.Struct):
    """A text at its rank."""

    index: Annotated[int, Meta(description="Place of the text in the request.")]
    score: Annotated[float, Meta(description="How well the text answers the query.")]
    text: Annotated[str | UnsetType, Meta(description="The text, with `return_text`.")] = UNSET


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (401, 403, 408, 413, 422, 424, 429, 500, 501, 503, 504), TeiError
)


def _asking(
    path: str, summary: str, body: type[msgspec.Struct], answer: Any, example: dict[str, Any]
) -> Operation:
    return Operation(
        "post",
        path,
        summary,
        "tei",
        body=body,
        answer=answer,
        errors=_FAULTS,
        error_code_header=False,
        request_media=(JSON,),
        timed=True,
        example=example,
    )


OPERATIONS = (
    _asking(
        "/embed",
        "Vectors of texts, in the form of TEI.",
        EmbedRequest,
        list[list[float]],
        {"inputs": ["first text", "second text"]},
    ),
    _asking(
        "/rerank",
        "Texts in the order in which they answer a query, in the form that `server.compatible` chooses.",
        TextsRequest,
        list[TeiRank],
        {"query": "a question", "texts": ["one", "two"]},
    ),
    Operation(
        "get",
        "/info",
        "The model of requests that name none, in the form of TEI.",
        "tei",
        answer=Info,
        errors=dict.fromkeys((401, 403, 424, 429), TeiError),
        error_code_header=False,
    ),
)
