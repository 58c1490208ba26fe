"""The Gunicorn worker class of Penstock's frontends: uvloop, httptools, deadlines, bounded buffers, a lossless drain.

Worker is Gunicorn's word for its child, which is a frontend here.

`gunicorn.conf.py` sets `worker_class = PenstockWorker` and `PenstockWorker.limits`. Gunicorn's `graceful_timeout` and
`timeout` hold; its `keepalive` and `worker_connections` are superseded by `limits`. Gunicorn's own access log is off
unless `accesslog` is set; Penstock's is `log.access` (`frontend.access_log`).

Gunicorn's native class (`worker_class = "asgi"`) serves the same application and is the alternative. The native class
lacks:

- the header deadline for silent and half-header connections, the floor for slow bodies, the connection cap;
- the deadline for clients that do not read their response;
- the drain: a reload under keep-alive load loses requests, because the last answer does not say `Connection: close`;
- `drain` in the state of the scopes, and the JSON form of the server's own errors;
- WebSockets whose clients are cut off when they take nothing, and that say 1001 in a drain.

`ServerLogger` brings Gunicorn's and uvicorn's lines into the one form of all logs, and only those that an operator can
use.

Their lines of level info (signals, pids, ASGI's lifespan) become lines of level debug. `frontend.arbiter.hooks` and
`frontend.lifespan` log what an operator needs of them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from typing import Any, ClassVar

from gunicorn.arbiter import Arbiter
from gunicorn.glogging import Logger
from uvicorn_worker import UvicornWorker

from frontend.server import state
from frontend.server.drain import DRAIN
from frontend.server.protocol import PenstockProtocol
from frontend.server.serving import DrainingServer
from frontend.server.state import ServerLimits
from frontend.server.websocket import PenstockWebSocket

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


class PenstockWorker(UvicornWorker):  # type: ignore[misc]
    """One frontend process under Gunicorn."""

    limits: ClassVar[ServerLimits] = ServerLimits()

    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {
        "loop": "uvloop",
        "http": PenstockProtocol,
        "ws": PenstockWebSocket,
        "ws_max_size": 64 * 1024,
        "ws_per_message_deflate": False,
        "lifespan": "on",
        "server_header": False,
        "proxy_headers": False,
        "callback_notify": None,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_alone = False
        # uvicorn's lines go the way of Gunicorn's.
        logging.getLogger("uvicorn.error").propagate = self.log.error_log.propagate

    def init_process(self) -> None:
        """Make room for the connections that the limits allow, then boot and serve."""
        limits = self.limits
        connections = (limits.max_connections, limits.max_grpc_connections)
        state.raise_file_limit(state.files_for(connections))
        allowed, _ = state.connection_shares(connections, state.hard_limit())
        if allowed < limits.max_connections:
            self.log.warning("server.max_connections: the limit of open files leaves room for %d", allowed)
            type(self).limits = dataclasses.replace(limits, max_connections=allowed)
        super().init_process()

    async def _serve(self) -> None:
        self.config.app = self.wsgi
        limits = dataclasses.replace(self.limits, graceful_timeout_s=float(self.cfg.graceful_timeout))
        server = DrainingServer(self.config, limits, DRAIN, heartbeat=lambda: self._beat(server))
        await server.serve(sockets=[listener.sock for listener in self.sockets])
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR)

    def _beat(self, server: DrainingServer) -> None:
        """Tell the arbiter that this process turns over; drain if the arbiter is gone."""
        self.notify()
        if os.getppid() != self.ppid and not self._is_alone:
            self._is_alone = True
            self.log.critical("The arbiter is gone; this frontend drains.")
            server.end_soon()
