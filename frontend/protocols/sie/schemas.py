"""Request bodies of the SIE contract, decoded and validated in one step.

Types are strict, null equals absent, unknown fields are ignored at every level. msgpack-numpy maps inside unknown
fields are skipped like any other value.

msgspec limits the depth. The search for repeated keys runs only if a key name occurs too often in the bytes, or may be
spelled with escapes, since a full check costs more than the decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from frontend.engine.answer import OUTPUT_DTYPES
from frontend.http.fields import (
    UNCHECKED_NBYTES,
    check_values,
    count,
    fault_of,
    mismatch_of,
    one_of,
    stray_byte,
    without_long_values,
)
from frontend.http.threads import off_loop
from frontend.protocols.sie.inputs import Inputs, MediaInput, key_counts
from ipc.catalog.entries import ENCODE_OUTPUTS
from ipc.catalog.option_names import OVERFLOW_POLICIES
from ipc.decoding import learnt
from ipc.errors import InvalidInput
from ipc.settings import Limits

T = TypeVar("T")

# Keys hold a to z and _, which writers do not escape; a key that is spelled so would not be found by its bytes.
_ESCAPED_KEY = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")


@lru_cache(maxsize=64)
def _decoder(kind: Any, binary: bool) -> Any:
    learnt(kind)
    return msgspec.msgpack.Decoder(kind) if binary else msgspec.json.Decoder(kind)


def decode(body: bytes, kind: type[T], *, binary: bool) -> T:
    """Decode `body` into `kind`. Raises `InvalidInput` whose message holds the decoder's reason and JSON path."""
    form = "msgpack" if binary else "JSON"
    if not body:
        raise InvalidInput(f"body: empty, expected {form}")
    try:
        decoded: T = _decoder(kind, binary).decode(body)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise InvalidInput(f"body: {mismatch_of(error, kind)}") from None
    except RecursionError as error:
        raise InvalidInput(f"body: {form} is nested too deeply") from error
    except (msgspec.DecodeError, ValueError, OverflowError, MemoryError) as error:
        fault = "" if binary else fault_of(body)
        raise InvalidInput(fault or f"body: malformed {form}: {str(error)[:200]}") from error
    if fault := stray_byte(body, binary):
        raise InvalidInput(fault)
    return decoded


class Key:
    """A field's name as its bytes may lie in a body."""

    __slots__ = ("json", "name", "spellings")

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.json = b'"' + self.name + b'"'
        size = len(self.name)
        headers = (
            bytes([0xA0 | size]),
            *(head + bytes([size]) for head in (b"\xd9", b"\xda\0", b"\xdb\0\0\0")),
        )
        self.spellings = tuple(header + self.name for header in headers)

    def occurs_more(self, body: bytes, times: int, binary: bool) -> bool:
        """Whether the name may occur as a key more than `times`."""
        if not binary:
            return count(body, self.json, times) > times
        if count(body, self.name, times) <= times:
            return False
        return sum(count(body, spelling, times) for spelling in self.spellings) > times


def refuse_repeated(
    body: bytes, once: Sequence[Key], often: Sequence[tuple[Key, int]] = (), *, binary: bool
) -> None:
    """Raise `InvalidInput` for a key that occurs twice in one object.

    Keys in `once` belong to one object, those in `often` to as many objects as their number says. A body in which none
    occurs more often than that is taken to be without repetition.
    """
    names = without_long_values(body, binary)
    suspicious = not binary and b"\\u00" in names and _ESCAPED_KEY.search(names) is not None
    suspicious = suspicious or any(key.occurs_more(names, 1, binary) for key in once)
    if suspicious or any(key.occurs_more(names, times, binary) for key, times in often):
        _refuse_duplicates(body, binary)


