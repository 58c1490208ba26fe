"""What a route of this contract says about itself: how to check, plan and render. `flow` does all else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from frontend.engine.answer import Answer
from frontend.engine.options import Resolved, resolve
from frontend.protocols.sie.schemas import Body, EncodeParams, ExtractParams, ScoreRequest
from frontend.resources.sending import Buffer, InferenceRoute
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import IN_PARAMS, FieldNames
from ipc.wire.messages import Call, ModelStatus

C = TypeVar("C", bound=Call)


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """What a worker is asked to do; routes add what rendering needs.

    `model` is a catalog id, of a profile's variant where the request chose a profile.
    """

    model: str
    call: C


class Form(NamedTuple):
    """How the answer is written: as JSON or msgpack, with the fields `beside` the results in the contract's own forms.

    These fields are `usage` and, where the request asks for them, `warnings`.
    """

    json: bool
    beside: dict[str, Any]


R = TypeVar("R", bound=Body)
P = TypeVar("P", bound=Plan[Any])


class ModelRoute(InferenceRoute, Generic[R, P]):
    """The parts that are special to one route.

    `body` is the struct of the requests. `capability` is the output that a model must list to be asked at all (empty:
    decided in `plan`). `always_json`: both bodies are JSON whatever the headers say. `itemized`: an item can have an
    error of its own in the answer. `kept` says which whole answers may be kept: none, "plain" ones, or those that are
    "timed" (`frontend.protocols.sie.repeating`).
    """

    body: type[R]
    capability: ClassVar[str] = ""
    always_json: ClassVar[bool] = False
    itemized: ClassVar[bool] = False
    kept: ClassVar[Literal["", "plain", "timed"]] = ""

    def model_of(self, request: R) -> str:
        """The model of a request whose path names none. Raises `ModelNotFound` where the request leaves it open."""
        name: str = getattr(request, "model", "")
        return name

    def params_of(self, request: R) -> EncodeParams | ExtractParams | ScoreRequest | None:
        """What holds the options of a request, which may choose a profile; None where it has none."""
        return None

    def resolve(
        self,
        entry: ModelEntry,
        options: dict[str, Any] | None,
        instruction: str | None,
        items: int,
        names: FieldNames = IN_PARAMS,
    ) -> Resolved:
        """The options that hold for a request over `items` items. Raises `InvalidInput` that names the field."""
        catalog, limits = self.services.catalog, self.services.settings.limits
        return resolve(entry, options, instruction, catalog, items, limits, names)

    @abstractmethod
    def examine(self, request: R) -> None:
        """Raise `InvalidInput` for a body that no model could answer; a model is looked up only afterwards.

        Called in a thread for a large body.
        """

    @abstractmethod
    def check(self, request: R, entry: ModelEntry) -> Any:
        """The inputs as workers take them. Raises `InvalidInput` for what this model cannot take; nothing is loaded.

        Called in a thread for a large body.
        """

    def images(self, request: R, inputs: Any) -> Sequence[tuple[str, bytes]]:
        """JSON path and bytes of each image of `inputs`, which `check` returned."""
        return ()

    @abstractmethod
    def plan(self, request: R, entry: ModelEntry, inputs: Any, status: ModelStatus) -> P:
        """The call, from what `check` returned and the request's options; `status` is that of the loaded model."""

    @abstractmethod
    async def render(
        self, reply: Answer, plan: P, request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body of the answer.

        May close the answer early (`with reply:`), once it holds no views.
        """
