"""The list of models in the forms of SIE, OpenAI and Anthropic: entries, aliases, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.protocols.sie.models import listed_model
from ipc.catalog.entries import Catalog
from ipc.wire.messages import ModelStatus
from ipc.wire.tools import Remotes, RemoteTool
from tests.fakes.generation_server import CHAT, DENSE, RecordedServer
from tests.fakes.tensors import entry


@pytest.fixture
def server(tmp_path: Path) -> RecordedServer:
    """A model of text and one of vectors."""
    return RecordedServer(tmp_path)


def _get(server: RecordedServer, path: str) -> Any:
    return server.client.simulate_get(path)


def _ids(server: RecordedServer, query: str) -> tuple[list[str], bool]:
    body = _get(server, f"/v1/models?{query}").json
    assert (body["first_id"], body["last_id"]) == (
        (body["data"][0]["id"], body["data"][-1]["id"]) if body["data"] else (None, None)
    )
    return [each["id"] for each in body["data"]], body["has_more"]


def test_the_list_begins_with_the_default_and_serves_three_kinds_of_clients(server: RecordedServer) -> None:
    body = _get(server, "/v1/models").json
    assert (body["object"], body["has_more"]) == ("list", False)
    assert [each["id"] for each in body["data"]] == ["default", CHAT, DENSE]
    assert [each["name"] for each in body["models"]] == [CHAT, DENSE]
    first, chat, _ = body["data"]
    assert "status" not in first
    assert (first["root"], first["parent"]) == (CHAT, None)
    assert (chat["status"], chat["owned_by"], chat["type"], chat["object"]) == (
        "unloaded",
        "local",
        "model",
        "model",
    )
    assert (chat["display_name"], chat["root"], chat["parent"]) == (CHAT, CHAT, None)
    assert chat["created_at"].endswith("Z")


def test_a_loaded_model_says_so(server: RecordedServer) -> None:
    server.post("/v1/models/reload", {"model_id": CHAT})
    told = _get(server, f"/v1/models/{CHAT}").json
    assert (told["status"], told["state"], told["loaded"]) == ("loaded", "loaded", True)
    assert told["max_input_tokens"] == told["max_sequence_length"] == 64


def test_further_names_are_listed_found_and_answered(server: RecordedServer) -> None:
    catalog = server.services.catalog
    chat = msgspec.structs.replace(catalog[CHAT], served_name=("gpt-4o", "org/gpt"))
    catalog.replace(Catalog([chat, catalog[DENSE]]))
    assert _ids(server, "") == (["default", "gpt-4o", "org/gpt", CHAT, DENSE], False)
    assert [each["name"] for each in _get(server, "/v1/models").json["models"]] == [CHAT, DENSE]
    told = _get(server, "/v1/models/org/gpt").json
    assert (told["id"], told["name"], told["root"]) == ("org/gpt", CHAT, CHAT)
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    answer = server.post("/v1/chat/completions", body).json
    assert answer["choices"][0]["message"]["content"] == "Hello you"
    assert server.engine.works[-1].model == CHAT, "the worker knows the id"


def test_default_can_be_asked_for_by_name(server: RecordedServer) -> None:
    told = _get(server, "/v1/models/default").json
    assert (told["id"], told["name"], told["root"]) == ("default", CHAT, CHAT)


def test_an_unknown_model_is_not_found_in_the_form_of_sie(server: RecordedServer) -> None:
    response = _get(server, "/v1/models/none/such")
    assert response.status_code == 404
    assert set(response.json) == {"detail", "message"}
    assert response.json["message"] == response.json["detail"]["message"]


def test_without_a_model_of_text_there_is_no_default(server: RecordedServer) -> None:
    catalog = server.services.catalog
    catalog.replace(Catalog([entry(DENSE)]))
    assert _ids(server, "") == ([DENSE], False)
    assert _get(server, "/v1/models/default").status_code == 404
    catalog.replace(Catalog([]))
    assert _ids(server, "") == ([], False)


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("limit=2", ["default", CHAT], True),
        ("limit=3", ["default", CHAT, DENSE], False),
        (f"limit=1&after_id={CHAT}", [DENSE], False),
        ("limit=1&after_id=default", [CHAT], True),
        (f"after_id={DENSE}", [], False),
        (f"limit=1&before_id={DENSE}", [CHAT], True),
        (f"limit=1&before_id={CHAT}", ["default"], False),
        ("limit=1000&lifecycle=active", ["default", CHAT, DENSE], False),
    ],
)
def test_a_page_is_cut(server: RecordedServer, query: str, ids: list[str], has_more: bool) -> None:
    assert _ids(server, query) == (ids, has_more)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=%C2%B2", "limit"),
        ("after_id=none", "after_id"),
        ("before_id=none", "before_id"),
        (f"after_id={CHAT}&before_id={CHAT}", "before_id"),
    ],
)
def test_a_bad_page_is_refused(server: RecordedServer, query: str, name: str) -> None:
    response = _get(server, f"/v1/models?{query}")
    assert response.status_code == 400
    assert response.json["detail"]["message"].startswith(f"{name}: ")


def test_a_profile_is_the_child_of_its_model() -> None:
    told = listed_model("org/m:small", "org/m:small", None, 0.5, ModelStatus("org/m:small", "loading"))
    assert (told.root, told.parent, told.status) == ("org/m", "org/m", "reloading")
    assert (told.created, told.created_at) == (0, "1970-01-01T00:00:00Z")
    assert "max_sequences" not in msgspec.to_builtins(told)
    loaded = ModelStatus(
        "m", "loaded", max_sequences=1, tools="system text", limited_by="generation.cache_bytes"
    )
    generating = listed_model("m", "m", 64, 0.5, loaded)
    assert (generating.max_sequences, generating.tools) == (1, "system text")
    assert (generating.max_input_tokens, generating.limited_by) == (64, "generation.cache_bytes")
    assert not {"tools", "tools_available", "limited_by", "max_sequences"} & set(msgspec.to_builtins(told))
    assert "status" not in msgspec.to_builtins(listed_model("default", "org/m:small", None, 0, loaded))


def test_a_model_that_generates_tells_its_precision_and_memory_and_others_tell_none() -> None:
    held = {"precision": "int4+int8", "weight_bytes": 7 << 30, "cache_bytes": 1 << 30, "cache_tokens": 4096}
    told = msgspec.to_builtins(listed_model("m", "m", 64, 0.5, ModelStatus("m", "loaded", **held)))
    assert {name: told[name] for name in held} == held
    other = msgspec.to_builtins(listed_model("m", "m", 64, 0.5, ModelStatus("m", "loaded")))
    assert not held.keys() & other.keys()


@pytest.mark.parametrize(
    ("tools", "has_tools", "available"),
    [
        ("template", True, True),
        ("system text", True, True),
        ("none", True, msgspec.UNSET),
        ("", True, msgspec.UNSET),
        ("template", False, msgspec.UNSET),
    ],
)
def test_tools_are_available_to_loaded_models_that_are_shown_functions(
    tools: str, has_tools: bool, available: object
) -> None:
    status = ModelStatus("m", "loaded", tools=tools)
    assert listed_model("m", "m", None, 0, status, has_tools=has_tools).tools_available is available


def test_a_model_that_takes_tools_tells_the_mcp_servers_that_are_connected() -> None:
    tool = RemoteTool("fs_read", "files", "", {"type": "object"})
    for state, has_tools, expected in (("loaded", True, (1, 2)), ("loaded", False, (msgspec.UNSET,) * 2)):
        status = ModelStatus("m", state, tools="template")  # type: ignore[arg-type]
        told = listed_model("m", "m", None, 0, status, has_tools=has_tools, remotes=Remotes(2, [tool]))
        assert (told.mcp_tools_count, told.mcp_servers_connected) == expected
    told = listed_model("m", "m", None, 0, ModelStatus("m", "loaded", tools="template"), has_tools=True)
    assert told.mcp_tools_count is msgspec.UNSET
