"""Request bodies of the SIE contract, decoded and validated in one step.

Types are strict, null equals absent, unknown fields are ignored at every level. msgpack-numpy maps inside unknown
fields are skipped like any other value.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from frontend.decoding import Key, decode, refuse_repeated
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
_ID, _TEXT = Key("id"), Key("text")
_ENCODE_KEYS = (Key("items"), Key("params"))
_PARAMS_KEYS = tuple(
    map(Key, ("output_types", "output_dtype", "instruction", "options", "profile", "dimensions", "is_query"))
)
_EMBEDDINGS_KEYS = tuple(map(Key, ("model", "input", "encoding_format", "dimensions")))


def read(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """Decode a body as msgpack or JSON by its content type. Raises `InvalidInput` with the JSON path of the fault."""
    lowered = (content_type or "").lower()
    binary = "application/msgpack" in lowered or "application/x-msgpack" in lowered
    check_values(body, binary, limits.max_items)
    decoded = decode(body, kind, binary=binary)
    if isinstance(decoded, EncodeRequest):
        _refuse_repeated_in_encode(body, decoded, binary)
    else:
        refuse_repeated(body, _EMBEDDINGS_KEYS, binary=binary)
    return decoded


def _refuse_repeated_in_encode(body: bytes, request: EncodeRequest, binary: bool) -> None:
    once = _ENCODE_KEYS if request.params is None else _ENCODE_KEYS + _PARAMS_KEYS
    ids = texts = 0
    for item in request.items:
        ids += item.id is not None
        texts += item.text is not None
    refuse_repeated(body, once, ((_ID, ids), (_TEXT, texts)), binary=binary)
