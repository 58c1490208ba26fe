"""KServe v2 (the open inference protocol): REST, with binary tensors and the extensions that clients depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.kserve_v2 import errors
from frontend.protocols.kserve_v2.model_server import ConfigStatusResource, ReloadResource
from frontend.protocols.kserve_v2.models import ModelsResource
from frontend.protocols.kserve_v2.repository import RepositoryResource
from frontend.protocols.kserve_v2.server import LiveResource, ReadyResource, ServerResource
from frontend.protocols.kserve_v2.server_settings import LoggingResource, TraceResource
from frontend.protocols.kserve_v2.shared_memory import SharedMemoryResource
from frontend.services import Services
from ipc.errors import PenstockError


class KserveProtocol:
    """Routes and error form of KServe v2."""

    name = "kserve"
    prefixes: Sequence[str] = ("/v2", "/v1/config")

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        restrictions = services.restrictions
        given = (services, restrictions)
        server = ServerResource(*given)
        for path in ("/v2", "/v2/"):
            app.add_route(path, server)
        app.add_route("/v2/health/live", LiveResource(restrictions))
        app.add_route("/v2/health/ready", ReadyResource(*given))
        app.add_route("/v2/models/{tail:path}", ModelsResource(*given))
        app.add_route("/v2/repository/{tail:path}", RepositoryResource(*given))
        app.add_route("/v2/systemsharedmemory/{tail:path}", SharedMemoryResource(*given, "system"))
        app.add_route("/v2/cudasharedmemory/{tail:path}", SharedMemoryResource(*given, "cuda"))
        app.add_route("/v2/logging", LoggingResource(*given))
        app.add_route("/v2/trace/setting", TraceResource(*given))
        app.add_route("/v1/config", ConfigStatusResource(*given))
        app.add_route("/v1/config/reload", ReloadResource(*given))

    def inference_at(self, path: str) -> tuple[str, str]:
        """Which entry a name stands for is not known before the request is let in."""
        return ("infer" if path.endswith("/infer") else ""), ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error, path)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The same for an error of the framework."""
        return errors.render_http(error, path)
