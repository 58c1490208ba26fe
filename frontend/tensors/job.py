"""One checked request on its way to a worker, as the two kinds of calls see it (`infer_calls`, `catalog_calls`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.interface import Payload
from frontend.engine.planning import plan
from frontend.tensors.models import TensorModel
from frontend.tensors.refusals import UnavailableModel
from frontend.tensors.request import TensorRequest
from frontend.tensors.result import OutputTensor
from ipc.errors import DependencyConflict, ModelLoadFailed, ModelNotFound
from ipc.wire.messages import Call

if TYPE_CHECKING:
    from frontend.engine.scope import RequestScope
    from frontend.services import Services

Called = tuple[Answer, Callable[[], list[OutputTensor]]]
"""A reply, and what reads the wanted outputs out of it, in order."""
_FIRST = 1
"""The priority that goes before all others; 0 leaves the choice to the cost."""


@dataclass(slots=True)
class Job:
    """A request over `rows` rows to `served`; `scope` as in `running.run`."""

    services: Services
    context: RequestScope
    served: TensorModel
    request: TensorRequest
    rows: int
    scope: dict[str, Any] | None

    async def run(self, call: Call, cost: int, payload: Payload = None) -> Answer:
        """Run a call in the lane of the request's priority. Raises `UnavailableModel` when it fails meanwhile."""
        work = plan(self.context, self.services.settings, self.served.id, call, cost, lane=self._lane)
        with self._naming_model():
            return await self.services.engine.run(self.context, work, payload)

    @asynccontextmanager
    async def stream(self, call: Call, cost: int, payload: Payload = None) -> AsyncIterator[AnswerStream]:
        """The same for a call that is answered in parts (`Engine.stream`)."""
        settings, lane = self.services.settings, self._lane
        work = plan(self.context, settings, self.served.id, call, cost, lane=lane, streams=True)
        with self._naming_model():
            async with self.services.engine.stream(self.context, work, payload) as parts:
                yield parts

    @contextmanager
    def _naming_model(self) -> Iterator[None]:
        asked = self.request.model, self.request.version
        try:
            yield
        except (ModelLoadFailed, DependencyConflict) as error:
            raise UnavailableModel(*asked, "failed", error.message) from error
        except ModelNotFound as error:
            raise self.services.models.gone(*asked) from error

    @property
    def _lane(self) -> str:
        priority = self.request.priority
        return "" if not priority else "interactive" if priority == _FIRST else "bulk"
