"""The server that hostile requests are sent to, and the proof after each of them that it took no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import extractors
from tests.conformance.hostile import MAX_BODY_BYTES, MAX_GROWTH_BYTES, PATH, private_bytes
from tests.conformance.models import write_catalog
from tests.conformance.wire import FORMS
from tests.harness.server import Server, serving, wait_until


@pytest.fixture(scope="module")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int, int]]:
    """A warm server, its only frontend's pid, and that frontend's memory before the first bad request."""
    settings = {"limits.max_body_bytes": MAX_BODY_BYTES, "server.body_floor_after_s": 1.0}
    models = ("fake/echo", "fake/score")
    with serving(tmp_path_factory.mktemp("hostile"), models, settings) as server:
        for form in FORMS:
            for _ in range(20):
                assert form.post(server, PATH, {"items": [{"text": "warm"}]}).status == 200
        pid = server.frontend_pids()[0]
        yield server, pid, private_bytes(pid)


@pytest.fixture
def unharmed(warm_server: tuple[Server, int, int]) -> Iterator[Server]:
    """The server; afterwards the same frontend answers a good request, and holds no memory of the bad one."""
    server, pid, before = warm_server
    yield server
    assert server.encode("fake/echo", ["still here"]).status == 200
    assert server.frontend_pids() == [pid], "the frontend was replaced"
    wait_until(
        lambda: private_bytes(pid) - before <= MAX_GROWTH_BYTES,
        20,
        "the memory of the bad request given back",
    )


@pytest.fixture(scope="module")
def sie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models of `tests.conformance.models`."""
    place = tmp_path_factory.mktemp("sie")
    names = write_catalog(place / "catalog")
    with serving(place, names, catalog=place / "catalog") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_extractors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of the models of `tests.conformance.extractors`."""
    return extractors.build_all(tmp_path_factory.mktemp("extractors"))


@pytest.fixture(scope="module")
def extracting(tmp_path_factory: pytest.TempPathFactory, tiny_extractors: Path) -> Iterator[Server]:
    """A server with the models of `tests.conformance.extractors`."""
    place = tmp_path_factory.mktemp("extracting")
    names = extractors.write_catalog(place / "catalog", tiny_extractors)
    with serving(place, names, catalog=place / "catalog") as server:
        yield server
