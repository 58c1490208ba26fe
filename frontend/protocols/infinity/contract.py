"""The contract of infinity: bodies of requests and bodies of answers.

Absent and null fields have their defaults, unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.protocols.foreign.scoring import activation_option, function_option
from frontend.protocols.sie.schemas import FlatBody
from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem

ModelName = Annotated[
    str | None,
    Meta(
        description="Name of the model; `default/not-specified`, as no name, is the only model that can answer."
    ),
]
RawScores = Annotated[bool | None, Meta(description="Give the bare logits.")]


class Naming(FlatBody, kw_only=True):
    """What all requests say. What is too long is cut, as infinity does."""

    model: ModelName = None


class MultimodalRequest(Naming, kw_only=True):
    """Body of POST /embeddings."""

    input: Annotated[str | list[str], Meta(description="A text or an image, or several of them.")]
    modality: Annotated[
        Literal["text", "image", "audio"] | None,
        Meta(description="What the inputs are; images are data URIs in base64, audio is refused."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="Numbers, or base64 of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Only the first so many values of each vector; 0 for all."),
    ] = None

    @property
    def kind(self) -> str:
        """The kind of the inputs. Raises `InvalidInput` for audio."""
        if self.modality == "audio":
            raise InvalidInput("modality: 'audio' is not offered, only text and image")
        return self.modality or "text"

    @property
    def inputs(self) -> list[str]:
        """The inputs."""
        return [self.input] if isinstance(self.input, str) else self.input


class InfinityClassifyRequest(Naming, kw_only=True):
    """Body of POST /classify."""

    input: Annotated[list[str], Meta(description="The texts.")]
    raw_scores: RawScores = None

    @property
    def items(self) -> list[InputItem]:
        """The texts."""
        return list(map(InputItem, self.input))

    @property
    def options(self) -> dict[str, Any]:
        """Logits where they are wanted."""
        return function_option(bool(self.raw_scores))


class InfinityRerankRequest(Naming, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the documents should answer.")]
    documents: Annotated[list[str], Meta(description="The texts to order.")]
    return_documents: Annotated[bool | None, Meta(description="Repeat each document.")] = None
    raw_scores: RawScores = None
    top_n: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Only the best so many.")] = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return self.documents

    @property
    def most(self) -> int | None:
        """So many of the best, None for all."""
        return self.top_n

    @property
    def repeats(self) -> bool:
        """Whether the answer has the documents."""
        return bool(self.return_documents)

    @property
    def options(self) -> dict[str, Any]:
        """Logits where they are wanted."""
        return activation_option(bool(self.raw_scores))


Capability = Literal["embed", "image_embed", "rerank", "classify"]


class InfinityStats(msgspec.Struct):
    """Figures of a model. The figures of its queue are among the metrics."""

    batch_size: Annotated[int, Meta(description="Most items of a batch.")]


class InfinityModel(msgspec.Struct, kw_only=True):
    """One model."""

    id: Annotated[str, Meta(description="Name of the model.")]
    stats: Annotated[InfinityStats, Meta(description="Figures of the model.")]
    object: Annotated[Literal["model"], Meta(description="Names the form of this object.")] = "model"
    owned_by: Annotated[str, Meta(description="Always `penstock`.")] = "penstock"
    created: Annotated[int, Meta(description="When this process began, in seconds since 1970.")]
    backend: Annotated[Literal["torch"], Meta(description="What runs the model.")] = "torch"
    capabilities: Annotated[
        list[Capability], Meta(description="The kinds of requests that the model answers.")
    ]


class InfinityModels(msgspec.Struct, kw_only=True):
    """All models of these kinds."""

    data: Annotated[list[InfinityModel], Meta(description="The list.")]
    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")] = "list"


class InfinityUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class _Answer(msgspec.Struct):
    model: Annotated[str, Meta(description="Name of the model that answered.")]
    usage: Annotated[InfinityUsage, Meta(description="Counts of tokens.")]
    id: Annotated[str, Meta(description="A new id of the answer.")]
    created: Annotated[int, Meta(description="When the answer was made, in seconds since 1970.")]


class InfinityVector(msgspec.Struct):
    """The vector of one input."""

    object: Annotated[Literal["embedding"], Meta(description="Names the form of this object.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64.")]
    index: Annotated[int, Meta(description="Place of the input in the request.")]


class MultimodalAnswer(_Answer):
    """Answer of /embeddings."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[InfinityVector], Meta(description="The list.")]


class InfinityClass(msgspec.Struct):
    """A class of a text."""

    score: Annotated[float, Meta(description="How likely the class is; with `raw_scores` the logit.")]
    label: Annotated[str, Meta(description="Name of the class.")]


class InfinityClassifyAnswer(_Answer):
    """Answer of /classify: for each text its classes, the likeliest first."""

    object: Annotated[Literal["classify"], Meta(description="Names the form of this object.")]
    data: Annotated[list[list[InfinityClass]], Meta(description="The list.")]


class InfinityRank(msgspec.Struct):
    """A document at its rank."""

    relevance_score: Annotated[float, Meta(description="How well the document answers the query.")]
    index: Annotated[int, Meta(description="Place of the document in the request.")]
    document: Annotated[str | None, Meta(description="The document, with `return_documents`.")]


class InfinityRerankAnswer(_Answer):
    """Answer of /rerank."""

    object: Annotated[Literal["rerank"], Meta(description="Names the form of this object.")]
    results: Annotated[list[InfinityRank], Meta(description="The documents, the best first.")]
