"""POST /api/embed and /api/embeddings: dense vectors, those of the first route with length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.protocols.ollama.requests import KeepAlive, Name, known_name
from frontend.protocols.sie.encode import VectorsResource, Wishes, dense_json
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.render import HOLE, filled, json_of
from frontend.protocols.sie.schemas import FlatBody
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.wire.messages import EncodeCall

Options = Annotated[dict[str, Any] | None, Meta(description="No effect: vectors have no options.")]


class OllamaEmbedRequest(FlatBody, kw_only=True):
    """Body of POST /api/embed."""

    input: Annotated[str | list[str], Meta(description="A text, or several texts.")]
    model: Name = None
    truncate: Annotated[
        bool | None, Meta(description="Cut texts that are too long; the default. False refuses them.")
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="Only the first so many values of each vector; 0: all.")
    ] = None
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(FlatBody, kw_only=True):
    """Body of POST /api/embeddings."""

    prompt: Annotated[str, Meta(description="The text.")]
    model: Name = None
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaEmbedAnswer(msgspec.Struct):
    """Vectors of length 1."""

    model: Annotated[str, Meta(description="Name of the model, as the request has it.")]
    embeddings: Annotated[list[list[float]], Meta(description="A vector for each text.")]
    total_duration: Annotated[int, Meta(description="Time of the whole request in nanoseconds.")]
    prompt_eval_count: Annotated[int, Meta(description="Tokens of all texts.")]


class OllamaEmbeddingsAnswer(msgspec.Struct):
    """One vector."""

    embedding: Annotated[list[float], Meta(description="The vector, as the model gives it.")]


R = TypeVar("R", OllamaEmbedRequest, OllamaEmbeddingsRequest)


class _Vectors(VectorsResource[R]):
    """Dense vectors of texts, which are cut at the length of the model."""

    def model_of(self, request: R) -> str:
        """The model that the request names, else the model that gives dense vectors."""
        directory, settings = self.services.directory, self.services.settings
        return self.known_name(request.model or "") or model_named(request, directory, settings, ("dense",))

    def known_name(self, name: str) -> str:
        """The name without the tag that clients add."""
        return known_name(name, self.services.catalog)

    def wishes_of(self, request: R) -> Wishes:
        """The policy for texts that are too long: they are cut."""
        return Wishes(overflow_policy="truncate_text")


class EmbedResource(_Vectors[OllamaEmbedRequest]):
    """Vectors of length 1 for all texts."""

    operation = "embed"
    body = OllamaEmbedRequest

    def wishes_of(self, request: OllamaEmbedRequest) -> Wishes:
        """The policy for texts that are too long, as the request states it."""
        return Wishes(overflow_policy="error" if request.truncate is False else "truncate_text")

    def width_of(self, request: OllamaEmbedRequest) -> int | None:
        """The wanted width."""
        return request.dimensions or None

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: OllamaEmbedRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        used = sum(reply.tokens)
        with reply:
            vectors = await dense_json(reply, self.width_of(request), unit=True)
        total_ns = int(scope.elapsed_ms() * 1e6)
        return filled(OllamaEmbedAnswer(request.model or scope.model, HOLE, total_ns, used), vectors)


class EmbeddingsResource(_Vectors[OllamaEmbeddingsRequest]):
    """The vector of one text, as the model gives it."""

    operation = "embeddings"
    body = OllamaEmbeddingsRequest
    field = "prompt"

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: OllamaEmbeddingsRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        with reply:
            row: Any = reply.tensors()["dense"][0]
            return [json_of(OllamaEmbeddingsAnswer(row))]
