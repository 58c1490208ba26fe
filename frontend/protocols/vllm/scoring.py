"""POST /score, /v1/score and /rerank: how well texts answer another text, in their order or best first."""

from __future__ import annotations

import random
from typing import Any, Protocol, TypeVar

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.foreign.text_scoring import ScoreBody, TextRankingResource, TextScoringResource
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.score import Pairs
from frontend.protocols.vllm.envelope import envelope, usage_of
from frontend.protocols.vllm.schemas import DocumentsRequest, PairScoreRequest
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import ModelStatus, ScoreCall


class _CutBody(ScoreBody, Protocol):
    """A request that may cut texts at a number of tokens."""

    def check_cut(self, entry: ModelEntry, status: ModelStatus) -> None:
        """Raise `InvalidInput` where the loaded model cannot."""


S = TypeVar("S", bound=_CutBody)


class _CuttingResource(TextScoringResource[S]):
    """What both routes check of a loaded model."""

    def plan(self, request: S, entry: ModelEntry, inputs: Pairs, status: ModelStatus) -> Plan[ScoreCall]:
        """The call."""
        request.check_cut(entry, status)
        return super().plan(request, entry, inputs, status)


class PairScoreResource(_CuttingResource[PairScoreRequest]):
    """Scores in the order of the texts."""

    operation = "score"
    body = PairScoreRequest
    entries = "data"

    def names_of(self, request: PairScoreRequest) -> FieldNames:
        """The fields that the request has."""
        first, second = request.fields
        query = f"{first}[{{}}]" if request.firsts else first
        return FieldNames(f"{second}[{{}}]", f"{second}[{{}}]", query=query, options="")

    def firsts_of(self, request: PairScoreRequest) -> list[str]:
        """The first texts, where each text has one of its own."""
        return request.firsts

    def answer(
        self, request: PairScoreRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> dict[str, Any]:
        """`data` with a score for each text."""
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())
        ]
        return {**envelope("score", scope), "data": data, "usage": usage_of(reply)}


class DocumentsResource(_CuttingResource[DocumentsRequest], TextRankingResource[DocumentsRequest]):
    """Documents best first, each with its text."""

    body = DocumentsRequest
    entries = "results"

    def entry(self, index: int, score: float, text: str | None) -> dict[str, Any]:
        """Index, document and score."""
        return {"index": index, "document": {"text": text}, "relevance_score": score}

    def around(self, best: list[dict[str, Any]], scope: RequestScope, reply: Answer) -> dict[str, Any]:
        """`results` beside id, model and usage."""
        used = sum(reply.tokens)
        return {
            "id": f"rerank-{random.getrandbits(128):032x}",
            "model": scope.model,
            "usage": {"prompt_tokens": used, "total_tokens": used},
            "results": best,
        }
