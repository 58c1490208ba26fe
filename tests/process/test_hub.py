"""A server whose models come from a hub: a mirror, a token, repositories that refuse it, and a hub that goes away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.hub import hub
from tests.harness.lifecycle import ON_DEMAND, info, load, state, unload
from tests.harness.server import make_server, wait_until
from tests.process.test_models_command import WEIGHTS

TOKEN = "hf_" + "k" * 32


@pytest.mark.long
def test_models_of_a_mirror_load_with_their_token_and_failures_say_what_to_do(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    repositories = dict.fromkeys(("org/open", "org/gated", "org/other", "org/late"), files)
    gated = {"org/gated": TOKEN, "org/other": TOKEN[:-1] + "x"}
    (tmp_path / "models").mkdir()
    for name in (*repositories, "org/absent"):
        entry = {
            "id": name,
            "source": {"kind": "hub", "repo": name},
            "adapter": "tests.fakes.adapter:FakeAdapter",
            "outputs": {"dense": {"dims": 16}},
        }
        (tmp_path / "models" / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(entry))
    with hub(repositories, gated) as found:
        server = make_server(tmp_path, (), ON_DEMAND, tmp_path / "models")
        server.environment |= {"HF_ENDPOINT": found.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        server.environment["HF_HOME"] = str(tmp_path / "hub")
        server.start()
        try:
            server.wait_ready()
            assert [server.encode(name, ["x"]).status for name in ("org/open", "org/gated")] == [200, 200]
            told = {name: server.encode(name, ["x"]).json()["detail"] for name in ("org/other", "org/absent")}
            found.close()
            load(server, "org/late", wait=False)
            assert unload(server, "org/gated").status == 200 and load(server, "org/gated").status == 200
            assert state(server, "org/gated") == "loaded", "what the cache has needs no hub"
            last = wait_until(
                lambda: info(server, "org/late")["last_error"], what="the end of the client's tries"
            )
            log = server.log
        finally:
            server.kill_everything()
    host = found.url.removeprefix("http://")
    assert {name: detail["error_class"] for name, detail in told.items()} == {
        "org/other": "GATED",
        "org/absent": "NOT_FOUND",
    }
    assert (
        f"{host} refuses org/other: accept its terms there and set HF_TOKEN" in told["org/other"]["message"]
    )
    assert last["code"] == "NETWORK" and f"org/late cannot be had from {host} (" in last["message"]
    assert "HF_ENDPOINT (a mirror)" in last["message"]
    printed = log + json.dumps([told, last])
    assert TOKEN not in printed and TOKEN[:-1] not in printed
