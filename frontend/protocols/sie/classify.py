"""The base of the routes that classify texts in the forms of other servers, which name a model or none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from frontend.engine.default_models import model_named
from frontend.http.texts import check_count, check_texts
from frontend.protocols.sie.classes import FAMILY, ClassesPlan, plan_classes
from frontend.protocols.sie.convert import check_used
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.schemas import Body
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus

R = TypeVar("R", bound=Body)


class ClassifyResource(InferenceResource[R, ClassesPlan], Generic[R]):
    """Checks and calls; `field` is the name of the texts. Always JSON."""

    always_json = True
    field = "input"

    @abstractmethod
    def texts(self, request: R) -> Sequence[str]:
        """The texts. Raises `InvalidInput` for what no classifier takes."""

    @abstractmethod
    def options(self, request: R) -> dict[str, Any]:
        """The options of the call."""

    def model_of(self, request: R) -> str:
        """The model that the request names, or the classifier."""
        return model_named(request, self.services.catalog, self.services.settings, ("json",), FAMILY)

    def examine(self, request: R) -> None:
        """Texts that some model could take."""
        limits, texts = self.services.settings.limits, self.texts(request)
        check_count(len(texts), self.field, limits)
        check_texts(texts, f"{self.field}[{{}}]", limits)
        self.options(request)

    def check(self, request: R, entry: ModelEntry) -> list[InputItem]:
        """The texts as workers take them."""
        return [InputItem(text) for text in self.texts(request)]

    def plan(
        self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes."""
        check_used(self.options(request), entry, status)
        names = FieldNames(f"{self.field}[{{}}]", f"{self.field}[{{}}]", options="")
        return plan_classes(self.services, entry, status, inputs, self.options(request), names)
