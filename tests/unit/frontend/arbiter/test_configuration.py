"""What a reload may change."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from frontend.arbiter import configuration
from ipc.settings import load


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
    assert "server.bind, server.metrics_bind and server.health_bind cannot change" in caplog.text
    found = first
    assert configuration.accept() is first
