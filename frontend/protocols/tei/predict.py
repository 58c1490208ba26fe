"""POST /predict: the classes of texts, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.default_models import default_model
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.http.texts import check_count, check_texts
from frontend.protocols.sie.classes import FAMILY, FUNCTION, ClassesPlan, classes_of, plan_classes
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.render import json_list
from frontend.protocols.tei.schemas import PredictRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus

_NAMES = FieldNames("inputs[{}]", "inputs[{}]", options="")
_ENTRY_NBYTES = 64
"""About how long an entry of an answer is."""


class PredictResource(InferenceResource[PredictRequest, ClassesPlan]):
    """Classes of a text as one array, those of a batch as an array of arrays."""

    operation = "predict"
    body = PredictRequest
    always_json = True

    def model_of(self, request: PredictRequest) -> str:
        """The classifier."""
        return default_model(self.services.catalog, self.services.settings, ("json",), FAMILY)

    def examine(self, request: PredictRequest) -> None:
        """Texts that some model could take."""
        limits, texts = self.services.settings.limits, _texts(request)
        check_count(len(texts), "inputs", limits)
        check_texts(texts, "inputs[{}]", limits)

    def check(self, request: PredictRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts."""
        return [InputItem(text) for text in _texts(request)]

    def plan(
        self, request: PredictRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes."""
        options = {**request.options, FUNCTION: "none" if request.raw_scores else None}
        return plan_classes(self.services, entry, status, inputs, options, _NAMES)

    async def render(
        self,
        reply: Answer,
        plan: ClassesPlan,
        request: PredictRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """Score and label of each class."""
        found = [[{"score": one.score, "label": one.label} for one in item] for item in classes_of(reply)]
        entries = found if _is_batch(request) else found[0]
        return await json_list(iter(entries), _ENTRY_NBYTES * sum(map(len, found)))


def _is_batch(request: PredictRequest) -> bool:
    given = request.inputs
    return isinstance(given, list) and isinstance(given[0], list)


def _texts(request: PredictRequest) -> list[str]:
    """The texts of a request. Raises `InvalidInput` for pairs of texts, and for inputs of several kinds."""
    given = request.inputs
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidInput("inputs: may not be empty")
    if not isinstance(given[0], list):
        return [_only(given, "inputs")]
    return [_only(entry, f"inputs[{index}]") for index, entry in enumerate(given)]


def _only(entry: str | Sequence[str | list[str]], where: str) -> str:
    if isinstance(entry, str) or not all(isinstance(text, str) for text in entry):
        raise InvalidInput(f"{where}: expected an array with one str")
    if len(entry) != 1:
        raise InvalidInput(f"{where}: {len(entry)} texts, classifiers here take one text and no pairs")
    return str(entry[0])
