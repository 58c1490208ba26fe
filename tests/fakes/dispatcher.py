"""The operator's program behind a dispatch URL: notes calls, and answers as the test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson


@dataclass
class Dispatcher:
    """`bodies` are answered in turn, with `status`; without `bodies` each answer waits for `release`."""

    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def dispatcher(*bodies: bytes, **fields: Any) -> Iterator[Dispatcher]:
    """A program that listens until the block ends."""
    found = Dispatcher(bodies=list(bodies), **fields)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.calls.append(orjson.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if not found.bodies:
                found.release.wait()
                return
            body = found.bodies.pop(0)
            self.send_response(found.status)
            for name, value in {"Content-Length": str(len(body)), **found.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/run"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
