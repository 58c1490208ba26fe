"""GET /v2/models/stats and /v2/models/{model}[/versions/{version}]/stats."""

from __future__ import annotations

from typing import Any

from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers, describing
from frontend.protocols.kserve_v2.paths import Target
from frontend.services import Services
from frontend.tensors.statistics import Duration, ModelStatistics, RequestStatistics


class StatisticsResource:
    """Figures of the whole server; of all models without a target."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, target: Target | None = None) -> None:
        """One entry per version of a model."""
        self._restrictions.check("statistics", req.get_header)
        name, version = (target.name, target.version) if target is not None else ("", None)
        found = await describing.statistics(self._services, name, version)
        stats = [model_statistics(model, state.version, figures) for model, state, figures in found]
        answers.send(resp, {"model_stats": stats})

    on_head = on_get


def model_statistics(name: str, version: int, found: ModelStatistics) -> dict[str, Any]:
    """The entry of one version."""
    return {
        "name": name,
        "version": str(version),
        "last_inference": found.last_inference_ms,
        "inference_count": found.inference_count,
        "execution_count": found.execution_count,
        "inference_stats": _requests(found.requests),
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(run.compute_input),
                "compute_infer": _duration(run.compute_infer),
                "compute_output": _duration(run.compute_output),
            }
            for size, run in sorted(found.by_run_size.items())
        ],
        "memory_usage": [],
    }


def _requests(found: RequestStatistics) -> dict[str, Any]:
    none = _duration(Duration())
    return {
        "success": _duration(found.success),
        "fail": _duration(found.fail),
        "queue": _duration(found.queue),
        "compute_input": _duration(found.compute_input),
        "compute_infer": _duration(found.compute_infer),
        "compute_output": _duration(found.compute_output),
        "cache_hit": none,
        "cache_miss": none,
    }


def _duration(found: Duration) -> dict[str, int]:
    return {"count": found.count, "ns": found.ns}
