"""The base of rerank and score in the forms of other servers: one query and texts, of any model that scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from frontend.engine.default_models import model_named
from frontend.engine.options import Resolved, check_options, resolve
from frontend.http.texts import check_count, check_shared, check_texts
from frontend.protocols.sie.convert import check_used
from frontend.protocols.sie.schemas import Body
from frontend.protocols.sie.score import Pairs, ScorePlan, ScoringResource
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import InputItem, ModelStatus


class TextsBody(Body, Protocol):
    """A request with a query and texts."""

    @property
    def query(self) -> str:
        """What the texts should answer."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts to score."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


R = TypeVar("R", bound=TextsBody)


class TextScoringResource(ScoringResource[R], Generic[R]):
    """Checks and calls; `names` says what query and texts are called. Always JSON."""

    always_json = True

    def model_of(self, request: R) -> str:
        """The model that the request names, or the one that scores."""
        return model_named(request, self.services.catalog, self.services.settings, ("score",))

    def examine(self, request: R) -> None:
        """A query and texts that some model could take."""
        limits, texts = self.services.settings.limits, request.texts
        check_count(len(texts), self.names.text.removesuffix("[{}]"), limits)
        check_texts(texts, self.names.text, limits)
        check_shared(request.query, self.names.query, len(texts), limits)
        check_options(request.options, self.names)

    def check(self, request: R, entry: ModelEntry) -> Pairs:
        """Query and texts as workers take them."""
        return Pairs(InputItem(request.query), [InputItem(text) for text in request.texts])

    def plan(self, request: R, entry: ModelEntry, inputs: Pairs, status: ModelStatus) -> ScorePlan:
        """The call, with options that the loaded model reads."""
        check_used(request.options, entry, status)
        return super().plan(request, entry, inputs, status)

    def resolve(self, request: R, entry: ModelEntry, items: int) -> Resolved:
        """The options of the request above those of the model's profile."""
        catalog, limits = self.services.catalog, self.services.settings.limits
        return resolve(entry, request.options, None, catalog, items, limits, self.names)

    def echoed_nbytes(self, request: R) -> int:
        """Nothing, unless a route repeats texts."""
        return 0
