"""Gunicorn's and uvicorn's lines in the one form of all logs, and only those that an operator can use.

Their lines of level info (signals, pids, ASGI's lifespan) become lines of level debug. `frontend.arbiter.hooks` and
`frontend.lifespan` log what an operator needs of them.
"""

from __future__ import annotations

import logging
from typing import Any

from gunicorn.glogging import Logger

ERRORS_TO_STDERR = "-"


class ServerLogger(Logger):  # type: ignore[misc]
    """Gunicorn's logger, whose errors go where all of this process's lines go, unless `errorlog` names a file."""

    def setup(self, cfg: Any) -> None:
        """Called at the start and on each reload."""
        super().setup(cfg)
        if cfg.errorlog == ERRORS_TO_STDERR:
            self.error_log.handlers.clear()
            self.error_log.propagate = True
        if self.loglevel > logging.DEBUG:
            self.error_log.setLevel(max(self.loglevel, logging.WARNING))
