"""Request bodies of the SIE contract, decoded and validated in one step.

Types are strict, null equals absent, unknown fields are ignored at every level. msgpack-numpy maps inside unknown
fields are skipped like any other value.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from frontend.decoding import decode, refuse_repeated
from frontend.values import check_values
from ipc.settings import Limits

Text = str | None


class Media(msgspec.Struct):
    """Bytes with a format hint, for images, audio, video and documents."""

    data: bytes | None = None
    format: Text = None


class Item(msgspec.Struct):
    """One input; all fields are optional."""

    id: Text = None
    text: Text = None
    images: list[Media] | None = None
    audio: Media | None = None
    video: Media | None = None
    document: Media | None = None
    metadata: dict[str, Any] | None = None


class EncodeParams(msgspec.Struct):
    """Parameters of an encode request."""

    output_types: list[str] | None = None
    output_dtype: Text = None
    instruction: Text = None
    options: dict[str, Any] | None = None


class EncodeRequest(msgspec.Struct):
    """Body of POST /v1/encode."""

    items: list[Item]
    params: EncodeParams | None = None


class EmbeddingsRequest(msgspec.Struct):
    """Body of POST /v1/embeddings, in the OpenAI form."""

    model: str
    input: (
        str
        | list[
            Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
            | str
            | list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
        ]
    )
    encoding_format: Text = None
    dimensions: int | None = None
    user: Text = None


B = TypeVar("B")
_ONCE: dict[type, tuple[str, ...]] = {
    EncodeRequest: (
        "items",
        "params",
        "output_types",
        "output_dtype",
        "instruction",
        "options",
        "profile",
        "dimensions",
        "is_query",
    ),
    EmbeddingsRequest: ("model", "input", "encoding_format", "dimensions", "user"),
}


def read(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """Decode a body as msgpack or JSON by its content type. Raises `InvalidInput` with the JSON path of the fault."""
    lowered = (content_type or "").lower()
    binary = "application/msgpack" in lowered or "application/x-msgpack" in lowered
    check_values(body, binary, limits.max_items)
    decoded = decode(body, kind, binary=binary)
    allowed = dict.fromkeys(_ONCE[kind], 1)
    if isinstance(decoded, EncodeRequest):
        allowed["id"] = sum(item.id is not None for item in decoded.items)
        allowed["text"] = sum(item.text is not None for item in decoded.items)
    refuse_repeated(body, allowed, binary=binary)
    return decoded
