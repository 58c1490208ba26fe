"""`penstock serve NAME` ends before the server starts where no named model can be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.cli import main
from tests.unit.penstock.own_models.test_own_models import near_hub
from tests.unit.penstock.test_downloads import DENSE

__all__ = ["near_hub"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of becoming a server, the command notes that it would."""
    starts: list[str] = []

    def become(options: Any, flags: dict[str, str], module: str, *_: str) -> int:
        starts.append(flags["catalog.models"])
        return 0

    monkeypatch.setattr(cli, "_become", become)
    return starts


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    """A catalog with two models of the hub, and one in a directory."""
    place = tmp_path / "catalog"
    place.mkdir()
    source = {name: f"{{kind: hub, repo: {name}}}" for name in ("org/here", "org/gone")}
    source["org/dir"] = "{kind: directory, path: .}"
    for name, where in source.items():
        text = f"id: {name}\nadapter: dense\ninputs: [text]\noutputs: {{dense: {{}}}}\nsource: {where}\n"
        (place / f"{name.partition('/')[2]}.yaml").write_text(text)
    return str(place)


def test_a_server_without_any_model_to_serve_ends_with_a_sentence(
    near_hub: Any, started: list[str], catalog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    near_hub({"org/here": DENSE})
    assert main(["serve", "org/gone", "--catalog", catalog]) == 1
    told = capsys.readouterr().err
    assert told.startswith("penstock: serve: there is nothing to serve: org/gone: not on this machine")
    assert "docs/hub.md#without-a-network" in told and len(told.splitlines()) == 1
    assert not started


def test_a_model_that_can_be_had_starts_the_server_and_the_other_is_told(
    near_hub: Any, started: list[str], catalog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    near_hub({"org/here": DENSE})
    assert main(["serve", "--models", "org/here,org/gone", "--catalog", catalog]) == 0
    assert "the server starts without org/gone: " in capsys.readouterr().err
    assert main(["serve", "org/here", "--catalog", catalog]) == 0
    assert main(["serve", "org/dir", "--catalog", catalog]) == 0
    assert started == ["org/here,org/gone", "org/here", "org/dir"]
    assert capsys.readouterr().err == ""


def test_without_a_hub_the_start_ends_and_names_the_page(
    started: list[str], catalog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["serve", "org/gone", "--catalog", catalog]) == 1
    assert "there is nothing to serve" in capsys.readouterr().err
    assert not started
