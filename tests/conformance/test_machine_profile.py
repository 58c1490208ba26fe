"""The header X-SIE-MACHINE-PROFILE: ignored unless the operator says what this machine is."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.wire import assert_refused
from tests.harness.server import Server, alive, serving, wait_until

ROUTES = {
    "/v1/encode/fake/echo": {"items": [{"text": "a"}]},
    "/v1/embeddings": {"model": "fake/echo", "input": "a"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server and its settings file lie."""
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """A server whose settings file says nothing yet."""
    config = place / "server.yaml"
    config.write_text("{}")
    with serving(place, config=config, supervised=False) as running:
        yield running


def reload_with(server: Server, place: Path, **settings: object) -> None:
    """Have all frontends replaced by ones with these settings of the section `server`."""
    (place / "server.yaml").write_text(json.dumps({"server": settings}))
    before = server.frontend_pids()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(map(alive, before)), what="the end of the old frontends")
    wait_until(lambda: server.get("/readyz").status == 200, what="readiness")


@pytest.mark.parametrize("gpu_type", ["", "L4"])
def test_the_strict_mode_compares_with_the_type_of_the_gpus(
    server: Server, place: Path, gpu_type: str
) -> None:
    reload_with(server, place, machine_profile_strict=True, gpu_type=gpu_type)
    for route, body in ROUTES.items():
        assert server.post(route, body).status == 200, "without the header every machine fits"
        assert (server.post(route, body, X_SIE_MACHINE_PROFILE="l4").status == 200) == bool(gpu_type)
    answer = server.post("/v1/encode/fake/echo", {}, X_SIE_MACHINE_PROFILE="h100")
    assert_refused(answer, 400, "INVALID_INPUT", "X-SIE-MACHINE-PROFILE", "machine_profile_strict")
    assert answer.json()["detail"]["worker_identity"] == (gpu_type or "unknown")


@pytest.mark.parametrize("own", ["", "L4"])
def test_a_profile_is_compared_only_where_one_is_configured(server: Server, place: Path, own: str) -> None:
    reload_with(server, place, machine_profile=own)
    for route, body in ROUTES.items():
        for asked, fits in ((None, True), ("l4", True), ("h100", not own), ("", not own)):
            headers = {} if asked is None else {"X_SIE_MACHINE_PROFILE": asked}
            assert (server.post(route, body, **headers).status == 200) == fits, (route, asked)
    if own:
        answer = server.post("/v1/encode/fake/nobody", {}, X_SIE_MACHINE_PROFILE="h100" * 40)
        assert_refused(answer, 400, "INVALID_INPUT", "X-SIE-MACHINE-PROFILE", "L4")
        detail = answer.json()["detail"]
        assert detail["worker_identity"] == "L4"
        assert detail["requested_profile"] == ("h100" * 40)[:64]
