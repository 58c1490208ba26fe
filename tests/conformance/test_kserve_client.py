"""KServe v2 with the public clients over HTTP and gRPC: every call they offer, on a server with tiny programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ipc.memory.datatypes import DATATYPES
from tests.harness.apart import Apart, functions_of
from tests.harness.cluster import GATEWAY, ways_to
from tests.harness.rpc import address_of, grpc_settings
from tests.harness.server import Server, serving
from tests.harness.status import wait_joined
from tests.tiny.program_sources import IDENTITY
from tests.tiny.programs import SCRIPTED, tensor, write_repository

CLIENTS = tuple(f"tests.conformance.triton_{kind}" for kind in ("http", "http_aio", "grpc", "grpc_aio"))
MODELS = ("add_sub", "versions_all", "classifier", "slow", "raising", "broken", "accumulator", "countdown")


def write_identities(repository: Path) -> None:
    """One program for each datatype that gives back what it gets."""
    for name in DATATYPES:
        place = repository / f"identity_{name.lower()}"
        (place / "1").mkdir(parents=True)
        sides = tensor("input", "INPUT", name, [-1]) + tensor("output", "OUTPUT", name, [-1])
        (place / "config.pbtxt").write_text(f"max_batch_size: 8\n{sides}")
        (place / "1" / "model.py").write_text(IDENTITY)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("kserve-client")
    repository = write_repository(place / "models", MODELS, SCRIPTED)
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
    with serving(place, ("fake/echo",), grpc_settings(**settings), supervised=False) as running:
        wait_joined(running)
        yield running


server = ways_to("local")


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Apart]]:
    with ExitStack() as stack:
        yield {module: stack.enter_context(Apart(module)) for module in CLIENTS}


def each(prefix: str) -> pytest.MarkDecorator:
    """The calls of all clients whose names begin so."""
    cases = [(module, case) for module in CLIENTS for case in functions_of(module, prefix)]
    return pytest.mark.parametrize(("module", "case"), cases)


def call(server: Server, clients: dict[str, Apart], module: str, case: str) -> None:
    """Run one of the calls."""
    address = address_of(server) if "grpc" in module else f"127.0.0.1:{server.port}"
    clients[module].call(case, address=address)


@each("check_")
def test_the_public_clients(server: Server, clients: dict[str, Apart], module: str, case: str) -> None:
    call(server, clients, module, case)


@each("host_")
def test_loads_and_regions_of_the_public_clients(
    local: Server, clients: dict[str, Apart], module: str, case: str
) -> None:
    call(local, clients, module, case)


@each("gateway_")
@pytest.mark.parametrize("server", [GATEWAY], indirect=True)
def test_a_gateway_has_neither_loads_nor_regions(
    server: Server, clients: dict[str, Apart], module: str, case: str
) -> None:
    call(server, clients, module, case)
