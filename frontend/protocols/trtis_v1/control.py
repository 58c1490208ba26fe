"""POST /api/modelcontrol/{load,unload}/<model> and GET /api/repository/index."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.protocols.trtis_v1.answering import Resource, set_message
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.services import Services
from ipc.protos import trtis_v1_pb2 as pb


async def control(services: Services, action: str, model: str, deadline_ns: int) -> None:
    """`load` a model and wait for it, or begin to `unload` it. Raises as `RepositoryControl` does."""
    if action == "load":
        await services.extensions.control.load(model, {}, deadline_ns)
    else:
        await services.extensions.control.unload(model, {}, deadline_ns)


def index(services: Services) -> pb.ModelRepositoryIndex:
    """Names of all models."""
    names = sorted({entry.name for entry in services.extensions.control.index()})
    return pb.ModelRepositoryIndex(models=[pb.ModelRepositoryIndex.ModelEntry(name=name) for name in names])


class ControlResource(Resource):
    """Models in and out of memory."""

    kind = "control"

    def __init__(self, services: Services, statuses: Statuses, action: str) -> None:
        super().__init__(services, statuses)
        self._action = action

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """200 or 400, without a body."""
        deadline_ns = req.context.penstock.deadline_ns
        await self.answer(req, resp, control(self.services, self._action, model, deadline_ns))


class RepositoryResource(Resource):
    """The list of models."""

    kind = "index"

    async def on_get(self, req: Request, resp: Response) -> None:
        """A ModelRepositoryIndex, as text or in the wire format."""
        await self.answer(req, resp, self._list(req, resp))

    async def _list(self, req: Request, resp: Response) -> None:
        set_message(req, resp, index(self.services))