def _refuse_duplicates(body: bytes, binary: bool) -> None:
    def check(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidInput(f"body: key {str(key)[:64]!r} occurs twice in one object")
            seen.add(key)
        return dict(pairs)

    try:
        if binary:
            msgpack.unpackb(body, object_pairs_hook=check, strict_map_key=False, raw=False)
        else:
            json.loads(body, object_pairs_hook=check)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput("body: repeated keys could not be ruled out") from error


Text = str | None


@lru_cache(maxsize=64)
def keys_of(kind: type[msgspec.Struct]) -> tuple[Key, ...]:
    """Names of all fields of a body."""
    return tuple(map(Key, kind.__struct_fields__))


class FlatBody(msgspec.Struct, kw_only=True):
    """Base of bodies of which only the fields at the top are searched for repetitions."""

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return keys_of(type(self)), ()


ModelName = Annotated[str, Meta(description="Name of a model, or `name:profile`.")]
InputType = Literal["query", "document", "passage", "search_query", "search_document"]
ENCODINGS = ("float", "base64")
OverflowPolicy = Annotated[Text, one_of(OVERFLOW_POLICIES, "What happens to a text that is too long.")]
Keys = tuple[Sequence[Key], Sequence[tuple[Key, int]]]


class Body(Protocol):
    """A whole request."""

    def keys(self) -> Keys:
        """Names of fields that may occur once, and others with how often they may, for `refuse_repeated`."""


class Media(msgspec.Struct):
    """Bytes with a format hint, for images, audio, video and documents."""

    data: Annotated[bytes | None, Meta(description="The bytes, in base64 where the body is JSON.")] = None
    format: Annotated[Text, Meta(description="Type of the picture: png, jpeg, webp.")] = None


class Item(msgspec.Struct):
    """One input; all fields are optional."""

    id: Annotated[
        Text, Meta(description="Id that the client gives the item; the result has the same id.")
    ] = None
    text: Annotated[Text, Meta(description="The text of the item.")] = None
    images: Annotated[list[Media] | None, Meta(description="Pictures of the item.")] = None
    audio: Annotated[Media | None, Meta(description="Not built.")] = None
    video: Annotated[Media | None, Meta(description="Not built.")] = None
    document: Annotated[Media | None, Meta(description="The document.")] = None
    metadata: Annotated[
        dict[str, Any] | None, Meta(description="Values of the caller, which nothing reads.")
    ] = None


class EncodeParams(msgspec.Struct):
    """Parameters of an encode request; `asks` reads `item_errors` and `warnings`."""

    output_types: Annotated[
        list[Annotated[str, one_of(ENCODE_OUTPUTS, required=True)]] | None,
        Meta(description="The outputs: dense, sparse, multivector, score."),
    ] = None
    output_dtype: Annotated[
        Annotated[Text, one_of(OUTPUT_DTYPES)], Meta(description="Type of the numbers.")
    ] = None
    instruction: Annotated[
        Text, Meta(description="What the model should do, for models that read an instruction.")
    ] = None
    is_query: Annotated[bool | None, Meta(description="Whether the items are queries; else documents.")] = (
        None
    )
    options: Annotated[
        dict[str, Any] | None, Meta(description="Options of the model and of the request, by name.")
    ] = None
    item_errors: Annotated[bool | None, Meta(description="Answer the other items when one fails.")] = None
    warnings: Annotated[bool | None, Meta(description="Tell options that are not used.")] = None


class AdminRequest(FlatBody, kw_only=True):
    """Body of POST /v1/admin/load and /v1/admin/unload."""

    wait: Annotated[bool | None, Meta(description="Answer when the model is loaded.")] = None


class EncodeRequest(msgspec.Struct):
    """Body of POST /v1/encode."""

    items: Annotated[list[Item], Meta(description="The items, in order.")]
    params: Annotated[EncodeParams | None, Meta(description="What to compute.")] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts(self.items)
        once = _ENCODE_KEYS if self.params is None else _ENCODE_KEYS + _PARAMS_KEYS
        return once, ((_ID, ids), (_TEXT, texts))


class EmbeddingsRequest(msgspec.Struct):
    """Body of POST /v1/embeddings, in the OpenAI form, with what other servers add."""

    model: ModelName
    input: Annotated[
        Inputs, Meta(description="A text, texts and images, or the token ids of one or more texts.")
    ]
    encoding_format: Annotated[Text, one_of(ENCODINGS, "float, or base64 of little-endian float32.")] = None
    dimensions: Annotated[
        int | None, Meta(description="Width of the vectors, by default that of the model.")
    ] = None
    user: Annotated[Text, Meta(description="Read by nobody.")] = None
    overflow_policy: OverflowPolicy = None
    input_type: Annotated[
        InputType | None, Meta(description="The side of the model; document by default.")
    ] = None
    prompt_name: Annotated[Text, Meta(description="The name of a stored prompt of the model.")] = None
    instruction: Annotated[Text, Meta(description="A text that goes before each input.")] = None
    late_chunking: Annotated[bool | None, Meta(description="The inputs are the chunks of one document.")] = (
        None
    )

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _EMBEDDINGS_KEYS, [(Key(name), times) for name, times in key_counts(self.input).items()]


class ScoreRequest(msgspec.Struct):
    """Body of POST /v1/score: everything at top level."""

    query: Annotated[Item, Meta(description="What the items should answer.")]
    items: Annotated[list[Item], Meta(description="The items, in order.")]
    instruction: Annotated[
        Text, Meta(description="What the model should do, for models that read an instruction.")
    ] = None
    options: Annotated[
        dict[str, Any] | None, Meta(description="Options of the model and of the request, by name.")
    ] = None
    warnings: Annotated[bool | None, Meta(description="Tell options that are not used.")] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts((self.query, *self.items))
        return _SCORE_KEYS, ((_ID, ids), (_TEXT, texts))


class ExtractParams(msgspec.Struct):
    """Parameters of an extract request."""

    labels: Annotated[list[str] | None, Meta(description="What to look for.")] = None
    output_schema: Annotated[
        dict[str, Any] | None, Meta(description="Form of the answer, for models that fill one in.")
    ] = None
    instruction: Annotated[
        Text, Meta(description="What the model should do, for models that read an instruction.")
    ] = None
    options: Annotated[
        dict[str, Any] | None, Meta(description="Options of the model and of the request, by name.")
    ] = None
    item_errors: Annotated[bool | None, Meta(description="Answer the other items when one fails.")] = None
    warnings: Annotated[bool | None, Meta(description="Tell options that are not used.")] = None


class ExtractRequest(msgspec.Struct):
    """Body of POST /v1/extract."""

    items: Annotated[list[Item], Meta(description="The items, in order.")]
    params: Annotated[ExtractParams | None, Meta(description="What to compute.")] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        ids, texts = _counts(self.items)
        once = _ENCODE_KEYS if self.params is None else _ENCODE_KEYS + _EXTRACT_KEYS
        return once, ((_ID, ids), (_TEXT, texts))


class RerankRequest(msgspec.Struct):
    """Body of POST /v1/rerank, in the form of Cohere and Jina."""

    model: ModelName
    query: Annotated[str | MediaInput, Meta(description="A text, or an object with a text or an image.")]
    documents: Annotated[
        list[str | dict[str, Any]],
        Meta(description="Texts, or objects with a text, `rank_fields`, or an image."),
    ]
    top_n: Annotated[
        Annotated[int, Meta(ge=1, description="The most results; all by default.")] | None,
        Meta(description="Tell the best so many only."),
    ] = None
    return_documents: Annotated[bool | None, Meta(description="Results repeat their document.")] = None
    overflow_policy: OverflowPolicy = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1, description="Documents are cut to so many tokens.")] | None,
        Meta(description="Cut each document to so many tokens."),
    ] = None
    rank_fields: Annotated[
        list[str] | None, Meta(description="The fields of an object that are its text, in this order.")
    ] = None
    instruction: Annotated[
        Text, Meta(description="A text that goes before the query, or into a template.")
    ] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _RERANK_KEYS, ((_TEXT, sum(isinstance(document, dict) for document in self.documents)),)


