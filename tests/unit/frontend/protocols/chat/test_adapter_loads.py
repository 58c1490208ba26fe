"""Loads of LoRA adapters that meet another load, and models that take no adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import falcon.testing
import orjson
import pytest

from ipc import deadline
from ipc.errors import LoraUnavailable
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from tests.fakes.generation_server import CHAT, DENSE, RecordedServer


def test_a_load_beside_another_load_is_told_to_come_again(tmp_path: Path) -> None:
    adapter = tmp_path / "adapters" / "one"
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    root = tmp_path / "run"
    root.mkdir()
    server = RecordedServer(root, catalog__lora_dirs=str(adapter.parent))
    services = server.services
    services.store = Store(services.settings.paths)
    (root / "wishes").mkdir()
    wishes = Wishes(services.settings.paths, services.store)
    body = {"lora_name": "one", "lora_path": "one", "base_model_name": CHAT}

    async def act() -> Any:
        async with (
            wishes.loras_locked(deadline.after(60)),
            falcon.testing.ASGIConductor(server.client.app) as asked,
        ):
            return await asked.simulate_post(
                "/v1/load_lora_adapter", body=orjson.dumps(body), headers={"Content-Type": "application/json"}
            )

    answer = asyncio.run(act())
    assert (answer.status_code, answer.json["error"]["code"]) == (429, "lora_busy"), answer.text
    assert int(answer.headers["retry-after"]) >= 1


def test_a_model_that_takes_no_adapter_is_a_conflict(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    server.script(LoraUnavailable("this model has no LoRA adapters"))
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert (answer.status_code, answer.json["error"]["code"]) == (409, "lora_runtime_unavailable")
    assert "this model has no LoRA adapters" in answer.json["error"]["message"]


@pytest.mark.parametrize("admin", [True, False])
@pytest.mark.parametrize("action", ["load", "unload"])
def test_adapters_are_changed_only_where_a_setting_serves_that(
    tmp_path: Path, admin: bool, action: str
) -> None:
    server = RecordedServer(tmp_path, server__admin=str(admin).lower())
    answer = server.post(f"/v1/{action}_lora_adapter", {})
    assert answer.status_code == (422 if admin else 404), answer.text
    assert ("lora_name: is required" in answer.text) is admin


@pytest.mark.parametrize(
    ("base", "status", "said"),
    [("no/model", 404, "'no/model' does not exist"), (DENSE, 422, f"'{DENSE}' generates no text")],
)
def test_a_base_that_takes_no_adapter_of_text_is_an_error_of_its_field(
    tmp_path: Path, base: str, status: int, said: str
) -> None:
    server = RecordedServer(tmp_path, server__admin="true")
    body = {"lora_name": "one", "lora_path": "one", "base_model_name": base}
    answer = server.post("/v1/load_lora_adapter", body)
    assert answer.status_code == status, answer.text
    assert answer.json["error"]["message"].startswith("base_model_name: ") and said in answer.text
