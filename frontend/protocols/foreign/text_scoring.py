"""The bases of score and rerank: one query and texts, of any model that scores.

1. `TextScoringResource` checks query and texts, and makes the call.
2. `TextRankingResource` answers with the texts best first; a route says how an entry and the body look.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.engine.options import check_options
from frontend.engine.scope import RequestScope
from frontend.http.texts import check_count, check_shared, check_texts
from frontend.protocols.sie.route import Form
from frontend.protocols.sie.schemas import Body
from frontend.protocols.sie.score import Pairs, ScoringResource, ranking
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem


class ScoreBody(Body, Protocol):
    """A request with a query and texts."""

    @property
    def query(self) -> str:
        """What the texts should answer; empty where each has a text of its own."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts to score."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


class RankBody(ScoreBody, Protocol):
    """A request for the order of texts."""

    @property
    def most(self) -> int | None:
        """How many of the best texts the answer has; None: all."""

    @property
    def repeats(self) -> bool:
        """Whether the answer has the texts."""


T = TypeVar("T", bound=ScoreBody)
R = TypeVar("R", bound=RankBody)


class TextScoringResource(ScoringResource[T], Generic[T]):
    """Checks and calls; `names` says what query and texts are called. Always JSON."""

    always_json = True

    def model_of(self, request: T) -> str:
        """The model that the request names, else the model that scores."""
        return model_named(request, self.services.catalog, self.services.settings, ("score",))

    def firsts_of(self, request: T) -> Sequence[str]:
        """What each text should answer; empty where the query is for all."""
        return ()

    def examine(self, request: T) -> None:
        """A query and texts that some model could take."""
        limits, texts, names = self.services.settings.limits, request.texts, self.names_of(request)
        check_count(len(texts), names.text.removesuffix("[{}]"), limits)
        check_texts(texts, names.text, limits)
        check_texts(self.firsts_of(request), names.query, limits)
        check_shared(request.query, names.query, len(texts), limits)
        check_options(request.options, names)

    def check(self, request: T, entry: ModelEntry) -> Pairs:
        """Query and texts as workers take them."""
        pairs = zip_longest(request.texts, self.firsts_of(request))
        return Pairs(InputItem(request.query), [InputItem(text, first=first) for text, first in pairs])

    def options_of(self, request: T) -> tuple[dict[str, Any], None]:
        """The options of the request; none of these servers has instructions."""
        return request.options, None

    def echoed_nbytes(self, request: T) -> int:
        """Nothing, unless a route repeats texts."""
        return 0


class TextRankingResource(TextScoringResource[R], Generic[R]):
    """Texts in the order in which they answer the query."""

    operation = "rerank"

    def __init_subclass__(cls, field: str = "documents", **more: Any) -> None:
        """`field` is the name of the texts."""
        super().__init_subclass__(**more)
        cls.names = FieldNames(item=f"{field}[{{}}]", text=f"{field}[{{}}]", query="query", options="")

    def echoed_nbytes(self, request: R) -> int:
        """Texts that are returned."""
        return sum(map(len, request.texts)) if request.repeats else 0

    def answer(
        self, request: R, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The best texts."""
        best = [
            self.entry(index, score, request.texts[index] if request.repeats else None)
            for index, score in ranking(scores)[: request.most]
        ]
        return self.around(best, scope, reply)

    @abstractmethod
    def entry(self, index: int, score: float, text: str | None) -> dict[str, Any]:
        """One text; `text` is None where the request does not ask for texts."""

    @abstractmethod
    def around(
        self, best: list[dict[str, Any]], scope: RequestScope, reply: Answer
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The body with these entries."""
