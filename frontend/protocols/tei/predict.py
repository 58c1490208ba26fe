"""POST /predict: the classes of texts, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.sie.classes import FUNCTION, ClassesPlan, classes_of
from frontend.protocols.sie.classify import ClassifyResource
from frontend.protocols.sie.render import json_list
from frontend.protocols.tei.schemas import PredictRequest
from ipc.errors import InvalidInput

_ENTRY_NBYTES = 64
"""About how long an entry of an answer is."""


class PredictResource(ClassifyResource[PredictRequest]):
    """Classes of a text as one array, those of a batch as an array of arrays."""

    operation = "predict"
    body = PredictRequest
    field = "inputs"

    def texts(self, request: PredictRequest) -> list[str]:
        """The texts. Raises `InvalidInput` for pairs of texts."""
        return _texts(request)

    def options(self, request: PredictRequest) -> dict[str, Any]:
        """What becomes of long texts, and logits where they were asked for."""
        return {**request.options, **({FUNCTION: "none"} if request.raw_scores else {})}

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
