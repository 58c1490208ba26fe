"""A frontend over the engine of `tests.fakes.remote`, and its start beside the server whose workers do the work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frontend import app
from frontend.assembly import Backend
from frontend.services import Services
from tests.fakes.remote import Link, RemoteEngine, RemoteModels
from tests.harness.parent import ends_with_parent
from tests.harness.ports import free_port
from tests.harness.server import ROOT, Server, wait_until

ADDRESS = "TEST_FAR_END"
"""The variable that names the socket of the far end."""


def create() -> app.Application:
    """The application of Gunicorn's children."""

    def behind(services: Services) -> Backend:
        link = Link(os.environ[ADDRESS])
        return Backend(RemoteEngine(link), RemoteModels(link, services.catalog), link.start, link.close)

    return app.create(behind=behind)


@contextmanager
def gateway(place: Path, behind: Server, *model: str) -> Iterator[Server]:
    """A server without workers. Its engine is a process that has joined the workers of `behind`, or says a text."""
    address, port = place / "far.sock", free_port()
    log = (place / "far.log").open("wb")
    command = [sys.executable, "-m", "tests.fakes.far_end", str(address), *model]
    far = subprocess.Popen(
        command,
        cwd=ROOT,
        env=behind.environment,
        stdout=log,
        stderr=log,
        preexec_fn=ends_with_parent(),
    )
    try:
        wait_until(address.exists, what="the far end")
        environment = behind.environment | {
            "PENSTOCK_SERVER__BIND": f"127.0.0.1:{port}",
            "PENSTOCK_SERVER__FRONTENDS": "1",
            "PENSTOCK_RUN__DIR": str(place / "near"),
            "PENSTOCK_RUN__INSTANCE": f"t{port}",
            "PENSTOCK_GRPC__ENABLED": "false",
            "PENSTOCK_SUPERVISE": "0",
            ADDRESS: str(address),
        }
        server = Server(port, place / "near", place / "server.log", environment)
        server.application, server.fresh = "tests.fakes.gateway:create()", False
        server.start()
        try:
            server.wait_ready()
            wait_until(lambda: server.get("/readyz").status == 200, what="news of the far end")
            yield server
            assert server.stop() == 0
            server.assert_no_stack()
            server.assert_nothing_left()
        finally:
            server.kill_everything()
    finally:
        far.terminate()
        far.wait()
        log.close()
        for arena in Path(behind.environment["PENSTOCK_RUN__SHM_DIR"]).glob(
            f"penstock.{behind.environment['PENSTOCK_RUN__INSTANCE']}.f90.*"
        ):
            arena.unlink()
