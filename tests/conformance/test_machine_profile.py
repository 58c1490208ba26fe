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
