"""Request bodies of the SIE contract, decoded and validated in one step.

Types are strict, null equals absent, unknown fields are ignored at every level. msgpack-numpy maps inside unknown
fields are skipped like any other value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from frontend.http.decoding import Key, decode, refuse_repeated
from frontend.http.rendering import off_loop
from frontend.http.values import UNCHECKED_NBYTES, check_values
from ipc.settings import Limits

Text = str | None
Keys = tuple[Sequence[Key], Sequence[tuple[Key, int]]]


class Body(Protocol):
    """A whole request."""

    def keys(self) -> Keys:
        """Names of fields that may occur once, and others with how often they may, for `refuse_repeated`."""


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
    """Parameters of an encode request; `asks` reads `item_errors` and `warnings`."""

    output_types: list[str] | None = None
    output_dtype: Text = None
    instruction: Text = None
    is_query: bool | None = None
    options: dict[str, Any] | None = None
    item_errors: bool | None = None
    warnings: bool | None = None


class AdminRequest(msgspec.Struct):
    """Body of POST /v1/admin/load and /v1/admin/unload."""

    wait: bool | None = None

    def keys(self) -> Keys:
        """The one field."""
        return (Key("wait"),), ()


class EncodeRequest(msgspec.Struct):
    """Body of POST /v1/encode."""

    items: list[Item]
    params: EncodeParams | None = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts(self.items)
        once = _ENCODE_KEYS if self.params is None else _ENCODE_KEYS + _PARAMS_KEYS
        return once, ((_ID, ids), (_TEXT, texts))


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
    overflow_policy: Text = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _EMBEDDINGS_KEYS, ()


class ScoreRequest(msgspec.Struct):
    """Body of POST /v1/score: everything at top level."""

    query: Item
    items: list[Item]
    instruction: Text = None
    options: dict[str, Any] | None = None
    warnings: bool | None = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts((self.query, *self.items))
        return _SCORE_KEYS, ((_ID, ids), (_TEXT, texts))


class ExtractParams(msgspec.Struct):
    """Parameters of an extract request."""

    labels: list[str] | None = None
    output_schema: dict[str, Any] | None = None
    instruction: Text = None
    options: dict[str, Any] | None = None
    item_errors: bool | None = None
    warnings: bool | None = None


class ExtractRequest(msgspec.Struct):
    """Body of POST /v1/extract."""

    items: list[Item]
    params: ExtractParams | None = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts(self.items)
        once = _ENCODE_KEYS if self.params is None else _ENCODE_KEYS + _EXTRACT_KEYS
        return once, ((_ID, ids), (_TEXT, texts))


class RerankRequest(msgspec.Struct):
    """Body of POST /v1/rerank, in the form of Cohere and Jina."""

    model: str
    query: str
    documents: list[str | dict[str, Any]]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    overflow_policy: Text = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _RERANK_KEYS, ((_TEXT, sum(isinstance(document, dict) for document in self.documents)),)


B = TypeVar("B", bound=Body)
_ID, _TEXT = Key("id"), Key("text")
_ENCODE_KEYS = (Key("items"), Key("params"))
_ASKED = ("instruction", "options", "profile", "item_errors", "warnings")
_PARAMS_KEYS = tuple(map(Key, (*_ASKED, "output_types", "output_dtype", "dimensions", "is_query")))
_EXTRACT_KEYS = tuple(map(Key, (*_ASKED, "labels", "output_schema", "threshold", "overflow_policy")))
_SCORE_KEYS = tuple(
    map(
        Key,
        ["query", "items", "instruction", "options", "profile", "score_mode", "score_weights", "warnings"],
    )
)
_RERANK_KEYS = tuple(
    map(Key, ("model", "query", "documents", "top_n", "return_documents", "overflow_policy"))
)
_EMBEDDINGS_KEYS = tuple(map(Key, ("model", "input", "encoding_format", "dimensions", "overflow_policy")))


def read(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """Decode a body as msgpack or JSON by its content type. Raises `InvalidInput` with the JSON path of the fault."""
    lowered = (content_type or "").lower()
    binary = "application/msgpack" in lowered or "application/x-msgpack" in lowered
    check_values(body, binary, limits.max_items)
    decoded = decode(body, kind, binary=binary)
    refuse_repeated(body, *decoded.keys(), binary=binary)
    return decoded


async def read_aside(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """`read`; a large body in a rendering thread, where it holds up other requests only while it is decoded.

    NOTE: the decoder keeps the interpreter to itself: about 2 ms for each MiB of plain text, 4 ms where all is escaped.
    """
    if len(body) <= UNCHECKED_NBYTES:
        return read(body, content_type, kind, limits)
    return await off_loop(read, body, content_type, kind, limits)


def _counts(items: Iterable[Item]) -> tuple[int, int]:
    """How many ids and texts `items` have."""
    ids = texts = 0
    for item in items:
        ids += item.id is not None
        texts += item.text is not None
    return ids, texts
