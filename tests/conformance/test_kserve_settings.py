"""Log and trace settings by request: every key that clients know, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.harness.cluster import ways_to
from tests.harness.rpc import Rpc, address_of, failure_of
from tests.harness.server import Answer, Server

LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "ISO8601",
}
TRACE = {
    "trace_level": ["TIMESTAMPS"],
    "trace_rate": "1",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "opentelemetry",
}
SERVER, MODEL = "/v2/trace/setting", "/v2/models/add_sub/trace/setting"


server = ways_to("kserve_server")


@pytest.fixture
def rpc(server: Server) -> Iterator[Rpc]:
    with Rpc(address_of(server)) as opened:
        yield opened


def sent(server: Server, path: str, changes: Any) -> Answer:
    """POST of JSON, or of bytes as they are."""
    return server.request("POST", path, changes) if isinstance(changes, bytes) else server.post(path, changes)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {}),
        ({"log_info": False}, {"log_info": False}),
        ({"log_warning": False, "log_error": False}, {"log_warning": False, "log_error": False}),
        ({"log_verbose_level": 3}, {"log_verbose_level": 3}),
        ({"log_file": "", "log_format": "ISO8601"}, {}),
        ({"unheard_of": [1], "log_info": False}, {"log_info": False}),
    ],
)
def test_log_settings_are_answered_complete(server: Server, changes: Any, shown: dict[str, Any]) -> None:
    answer = server.post("/v2/logging", changes)
    assert (answer.status, answer.json()) == (200, LOG | shown)
    assert server.get("/v2/logging").json() == LOG | shown
    assert list(answer.json()) == list(LOG)
    assert server.post("/v2/logging", LOG).json() == LOG


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"log_file": "/tmp/x"}, 501, "log_file"),
        ({"log_format": "default"}, 501, "log_format"),
        ({"log_info": 1}, 400, "log_info"),
        ({"log_verbose_level": "1"}, 400, "log_verbose_level"),
        ({"log_verbose_level": -1}, 400, "log_verbose_level"),
        ({"log_info": None}, 400, "log_info"),
        (b'{"log_verbose_level": ' + b"9" * 5000 + b"}", 400, "JSON"),
        (b'{"log_info": ' + b"9" * 5000 + b"}", 400, "JSON"),
        ([], 400, "Expected `object`"),
    ],
)
def test_wrong_log_settings_change_nothing(server: Server, changes: Any, status: int, words: str) -> None:
    answer = sent(server, "/v2/logging", changes)
    assert (answer.status, words in answer.json()["error"]) == (status, True), answer.body
    assert server.get("/v2/logging").json() == LOG


@pytest.mark.parametrize("path", [SERVER, MODEL])
@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {}),
        ({"trace_level": ["OFF"]}, {"trace_level": ["OFF"]}),
        ({"trace_level": "OFF"}, {"trace_level": ["OFF"]}),
        ({"trace_rate": "500"}, {"trace_rate": "500"}),
        ({"log_frequency": "50"}, {"log_frequency": "50"}),
        ({"trace_count": "-1", "trace_file": "", "trace_mode": "opentelemetry"}, {}),
    ],
)
def test_trace_settings_are_texts_and_null_resets_them(
    server: Server, path: str, changes: Any, shown: dict[str, Any]
) -> None:
    answer = server.post(path, changes)
    assert (answer.status, answer.json()) == (200, TRACE | shown)
    assert list(answer.json()) == list(TRACE)
    assert server.get(path).json() == TRACE | shown
    assert server.get(MODEL).json() == TRACE | shown, (
        "a model has those of the server where it has none of its own"
    )
    assert server.post(path, dict.fromkeys(TRACE)).json() == TRACE


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"trace_file": "/tmp/x"}, 501, "trace_file"),
        ({"trace_count": "5"}, 501, "trace_count"),
        ({"trace_mode": "triton"}, 501, "trace_mode"),
        ({"trace_level": ["LOUD"]}, 400, "trace_level"),
        ({"trace_rate": "0"}, 400, "trace_rate"),
        ({"trace_rate": 5}, 400, "trace_rate"),
        ({"trace_rate": [5]}, 400, "trace_rate"),
        (b'{"trace_rate": [' + b"9" * 5000 + b"]}", 400, "JSON"),
        ({"log_frequency": "-1"}, 400, "log_frequency"),
        ({"unheard_of": "1"}, 400, "unheard_of"),
    ],
)
def test_wrong_trace_settings_change_nothing(server: Server, changes: Any, status: int, words: str) -> None:
    for path in (SERVER, MODEL):
        answer = sent(server, path, changes)
        assert (answer.status, words in answer.json()["error"]) == (status, True), answer.body
        assert server.get(path).json() == TRACE


def test_models_that_are_not_known_and_versions(server: Server) -> None:
    for call in (server.get, lambda path: server.post(path, {})):
        assert call("/v2/models/nothing/trace/setting").status == 400
        assert call("/v2/models/add_sub/versions/1/trace/setting").status == 404


def test_the_same_over_grpc(rpc: Rpc) -> None:
    def trace(model: str = "", **changes: list[str]) -> dict[str, list[str]]:
        asked = pb.TraceSettingRequest(model_name=model)
        for name, values in changes.items():
            asked.settings[name].value.extend(values)
        found = rpc.call("TraceSetting", asked).settings
        return {name: list(setting.value) for name, setting in found.items()}

    whole = {name: value if isinstance(value, list) else [value] for name, value in TRACE.items()}
    assert trace() == whole
    changed = trace("add_sub", trace_rate=["9"], log_frequency=["4"], trace_level=["OFF"])
    assert changed == whole | {"trace_rate": ["9"], "log_frequency": ["4"], "trace_level": ["OFF"]}
    assert trace() == whole
    assert trace("add_sub", trace_rate=[], log_frequency=[], trace_level=[]) == whole
    assert failure_of(lambda: trace("nothing")).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure_of(lambda: trace(trace_file=["x"])).code() is grpc.StatusCode.UNIMPLEMENTED
    log = rpc.call("LogSettings", pb.LogSettingsRequest()).settings
    assert set(log) == set(LOG) and log["log_info"].bool_param and log["log_verbose_level"].uint32_param == 0
    asked = pb.LogSettingsRequest()
    asked.settings["log_file"].string_param = "x"
    assert failure_of(lambda: rpc.call("LogSettings", asked)).code() is grpc.StatusCode.UNIMPLEMENTED
