"""Request bodies of infinity. Absent and null fields have their defaults, unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from frontend.protocols.foreign.options import activation_option, function_option
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
