"""Paths of KServe v2: names with slashes, versions and actions, and which scope each path needs."""

from __future__ import annotations

import pytest

from frontend.protocols.kserve_v2.reading import Target, Targets
from frontend.protocols.kserve_v2.routes import ROUTES
from frontend.protocols.registry import protocols
from frontend.tensors.request import Forwarding, TensorRequest
from ipc.errors import ConfigError

ACTIONS = {route.ending.lstrip("/") for route in ROUTES if route.path.startswith("/v2/models/{model}")}
TARGETS = Targets(ACTIONS)


@pytest.mark.parametrize(
    ("tail", "target"),
    [
        ("m", Target("m", None, "")),
        ("m/", Target("m", None, "")),
        ("m/infer", Target("m", None, "infer")),
        ("org/name/infer", Target("org/name", None, "infer")),
        ("org/name/versions/12/infer", Target("org/name", 12, "infer")),
        ("m/versions/0", Target("m", 0, "")),
        ("m/versions/1/ready", Target("m", 1, "ready")),
        ("ready/ready", Target("ready", None, "ready")),
        ("infer", Target("infer", None, "")),
        ("m/trace/setting", Target("m", None, "trace/setting")),
        ("m/generate_stream", Target("m", None, "generate_stream")),
        ("m/other", Target("m/other", None, "")),
        ("a b\né/infer", Target("a b\né", None, "infer")),
        ("m/versions/x/infer", None),
        ("m/versions/-1", None),
        ("m/versions/1.0/ready", None),
        ("m/versions/1/versions/2/infer", None),
        ("m/versions/" + "9" * 19 + "/infer", None),
        ("", None),
    ],
)
def test_a_path_is_read_from_its_end(tail: str, target: Target | None) -> None:
    assert TARGETS.at(tail) == target


def test_long_paths_are_read_and_not_kept() -> None:
    known = "org/a-model-that-is-asked-for-again-and-again"
    for name in (known, "\U0001f600" + "x" * 60_000):
        tail, found = f"{name}/versions/3/infer", Target(name, 3, "infer")
        assert TARGETS.at(tail) == found
        again = TARGETS.at(tail)
        assert again == found and (again is TARGETS.at(tail)) == (name is known)


def test_only_actions_of_the_table_end_a_path() -> None:
    assert {"infer", "trace/setting", "generate_stream"} <= ACTIONS
    assert Targets(["", "a.b"]).at("m/a.b") == Target("m", None, "a.b")
    assert Targets(["", "a.b"]).at("m/axb") == Target("m/axb", None, "")


@pytest.mark.parametrize("tail", ["a..b/infer", "..a/infer", "a/..."])
def test_dots_inside_of_names_are_dots(tail: str) -> None:
    assert TARGETS.at(tail) is not None


@pytest.mark.parametrize(
    ("path", "need"),
    [
        ("/v2/health/live", ""),
        ("/v2/health/ready", ""),
        ("/v2", "infer"),
        ("/v2/models/m/infer", "infer"),
        ("/v2/models/a/load", "infer"),
        ("/v2/repository/index", "infer"),
        ("/v2/repository/models/a/load", "admin"),
        ("/v2/repository/models/a/b/unload", "admin"),
        ("/v2/repository/mine/models/a/load/", "admin"),
        ("/v2/systemsharedmemory/status", "infer"),
        ("/v2/systemsharedmemory/region/r/register", "admin"),
        ("/v2/cudasharedmemory/unregister", "admin"),
        ("/v2/systemsharedmemory/region/a/b/unregister", "admin"),
        ("/v2/logging", "admin"),
        ("/v2/trace/setting", "admin"),
        ("/v2/models/a/b/trace/setting", "admin"),
        ("/v1/config", "infer"),
        ("/v1/config/reload", "admin"),
    ],
)
def test_scopes(path: str, need: str) -> None:
    assert protocols().need_of(path) == need


def test_headers_are_forwarded_by_pattern_without_credentials() -> None:
    request = TensorRequest("m", None, [], None, parameters={"x-b": "own"})
    sent = {"x-a": "1", "x-b": "2", "y": "3", "authorization": "secret", "x-bin": b"\0"}
    Forwarding("x-.*|authorization").apply(sent, request)
    assert request.parameters == {"x-a": "1", "x-b": "own"}
    assert not Forwarding("").active
    with pytest.raises(ConfigError, match=r"kserve\.forward_headers"):
        Forwarding("(")
