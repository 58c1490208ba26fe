"""A model hub on a local port: the few routes of huggingface.co that a snapshot download uses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Files = Mapping[str, bytes]


class Hub:
    """`served` lists the files that were asked for."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server, self.url = server, f"http://127.0.0.1:{server.server_address[1]}"
        self.served: list[str] = []
        self.connections: list[socket.socket] = []

    def close(self) -> None:
        """Answer no more, end the connections that are kept alive, and refuse others."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def hub(repositories: Mapping[str, Files], gated: Mapping[str, str] | None = None) -> Iterator[Hub]:
    """A hub that answers until the end of the block or its `close`.

    `repositories` maps the id of each repository to its files, `gated` some ids to the one token that opens them.
    """
    tokens = gated or {}

    class Handler(BaseHTTPRequestHandler):
        """Repository information, file lists and files."""

        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            found.connections.append(self.connection)

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the terminal quiet."""

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            asked = re.fullmatch(
                "(?:api/models/)?([^/]+/[^/]+)/(revision|tree|resolve)/[^/]+(?:/(.+))?", path
            )
            if asked is None:
                self._send(404, b"{}")
            elif asked[1] in tokens and self.headers["Authorization"] != f"Bearer {tokens[asked[1]]}":
                self._send(
                    401 if self.headers["Authorization"] is None else 403,
                    b"{}",
                    {"X-Error-Code": "GatedRepo"},
                )
            elif asked[2] == "resolve":
                self._file(asked[1], asked[3])
            else:
                self._describe(asked[1], asked[2])

        def _describe(self, repo: str, kind: str) -> None:
            files = repositories.get(repo)
            if files is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif kind == "tree":
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in files.items()
                ]
                self._send(200, json.dumps(listed).encode())
            else:
                self._send(200, json.dumps({"id": repo, "sha": COMMIT}).encode())

        def _file(self, repo: str, file: str) -> None:
            data = repositories[repo][file]
            if self.command == "GET":
                found.served.append(f"{repo}/{file}")
            self._send(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Hub(server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.close()
        thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
