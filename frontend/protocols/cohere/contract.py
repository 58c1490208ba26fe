"""The contract of Cohere: bodies of embed and bodies of answers.

Unknown fields are ignored, null equals absent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.protocols.sie.inputs import ImageText, ImageUrl, Seen, joined
from frontend.protocols.sie.schemas import FlatBody, Key, Keys, ModelName, keys_of
from frontend.protocols.sie.score import RerankResult

Side = Literal["search_document", "search_query", "classification", "clustering", "image"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Truncate = Literal["NONE", "START", "END"]


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """A text of an input."""

    text: Annotated[str, Meta(description="The text.")]


class ImageContent(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image of an input."""

    image_url: Annotated[ImageUrl, Meta(description="The picture as a data URI.")]


class EmbedInput(msgspec.Struct):
    """One input: texts, which are joined, or one image."""

    content: Annotated[list[TextContent | ImageContent], Meta(description="What is said: a text or parts.")]

    def seen(self, where: str) -> Seen:
        """The text or image of the input. Raises `InvalidInput` for none, and for several."""
        texts = [part.text for part in self.content if isinstance(part, TextContent)]
        images = [
            Seen(None, part.image_url.url, f"{where}.content[{at}].image_url.url")
            for at, part in enumerate(self.content)
            if isinstance(part, ImageContent)
        ]
        return joined(texts, images, where)


class CohereEmbedV1Request(FlatBody, kw_only=True):
    """Body of POST /v1/embed."""

    model: ModelName
    texts: Annotated[list[str] | None, Meta(description="The texts to embed.")] = None
    images: Annotated[list[ImageText] | None, Meta(description="The images to embed.")] = None
    input_type: Annotated[
        Side | None, Meta(description="search_query chooses the query side of the model.")
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, Meta(description="The forms of the vectors; float by default.")
    ] = None
    truncate: Annotated[
        Truncate | None, Meta(description="Where a text that is too long is cut; NONE refuses the text.")
    ] = None


class CohereEmbedRequest(CohereEmbedV1Request, kw_only=True):
    """Body of POST /v2/embed."""

    input_type: Annotated[Side, Meta(description="search_query chooses the query side of the model.")]
    inputs: Annotated[list[EmbedInput] | None, Meta(description="Texts and images in content parts.")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, description="Texts are cut to so many tokens.")] | None,
        Meta(description="Cut each input to so many tokens."),
    ] = None
    output_dimension: Annotated[
        int | None, Meta(description="Width of the vectors, by default that of the model.")
    ] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        parts = [part for one in self.inputs or () for part in one.content]
        texts = sum(isinstance(part, TextContent) for part in parts)
        # Each part has the name of its field as its type too.
        counts = {
            "content": len(self.inputs or ()),
            "type": len(parts),
            "text": 2 * texts,
            "image_url": 2 * (len(parts) - texts),
            "url": len(parts) - texts,
        }
        return keys_of(CohereEmbedRequest), [(Key(name), times) for name, times in counts.items()]


Integers = list[list[int]] | UnsetType


class CohereError(msgspec.Struct):
    """An error in the form of Cohere."""

    message: Annotated[str, Meta(description="What is wrong, with field, value and limit.")]


class BilledUnits(msgspec.Struct):
    """What a request took."""

    input_tokens: Annotated[int | UnsetType, Meta(description="Tokens of texts.")] = UNSET
    image_tokens: Annotated[int | UnsetType, Meta(description="Tokens or patches of images.")] = UNSET
    images: Annotated[int | UnsetType, Meta(description="Number of images.")] = UNSET
    search_units: Annotated[int | UnsetType, Meta(description="1 for a rerank.")] = UNSET


class CohereMeta(msgspec.Struct):
    """Facts of a request."""

    api_version: Annotated[dict[str, str], Meta(description="`version`: 1 or 2.")]
    billed_units: Annotated[BilledUnits, Meta(description="Tokens and images.")]
    tokens: Annotated[dict[str, int] | UnsetType, Meta(description="`input_tokens` of a rerank.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Which inputs were cut.")] = UNSET


class EmbeddingsByType(msgspec.Struct):
    """Vectors in the types of the request."""

    float_: Annotated[list[list[float]] | UnsetType, Meta(description="As the model gives them.")] = (
        msgspec.field(default=UNSET, name="float")
    )
    int8: Annotated[Integers, Meta(description="Values over the largest of the vector, times 127.")] = UNSET
    uint8: Annotated[Integers, Meta(description="0 for the least of the vector, 255 for the largest.")] = (
        UNSET
    )
    binary: Annotated[Integers, Meta(description="`ubinary` less 128.")] = UNSET
    ubinary: Annotated[Integers, Meta(description="A bit for each value above 0, in bytes.")] = UNSET
    base64: Annotated[list[str] | UnsetType, Meta(description="Little-endian float32.")] = UNSET


class EmbedAnswer(msgspec.Struct):
    """Answer of embed."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    response_type: Annotated[
        Literal["embeddings_floats", "embeddings_by_type"], Meta(description="The form of `embeddings`.")
    ]
    texts: Annotated[list[str], Meta(description="The texts of the request.")]
    embeddings: Annotated[
        EmbeddingsByType | list[list[float]],
        Meta(description="A list only in version 1, where the request names no types."),
    ]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]


class CohereRerankAnswer(msgspec.Struct):
    """Answer of rerank, best first."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    results: Annotated[list[RerankResult], Meta(description="Best first.")]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]
