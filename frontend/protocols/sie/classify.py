"""The base of the routes that classify texts in the forms of other servers, which name a model or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from frontend.engine.default_models import model_named
from frontend.http.texts import check_count, check_texts
from frontend.protocols.sie.classes import FAMILY, ClassesPlan, plan_classes
from frontend.protocols.sie.convert import check_used
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.schemas import Body
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus


class ClassifyBody(Body, Protocol):
    """A request with texts."""

    @property
    def texts(self) -> Sequence[str]:
        """The texts. Raises `InvalidInput` for what no classifier takes."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


R = TypeVar("R", bound=ClassifyBody)


class ClassifyResource(InferenceResource[R, ClassesPlan], Generic[R]):
    """Checks and calls; `field` is the name of the texts. Always JSON."""

    always_json = True
    field = "input"

    def model_of(self, request: R) -> str:
        """The model that the request names, or the classifier."""
        return model_named(request, self.services.catalog, self.services.settings, ("json",), FAMILY)

    def examine(self, request: R) -> None:
        """Texts that some model could take."""
        limits, texts = self.services.settings.limits, request.texts
        check_count(len(texts), self.field, limits)
        check_texts(texts, f"{self.field}[{{}}]", limits)

    def check(self, request: R, entry: ModelEntry) -> list[InputItem]:
        """The texts as workers take them."""
        return [InputItem(text) for text in request.texts]

    def plan(
        self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes."""
        check_used(request.options, entry, status)
        names = FieldNames(f"{self.field}[{{}}]", f"{self.field}[{{}}]", options="")
        return plan_classes(self.services, entry, status, inputs, request.options, names)
