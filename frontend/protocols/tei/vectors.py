"""Vectors in the form of TEI: POST /embed, /embed_all, /embed_sparse, and /similarity, which compares vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.planning import default_model
from frontend.http.fields import check_count, check_texts
from frontend.http.rendering import off_loop_if
from frontend.protocols.sie.encode import VectorsResource, Wishes, dense_json, normalized
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.outputs import INLINE_NBYTES
from frontend.protocols.sie.render import json_list
from frontend.protocols.tei.contract import EmbedAllRequest, EmbedRequest, SimilarityRequest, TeiTerm
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

R = TypeVar("R", EmbedRequest, EmbedAllRequest)


class _Vectors(VectorsResource[R]):
    """One output of the inputs, as a bare array."""

    field = "inputs"
    output: ClassVar[str]

    def model_of(self, request: R) -> str:
        """The model that has the output."""
        return default_model(self.services.catalog, self.services.settings, (self.output,))

    def output_of(self, request: R, entry: ModelEntry) -> str:
        """The one of the route."""
        return self.output

    def wishes_of(self, request: R) -> Wishes:
        """The prompt, and what becomes of long texts."""
        return request.wishes

    async def render(
        self, reply: Answer, plan: Plan[EncodeCall], request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        with reply:
            return await self.listed(reply, request)

    @abstractmethod
    async def listed(self, reply: Answer, request: R) -> list[bytes]:
        """The array in pieces."""


class EmbedResource(_Vectors[EmbedRequest]):
    """Dense vectors."""

    operation = "embed"
    body = EmbedRequest
    output = "dense"

    def width_of(self, request: EmbedRequest) -> int | None:
        """The wanted width."""
        return request.dimensions

    async def listed(self, reply: Answer, request: EmbedRequest) -> list[bytes]:
        """The vectors, cut and then made as long as was asked."""
        return await dense_json(reply, request.dimensions, unit=request.normalize is not False)


class EmbedAllResource(_Vectors[EmbedAllRequest]):
    """One vector for each token."""

    operation = "embed_all"
    body = EmbedAllRequest
    output = "multivector"

    async def listed(self, reply: Answer, request: EmbedAllRequest) -> list[bytes]:
        """For each input an array of vectors."""
        values = reply.tensors()["multivector"]
        return await json_list((values[span] for span in reply.spans("multivector")), values.nbytes)


class EmbedSparseResource(_Vectors[EmbedAllRequest]):
    """Terms of the vocabulary and their weights."""

    operation = "embed_sparse"
    body = EmbedAllRequest
    output = "sparse"

    async def listed(self, reply: Answer, request: EmbedAllRequest) -> list[bytes]:
        """For each input an array of terms by index."""
        tensors = reply.tensors()
        indices, values = tensors["sparse.indices"], tensors["sparse.values"]
        terms = (_terms(indices[span], values[span]) for span in reply.spans("sparse.indices"))
        return await json_list(terms, 8 * values.nbytes)


def _terms(indices: np.ndarray, values: np.ndarray) -> list[TeiTerm]:
    return list(map(TeiTerm, indices.tolist(), values.tolist()))


_NAMES = FieldNames("inputs.sentences[{}]", "inputs.sentences[{}]", options="")


class SimilarityResource(VectorsResource[SimilarityRequest]):
    """The cosine of one text and each of several others."""

    operation = "similarity"
    body = SimilarityRequest

    def model_of(self, request: SimilarityRequest) -> str:
        """The model that gives dense vectors."""
        return default_model(self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: SimilarityRequest) -> None:
        """Texts that some model could take."""
        limits, given = self.services.settings.limits, request.inputs
        check_texts([given.source_sentence], "inputs.source_sentence", limits)
        check_count(len(given.sentences), "inputs.sentences", limits)
        check_texts(given.sentences, "inputs.sentences[{}]", limits)

    def check(self, request: SimilarityRequest, entry: ModelEntry) -> list[InputItem]:
        """The sentences, and behind them the text that they are compared with."""
        return [InputItem(text) for text in (*request.inputs.sentences, request.inputs.source_sentence)]

    def names_of(self, request: SimilarityRequest) -> FieldNames:
        """The sentences."""
        return _NAMES

    def wishes_of(self, request: SimilarityRequest) -> Wishes:
        """The prompt, and what becomes of long texts."""
        return request.chosen.wishes

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: SimilarityRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """A cosine for each sentence."""
        with reply:
            rows = reply.tensors()["dense"]
            return [await off_loop_if(rows.nbytes > INLINE_NBYTES, _cosines, rows)]


def _cosines(rows: np.ndarray) -> bytes:
    """JSON of the cosines of the last row and all others."""
    units = normalized(rows)
    return orjson.dumps((units[:-1] @ units[-1]).astype(np.float64).tolist())