B = TypeVar("B", bound=Body)
_ID, _TEXT = Key("id"), Key("text")
_NULLS = (b"null", b"\xc0")
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
_RERANK_KEYS = keys_of(RerankRequest)
_EMBEDDINGS_KEYS = keys_of(EmbeddingsRequest)
P = TypeVar("P", EncodeParams, ExtractParams)


def _keys_of_items(items: Iterable[Item], params: EncodeParams | ExtractParams | None, *places: Key) -> Keys:
    ids, texts = _counts(items)
    options = _PARAMS_KEYS if isinstance(params, EncodeParams) else _EXTRACT_KEYS
    return (*places, _PARAMS, *(options if params is not None else ())), ((_ID, ids), (_TEXT, texts))


class _Elsewhere(msgspec.Struct, Generic[P]):
    """A body whose items stand under other names, as SIE's gateway takes them."""

    input: Annotated[list[Item] | Item | None, Meta(description="The items, or one.")] = None
    inputs: Annotated[list[Item] | None, Meta(description="The items, in order.")] = None
    params: P | None = None

    @property
    def items(self) -> list[Item]:
        """The items; those of `input` go before those of `inputs`, which then are not read."""
        if self.input is None:
            return self.inputs or []
        return [self.input] if isinstance(self.input, Item) else self.input

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _keys_of_items(self.items, self.params, _INPUT, _INPUTS)


