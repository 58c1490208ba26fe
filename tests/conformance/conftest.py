"""Servers that the tests of several files share, and the proof after a hostile request that its server took no harm.

The tests of one of these servers run in one process (`SHARED_SERVERS` in `tests/conftest.py`), so that it starts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from tests.conformance import (
    encoders,
    extractors,
    kserve_limits,
    minilm,
    score_references,
    sights,
    towers,
    trtis,
)
from tests.conformance.hostile import MAX_BODY_BYTES, MAX_GROWTH_BYTES, MAX_IMAGE_BYTES, PATH, private_bytes
from tests.conformance.models import write_catalog
from tests.conformance.trtis_transports import Stub
from tests.conformance.wire import FORMS
from tests.harness.browser import Browser, browser
from tests.harness.cluster import ways_to
from tests.harness.keys import SLOW_KEYS, STRANGER, bearer, write_keys
from tests.harness.rpc import address_of, grpc_settings
from tests.harness.server import FAKE_CATALOG, ROOT, Server, serving, wait_until
from tests.harness.status import wait_joined
from tests.tiny.programs import SCRIPTED, write_repository


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the tests of a file."""
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


class Keyed(NamedTuple):
    """A server that wants keys, and the keys by name."""

    server: Server
    keys: dict[str, str]


class Families(NamedTuple):
    """A server, and the directory with one directory of models for each of the modules that write them."""

    server: Server
    place: Path


class Warm(NamedTuple):
    """A server that has answered, its only frontend's pid, and that frontend's memory before the first bad request."""

    server: Server
    pid: int
    nbytes: int


@pytest.fixture(scope="session")
def hostile_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for no body for long."""
    settings = {"limits.max_body_bytes": MAX_BODY_BYTES, "server.body_floor_after_s": 1.0}
    models = ("fake/echo", "fake/score")
    with serving(tmp_path_factory.mktemp("hostile"), models, settings, supervised=False) as server:
        yield server


either_hostile = ways_to("hostile_server")


@pytest.fixture(scope="module")
def warm_server(either_hostile: Server) -> Warm:
    """That server, or a gateway whose only box is this server."""
    for form in FORMS:
        for _ in range(20):
            assert form.post(either_hostile, PATH, {"items": [{"text": "warm"}]}).status == 200
    [pid] = either_hostile.frontend_pids()
    return Warm(either_hostile, pid, private_bytes(pid))


@pytest.fixture
def unharmed(warm_server: Warm) -> Iterator[Server]:
    """The server; afterwards the same frontend answers a good request, and holds no memory of the bad one."""
    server, pid, before = warm_server
    yield server
    assert server.encode("fake/echo", ["still here"]).status == 200
    assert server.frontend_pids() == [pid], "the frontend was replaced"
    wait_until(
        lambda: private_bytes(pid) - before <= MAX_GROWTH_BYTES,
        what="the memory of the bad request given back",
    )


@pytest.fixture(scope="session")
def sie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models of `tests.conformance.models`, which keeps embeddings."""
    place = tmp_path_factory.mktemp("sie")
    names = write_catalog(place / "catalog")
    settings = {"cache.embeddings_bytes": 16 << 20}
    with serving(place, names, settings, catalog=place / "catalog", supervised=False) as server:
        yield server


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Scorers that obey their texts, one with little memory, and models without scores, one of which never loads."""
    models = ("fake/score", "fake/echo", "fake/broken", "fake/small-score")
    with serving(tmp_path_factory.mktemp("fakes"), models, supervised=False) as server:
        yield server


@pytest.fixture(scope="session")
def minilm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped MiniLM and its variants, and two fake models that fail in known ways."""
    place = tmp_path_factory.mktemp("minilm")
    minilm.write_variants(place / "catalog")
    models = (minilm.MODEL, minilm.HALF, minilm.PROMPTED, "fake/echo", "fake/broken")
    dirs = ",".join(map(str, (ROOT / "config" / "models", place / "catalog", FAKE_CATALOG)))
    with serving(place, models, {"catalog.dirs": dirs}, supervised=False) as server:
        yield server


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    """A server with one tiny model or more of every family, and where they lie; one is served by its path alone."""
    place = tmp_path_factory.mktemp("families")
    written = {
        name: write(place / name)
        for name, write in {
            "encoders": encoders.write_models,
            "extractors": extractors.write_models,
            "rerankers": score_references.write_models,
            "sights": sights.write_models,
            "towers": partial(towers.write_models, wanted=towers.ENCODERS),
        }.items()
    }
    ids = [model for models in written.values() for model in models]
    assert len(set(ids)) == len(ids)
    dirs = ",".join(str(place / name / "catalog") for name in written)
    settings = {
        "catalog.dirs": dirs,
        "limits.load_wait_s": 60,
        "limits.max_image_bytes": MAX_IMAGE_BYTES,
        "server.compatible": "tei,vllm:/classify",
        "server.default_models": "tiny/mean,tiny/splade,tiny/colbert-pylate,cross-encoder/logits,tiny/moods",
    }
    with serving(place, ids, settings, named=[f"{encoders.lone_model(place)}={encoders.LONE}"]) as server:
        yield Families(server, place)


