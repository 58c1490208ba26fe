"""Tracing of one frontend, when it is configured."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from frontend.tracing import otlp
from frontend.tracing.exporter import Exporter
from frontend.tracing.tracer import Tracer
from ipc.settings import Settings


def start(settings: Settings, process: str, count: Callable[[str, int], Any]) -> Tracer | None:
    """The tracer of `process` (`frontend-0`), or None when `tracing.endpoint` is empty."""
    config = settings.tracing
    if not config.endpoint:
        return None
    instance = f"{socket.gethostname()}/{settings.instance}/{process}"
    return Tracer(Exporter(partial(otlp.connect, config, instance), count), config.sample_ratio)
