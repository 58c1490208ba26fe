"""Classes of whole texts: one call of a classifier, the scores of all of its labels; the base of such routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.http.rendering import off_loop_if
from frontend.http.texts import check_count, check_texts
from frontend.protocols.foreign.options import FUNCTION
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.route import Plan
from frontend.protocols.sie.schemas import Body
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire import extraction
from ipc.wire.extraction import Classification
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import ExtractCall, InputItem, ModelStatus, ScoreCall

FAMILY = "text_classification"
ENTRY_NBYTES = 64
"""About how long an entry of `labelled` is in JSON."""
INLINE_NBYTES = 64 << 10
"""Classes up to this size are read on the event loop, more in a thread."""


class ClassifyBody(Body, Protocol):
    """A request for classes."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""


class ClassifyTextsBody(ClassifyBody, Protocol):
    """A request with texts to classify."""

    @property
    def items(self) -> Sequence[InputItem]:
        """Texts and pairs of texts. Raises `InvalidInput` for what no classifier takes."""


@dataclass(frozen=True, slots=True)
class ClassesPlan(Plan[ExtractCall | ScoreCall]):
    """The call; `labels` are those of the model, in the order of its outputs."""

    labels: list[str]


R = TypeVar("R", bound=ClassifyBody)
T = TypeVar("T", bound=ClassifyTextsBody)
F = TypeVar("F")


class ClassifyResource(InferenceResource[R, ClassesPlan], Generic[R]):
    """The call; `field` is the name of the inputs. Always JSON."""

    always_json = True
    field = "input"

    def model_of(self, request: R) -> str:
        """The model that the request names, or the classifier."""
        return model_named(request, self.services.catalog, self.services.settings, ("json",), FAMILY)

    def plan(
        self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes. Raises `InvalidInput` for a model that is no classifier of whole texts."""
        if FUNCTION not in status.uses:
            raise InvalidInput(f"model: '{entry.id}' is no classifier of whole texts with labels of its own")
        found = self.resolve(entry, request.options, None, len(inputs), self.names)
        # The answer has all classes, whatever the entry's own threshold is.
        options = {**found.options, "threshold": 0.0, "top_k": max(1, len(status.labels))}
        call = ExtractCall(
            inputs, [], None, found.instruction, options, found.overflow, found.lora, self.names
        )
        return ClassesPlan(found.entry.id, call, status.labels)

    @property
    def names(self) -> FieldNames:
        """How messages name texts, and the first texts of pairs."""
        place = f"{self.field}[{{}}]"
        return FieldNames(place, place, query=place, options="")


class TextClassesResource(ClassifyResource[T], Generic[T]):
    """Checks of texts and pairs of texts."""

    def examine(self, request: T) -> None:
        """Texts that some model could take."""
        limits, items = self.services.settings.limits, request.items
        check_count(len(items), self.field, limits)
        for texts in ([item.text or "" for item in items], [item.first or "" for item in items]):
            check_texts(texts, f"{self.field}[{{}}]", limits)

    def check(self, request: T, entry: ModelEntry) -> list[InputItem]:
        """The texts as workers take them."""
        return list(request.items)


async def classes_of(reply: Answer) -> list[list[Classification]]:
    """The classes of each item, the likeliest first. The lease ends. Raises `LeaseRevoked`."""
    return await _read(reply, _classes)


async def labelled(reply: Answer) -> list[list[dict[str, Any]]]:
    """Score and label of each class, for each item. The lease ends. Raises `LeaseRevoked`."""
    return await _read(reply, _labelled)


async def _read(reply: Answer, read: Callable[[memoryview], F]) -> list[F]:
    """What `read` makes of the findings of each item, in a thread where they are many."""
    with reply:
        packed, spans = reply.tensors()["extraction"].data, reply.spans("extraction")
        large = packed.nbytes > INLINE_NBYTES
        return await off_loop_if(large, lambda: [read(packed[span]) for span in spans])


def _classes(found: memoryview) -> list[Classification]:
    return extraction.unpack(found).classifications


def _labelled(found: memoryview) -> list[dict[str, Any]]:
    return [{"score": one.score, "label": one.label} for one in _classes(found)]