either_families = ways_to("families")


@pytest.fixture
def tiny_extractors(families: Families) -> Path:
    """The directories of the models of `tests.conformance.extractors`."""
    return families.place / "extractors"


@pytest.fixture
def extracting(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A server with keys that logs and keeps all it can; at the end nothing that it wrote or shows may hold a secret.

    Its programs are of Python, which need no framework.
    Every test that uses up a rate has a slow key of its own.
    """
    place = tmp_path_factory.mktemp("keyed")
    slow = {"scopes": ["infer", "admin"], "requests_per_s": 0.01}
    entries = {
        "infer": {},
        "neighbour": {},
        "admin": {"scopes": ["admin"]},
        "both": {"scopes": ["infer", "admin"]},
        "slow-early": slow,
        "slow-grpc": {**slow, "burst": 2},
        **{f"slow-{number}": slow for number in range(SLOW_KEYS)},
    }
    keys = write_keys(place / "keys.json", entries)
    settings = {
        "server.keys_file": place / "keys.json",
        "server.compatible": "tei",
        "server.max_header_bytes": 65536,
        "server.default_models": "fake/echo",
        "cache.embeddings_bytes": 4 << 20,
        "repository.dirs": write_repository(place / "models", ["accumulator", "identity_bytes"]),
        "repository.allow_python": "true",
        "log.level": "debug",
        "log.format": "json",
    }
    with serving(place, settings=grpc_settings(**settings), fresh=True) as server:
        yield Keyed(server, keys)
        shown = [server.get("/metrics").body.decode(), server.log]
        for pid in server.pids():
            shown += [
                Path(f"/proc/{pid}/{name}").read_bytes().decode("latin-1") for name in ("cmdline", "environ")
            ]
        for key in (*keys.values(), STRANGER):
            assert not any(key.split("_", 2)[2] in text for text in shown)


either_keyed = ways_to("keyed_server", key=lambda keyed: bearer(keyed.keys["both"]))


@pytest.fixture(scope="session")
def kserve_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One frontend with two programs and regions of clients, over HTTP and gRPC; its collector of spans is not there.

    Tests put settings of logs and traces back, and take away the regions that they register.
    """
    place = tmp_path_factory.mktemp("kserve")
    settings = {
        "repository.dirs": write_repository(place / "models", ["add_sub", "identity_bytes"], SCRIPTED),
        "repository.allow_python": "true",
        "catalog.dirs": "",
        "catalog.models": "",
        "shared_memory.enabled": "true",
        "shared_memory.max_region_bytes": 1 << 20,
        "tracing.endpoint": "http://127.0.0.1:9/v1/traces",
        "log.format": "json",
    }
    with serving(place, (), grpc_settings(**settings), supervised=False) as running:
        yield running


@pytest.fixture(scope="session")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One frontend with the models of `tests.conformance.kserve_limits`, over HTTP and gRPC, and low limits."""
    place = tmp_path_factory.mktemp("limited")
    with serving(
        place, ("fake/echo",), grpc_settings(**kserve_limits.settings(place)), supervised=False
    ) as running:
        yield running


@pytest.fixture(scope="session")
def trtis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends with the models of `tests.conformance.trtis`, over HTTP and gRPC, and regions of clients.

    One test changes the models: the only test of `fading` removes this model. Tests take their regions away.
    """
    place = tmp_path_factory.mktemp("trtis")
    settings = {
        "repository.dirs": trtis.write_models(place / "models"),
        "repository.allow_python": "true",
        "server.frontends": 2,
        "shared_memory.enabled": "true",
    }
    with serving(place, ("fake/echo",), grpc_settings(**settings)) as server:
        wait_joined(server)
        wait_until(lambda: server.get("/api/health/ready").status == 200, 120, "all models")
        yield server


either_trtis = ways_to("trtis_server")


@pytest.fixture(scope="module")
def trtis_stub(either_trtis: Server) -> Iterator[Stub]:
    """The gRPC service of that server, or of a gateway whose only box is this server."""
    with grpc.insecure_channel(address_of(either_trtis)) as channel:
        yield Stub(channel)
