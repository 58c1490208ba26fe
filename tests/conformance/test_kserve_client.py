"""KServe v2 over HTTP with the public clients: every call they offer, on a server with tiny programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.test_kserve_grpc import write_identities
from tests.harness.apart import Apart, functions_of
from tests.harness.server import Server, serving
from tests.tiny.programs import write_repository

CLIENT = "tests.conformance.triton_http"
MODELS = ("add_sub", "versions_all", "classifier")


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
        "shared_memory.enabled": "true",
        "server.frontends": 2,
    }
    with serving(place, ("fake/echo",), settings) as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Iterator[Apart]:
    with Apart(CLIENT) as apart:
        yield apart


@pytest.mark.parametrize("case", functions_of(CLIENT, "check_"))
def test_the_public_client(server: Server, client: Apart, case: str) -> None:
    client.call(case, address=f"127.0.0.1:{server.port}")
