"""POST /api/modelcontrol/{load,unload}/<model> and GET /api/repository/index."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.protocols.trtis_v1.answering import Resource, set_message
from frontend.services import Services
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb


async def control(services: Services, action: str, model: str, deadline_ns: int) -> None:
    """Load a model and wait for it, or begin to unload it. Raises as `RepositoryControl` does."""
    if action == "load":
        await services.extensions.control.load(model, {}, deadline_ns)
    elif action == "unload":
        await services.extensions.control.unload(model, {})
    else:
        raise InvalidInput(f"unknown model control {action[:64]!a}; known are load and unload")


def index(services: Services) -> pb.ModelRepositoryIndex:
    """Names of all models."""
    names = sorted({entry.name for entry in services.extensions.control.index()})
    return pb.ModelRepositoryIndex(models=[pb.ModelRepositoryIndex.ModelEntry(name=name) for name in names])


class ControlResource(Resource):
    """Models in and out of memory."""

    kind = "control"

    async def on_post(self, req: Request, resp: Response, action: str, model: str) -> None:
        """200 or 400, without a body."""
        deadline_ns = req.context.penstock.deadline_ns
        await self.answer(req, resp, control(self.services, action, model, deadline_ns))


class RepositoryResource(Resource):
    """The list of models."""

    kind = "index"

    async def on_get(self, req: Request, resp: Response) -> None:
        """A ModelRepositoryIndex, as text or in the wire format."""
        await self.answer(req, resp, self._list(req, resp))

    async def _list(self, req: Request, resp: Response) -> None:
        set_message(req, resp, index(self.services))
