"""Which scope a path needs. What is not named here needs `infer`: a new route is closed until somebody opens it."""

from __future__ import annotations

from typing import Literal

Need = Literal["", "infer", "admin"]

OPEN = frozenset(("/", "/healthz", "/livez", "/readyz", "/health", "/docs", "/redoc", "/openapi.json"))
"""Probes, and pages that hold no data of this server."""
ADMIN_FOLDERS = ("/v1/admin/",)


def need_of(path: str, open_metrics: bool) -> Need:
    """Scope that `path` (decoded) needs; empty when it is open to all."""
    # NOTE: the router ignores further slashes at the start; a path must not get another scope by them.
    path = "/" + path.lstrip("/")
    if path.startswith(ADMIN_FOLDERS):
        return "admin"
    if path in OPEN or (open_metrics and path == "/metrics"):
        return ""
    return "infer"
