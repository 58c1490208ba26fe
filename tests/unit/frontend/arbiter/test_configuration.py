"""What a reload may change."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from frontend.arbiter import configuration
from ipc.errors import ConfigError
from ipc.settings import Grpc, load


@pytest.mark.parametrize("changed", ["127.0.0.2:8080", "unix:/tmp/8080"])
def test_a_reload_does_not_change_the_address_that_gunicorn_listens_on(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"PENSTOCK_RUN__DIR": str(tmp_path), "PENSTOCK_RUN__INSTANCE": "one"}
    first = configuration.read(load(environ=environ))
    found = replace(first, settings=load(environ=environ | {"PENSTOCK_SERVER__BIND": changed}))
    monkeypatch.setattr(configuration, "_accepted", first)
    monkeypatch.setattr(configuration, "read", lambda: found)
    with caplog.at_level(logging.ERROR):
        assert configuration.accept() is first
    assert (
        "server.bind, server.metrics_bind, server.health_bind and server.mcp_port cannot change"
        in caplog.text
    )
    found = first
    assert configuration.accept() is first


@pytest.mark.parametrize(
    ("bind", "flags", "refused"),
    [
        ("0.0.0.0:8080", {"agent.shell": "true"}, True),
        ("[::]:8080", {"agent.code_execution": "true"}, True),
        ("192.0.2.7:8080", {"agent.code_execution": "true"}, True),
        ("127.0.0.1:8080", {"agent.shell": "true"}, False),
        ("[::1]:8080", {"agent.shell": "true"}, False),
        ("unix:/run/p.sock", {"agent.shell": "true"}, False),
        ("0.0.0.0:8080", {}, False),
        ("0.0.0.0:8080", {"agent.search": "true"}, True),
        ("0.0.0.0:8080", {"agent.shell": "true", "agent.open_without_keys": "true"}, False),
        ("0.0.0.0:8080", {"agent.shell": "true", "server.keys_file": "/etc/penstock/keys.yaml"}, False),
    ],
)
def test_tools_without_keys_are_for_this_machine_unless_a_setting_says_so(
    bind: str, flags: dict[str, str], refused: bool
) -> None:
    config = load(None, {"server.bind": bind, **flags}, {})
    if refused:
        with pytest.raises(ConfigError, match=r"tools are enabled and server\.keys_file is empty"):
            configuration.require_keys_for_tools(config)
    else:
        configuration.require_keys_for_tools(config)


def test_a_text_that_is_no_network_stops_the_start(tmp_path: Path) -> None:
    config = load(None, {"fetch.allowed_networks": "10.0.0.0/8,10.0.0.1/8", "run.dir": str(tmp_path)}, {})
    with pytest.raises(ConfigError, match=r"fetch\.allowed_networks: '10\.0\.0\.1/8' is no network"):
        configuration.read(config)


@pytest.mark.parametrize(
    ("flags", "missing", "named"),
    [
        ({"agent.search": "true"}, {"ddgs"}, "ddgs"),
        ({"agent.search": "true"}, {"trafilatura"}, "trafilatura"),
        ({"agent.search": "true", "agent.search_url": "http://a/s"}, {"ddgs", "trafilatura"}, "trafilatura"),
        ({"agent.search": "true", "agent.search_url": "http://a/s"}, {"ddgs"}, ""),
        ({"agent.search": "true"}, set(), ""),
        ({}, {"ddgs", "trafilatura"}, ""),
    ],
)
def test_a_search_whose_packages_are_missing_stops_the_start(
    flags: dict[str, str], missing: set[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    config = load(None, flags, {})
    if not named:
        configuration.require_search(config)
        return
    text = rf"agent\.search \(--enable-search, --agent\): the package {named} is missing: the extra search"
    with pytest.raises(ConfigError, match=text):
        configuration.require_search(config)


@pytest.mark.parametrize("bind", ["8001", "host:0", "unix:/run/a"])
def test_an_address_of_grpc_is_checked_where_grpc_is_served(bind: str, tmp_path: Path) -> None:
    settings = load(environ={"PENSTOCK_RUN__DIR": str(tmp_path), "PENSTOCK_RUN__INSTANCE": "one"})
    with pytest.raises(ConfigError, match=r"grpc\.bind"):
        configuration.read(msgspec.structs.replace(settings, grpc=Grpc(bind=bind)))
    configuration.read(msgspec.structs.replace(settings, grpc=Grpc(enabled=False, bind=bind)))
