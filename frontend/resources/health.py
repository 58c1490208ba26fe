"""The routes of probes (`/healthz`, `/readyz`, `/ping`, `/health`) and of `/metrics`."""

from __future__ import annotations

import asyncio

import falcon
from falcon.asgi import Request, Response

from frontend.services import Services
from ipc.catalog.ids import split_id
from ipc.metrics import registry as metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LivenessResource:
    """200 while the process turns over, also while it drains."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """`ok`."""
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = "ok"

    on_head = on_get


class ReadinessResource:
    """200 when a proven model can be reached, 503 before that and while draining. `?model=` asks for one model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """`ok`, or `not ready` with the reason on a second line."""
        resp.content_type = falcon.MEDIA_TEXT
        model = req.get_param("model")
        ready, why = self._services.engine.ready()
        if ready and model is not None:
            state = self._services.directory.status(self._services.directory.find(model).id).state
            ready, why = state == "loaded", f"model is {state}"
        resp.status = falcon.HTTP_200 if ready else falcon.HTTP_503
        resp.text = "ok" if ready else f"not ready\n{why}\n"

    on_head = on_get


class MetricsResource:
    """Prometheus exposition of all processes of this server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tags: dict[tuple[str, int], dict[str, str]] = {}

    async def on_get(self, req: Request, resp: Response) -> None:
        """Merge the slots' files in a thread; 503 where metrics are switched off."""
        if not self._services.settings.server.metrics:
            resp.status, resp.content_type, resp.text = falcon.HTTP_503, falcon.MEDIA_TEXT, "metrics disabled"
            return
        self._services.recorder.flush()
        resp.content_type = METRICS_TYPE
        self._note_tags()
        resp.data = await asyncio.to_thread(metrics.render, self._services.settings.paths, dict(self._tags))

    def _note_tags(self) -> None:
        """The tags in the configurations of models; an unloaded model keeps its tags, as it keeps its figures."""
        for worker in self._services.directory.workers():
            for status in worker.models.values():
                if status.config is not None:
                    self._tags[split_id(status.name)] = status.config.metric_tags


class HealthResource:
    """`OK`, also as JSON, for clients that distinguish a server from a gateway by the answer of `/health`."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """`OK`, or a map for a client that names JSON."""
        if "application/json" in (req.get_header("Accept") or "").lower():
            resp.content_type = falcon.MEDIA_JSON
            resp.data = b'{"status":"ok","type":"worker"}'
            return
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = "OK"

    on_head = on_get