class _Alone(Item, Generic[P]):
    """A body that is itself an item, as SIE's gateway takes it."""

    params: P | None = None

    @property
    def items(self) -> list[Item]:
        """The item without what stands beside it."""
        return [Item(**{name: getattr(self, name) for name in Item.__struct_fields__})]

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        return _keys_of_items([self], self.params)


class _Places(msgspec.Struct):
    """Whether a body has any of these."""

    items: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    inputs: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")
    images: msgspec.Raw = msgspec.Raw(b"")
    audio: msgspec.Raw = msgspec.Raw(b"")
    video: msgspec.Raw = msgspec.Raw(b"")
    document: msgspec.Raw = msgspec.Raw(b"")

    def given(self) -> set[str]:
        """Names of the fields that are there and not null."""
        return {name for name in self.__struct_fields__ if bytes(getattr(self, name)) not in (b"", *_NULLS)}


_INPUT, _INPUTS, _PARAMS = Key("input"), Key("inputs"), Key("params")
_LOOSE: dict[type, tuple[Any, Any]] = {
    EncodeRequest: (_Elsewhere[EncodeParams], _Alone[EncodeParams]),
    ExtractRequest: (_Elsewhere[ExtractParams], _Alone[ExtractParams]),
}
"""Other forms of a body that a gateway takes: with the items elsewhere, and one that is an item."""


def read(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """Decode a body as msgpack or JSON by its content type. Raises `InvalidInput` with the JSON path of the fault."""
    binary = is_msgpack(content_type)
    check_values(body, binary, limits.max_items)
    decoded = decode(body, kind, binary=binary)
    refuse_repeated(body, *decoded.keys(), binary=binary)
    return decoded


def read_loosely(body: bytes, content_type: str | None, kind: type[B], limits: Limits) -> B:
    """`read`, as a gateway reads: the items may also stand under `input` or `inputs`, or the body is the only item.

    Raises `InvalidInput` as `read`, about the form that the body has. Too many values are never searched again.
    """
    try:
        return read(body, content_type, kind, limits)
    except InvalidInput as error:
        elsewhere, alone = _LOOSE.get(kind, (None, None))
        try:
            check_values(body, is_msgpack(content_type), limits.max_items)
            given = decode(body, _Places, binary=is_msgpack(content_type)).given()
        except InvalidInput:
            raise error from None
        if elsewhere is None or "items" in given or not given:
            raise
        form = elsewhere if given & {"input", "inputs"} else alone
    found: Any = read(body, content_type, form, limits)
    plain: B = msgspec.convert({"items": found.items, "params": found.params}, kind)
    return plain


class _Around(msgspec.Struct):
    params: dict[Any, msgspec.Raw] | None = None


def unknown_fields(body: bytes, content_type: str | None, params: object, *, at_top: bool) -> list[str]:
    """Names beside the fields of `params`, null ones aside, in a body that `read` took.

    The parameters stand in `params` of the body, or are the body itself (`at_top`).
    """
    if not isinstance(params, msgspec.Struct):
        return []
    binary = is_msgpack(content_type)
    given = (
        decode(body, dict[Any, msgspec.Raw], binary=binary)
        if at_top
        else decode(body, _Around, binary=binary).params or {}
    )
    known = params.__struct_fields__
    return [str(name) for name, value in given.items() if name not in known and bytes(value) not in _NULLS]


def is_msgpack(content_type: str | None) -> bool:
    """Whether a content type says that the body is msgpack; all other bodies are JSON."""
    lowered = (content_type or "").lower()
    return "application/msgpack" in lowered or "application/x-msgpack" in lowered


def is_large(body: bytes) -> bool:
    """Whether a body is work for a thread."""
    return len(body) > UNCHECKED_NBYTES


async def read_aside(
    body: bytes,
    content_type: str | None,
    kind: type[B],
    limits: Limits,
    reader: Callable[[bytes, str | None, type[B], Limits], B] = read,
) -> B:
    """What `reader` reads; a large body in a rendering thread, where it holds up others only while it is decoded.

    NOTE: the decoder keeps the interpreter to itself: about 2 ms for each MiB of plain text, 4 ms where all is escaped.
    """
    if not is_large(body):
        return reader(body, content_type, kind, limits)
    return await off_loop(reader, body, content_type, kind, limits)


def _counts(items: Iterable[Item]) -> tuple[int, int]:
    """How many ids and texts `items` have."""
    ids = texts = 0
    for item in items:
        ids += item.id is not None
        texts += item.text is not None
    return ids, texts
