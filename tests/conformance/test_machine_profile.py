"""The header X-SIE-MACHINE-PROFILE: ignored unless the operator says what this machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.wire import assert_refused
from tests.harness.server import serving

ROUTES = {
    "/v1/encode/fake/echo": {"items": [{"text": "a"}]},
    "/v1/embeddings": {"model": "fake/echo", "input": "a"},
}


@pytest.mark.parametrize("gpu_type", ["", "L4"])
def test_the_strict_mode_compares_with_the_type_of_the_gpus(tmp_path: Path, gpu_type: str) -> None:
    settings = {"server.machine_profile_strict": "true", "server.gpu_type": gpu_type}
    with serving(tmp_path, settings=settings) as server:
        for route, body in ROUTES.items():
            assert server.post(route, body).status == 200, "without the header every machine fits"
            assert (server.post(route, body, X_SIE_MACHINE_PROFILE="l4").status == 200) == bool(gpu_type)
        answer = server.post("/v1/encode/fake/echo", {}, X_SIE_MACHINE_PROFILE="h100")
        assert_refused(answer, 400, "INVALID_INPUT", "X-SIE-MACHINE-PROFILE", "machine_profile_strict")
        assert answer.json()["detail"]["worker_identity"] == (gpu_type or "unknown")


@pytest.mark.parametrize("own", ["", "L4"])
def test_a_profile_is_compared_only_where_one_is_configured(tmp_path: Path, own: str) -> None:
    with serving(tmp_path, settings={"server.machine_profile": own}) as server:
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
