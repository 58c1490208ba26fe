"""KServe v2 over HTTP with the public clients: every call they offer, on a server with tiny programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.test_kserve_grpc import write_identities
from tests.harness.apart import Apart, functions_of
from tests.harness.server import Server, serving
from tests.harness.status import wait_joined
from tests.tiny.programs import write_repository

CLIENTS = ("tests.conformance.triton_http", "tests.conformance.triton_http_aio")
MODELS = ("add_sub", "versions_all", "classifier", "accumulator")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("kserve-client")
    repository = write_repository(place / "models", MODELS)
    write_identities(repository)
    settings = {
        "repository.dirs": repository,
        "repository.allow_python": "true",
        "repository.control": "explicit",
        "repository.models": ",".join(sorted(path.name for path in repository.iterdir())),
        "repository.allow_files": "true",
        "shared_memory.enabled": "true",
        "server.frontends": 2,
    }
    with serving(place, ("fake/echo",), settings) as running:
        wait_joined(running)
        yield running


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Apart]]:
    with ExitStack() as stack:
        yield {module: stack.enter_context(Apart(module)) for module in CLIENTS}


@pytest.mark.parametrize(
    ("module", "case"), [(module, case) for module in CLIENTS for case in functions_of(module, "check_")]
)
def test_the_public_clients(server: Server, clients: dict[str, Apart], module: str, case: str) -> None:
    clients[module].call(case, address=f"127.0.0.1:{server.port}")
