"""The scope that a path needs. A path that is not named here needs `infer`: new routes are closed by default."""

from __future__ import annotations

import re
from typing import Literal

Need = Literal["", "infer", "admin"]

OPEN = frozenset(
    (
        "/",
        "/healthz",
        "/livez",
        "/readyz",
        "/ping",
        "/health",
        "/api/health/live",
        "/api/health/ready",
        "/v2/health/live",
        "/v2/health/ready",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/api-doc/openapi.json",
    )
)
"""Probes, and pages that hold no data of this server."""
OPEN_FOLDER = "/docs/"
ADMIN_FOLDERS = (
    "/v1/admin/",
    "/api/modelcontrol/",
    "/api/sharedmemorycontrol/register/",
    "/api/sharedmemorycontrol/cudaregister/",
    "/api/sharedmemorycontrol/unregister",
)
ADMIN_PATHS = frozenset(("/v1/models/unload", "/v1/models/reload", "/v1/system/info", "/v1/system/doctor"))
"""Loading and unloading by request, and facts about the machine."""
ADMIN_V2 = re.compile(
    r"/v2/(repository/(.+/)?(load|unload)"
    r"|(system|cuda)sharedmemory/(.+/)?(register|unregister)"
    r"|logging|(models/.+/)?trace/setting)/?|/v1/config/reload",
    re.DOTALL,
)
"""Paths of KServe v2 that change the server, or the settings of its log and traces."""


def need_of(path: str, open_metrics: bool) -> Need:
    """Scope that a normalized path (`frontend.http.listeners`) needs; empty when it is open to all."""
    if path.startswith(ADMIN_FOLDERS) or path in ADMIN_PATHS or ADMIN_V2.fullmatch(path):
        return "admin"
    if path in OPEN or path.startswith(OPEN_FOLDER) or (open_metrics and path == "/metrics"):
        return ""
    return "infer"
