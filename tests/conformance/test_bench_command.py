"""`penstock bench` against a running server."""

from __future__ import annotations

import json
import os

import pytest

from penstock.cli import main
from tests.harness.server import Server


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the tests' process are not those of the command."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


MODELS = {
    "encode": "fake/echo",
    "embeddings": "fake/echo",
    "kserve": "fake/echo",
    "score": "fake/score",
    "rerank": "fake/score",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("protocol", MODELS)
def test_a_load_gives_figures(protocol: str, fakes: Server, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--protocol",
        protocol,
        "--requests",
        "6",
        "--connections",
        "2",
        "--items",
        "3",
        "--json",
        "--plot",
    )
    assert main(["bench", MODELS[protocol], "--url", fakes.url, *flags]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["load"]["connections"] == 2 and found["load"]["items"] == 3
    assert (found["requests"], found["succeeded"], found["errors"]) == (6, 6, {})
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"] <= found["latency_ms"]["max"]
    assert (found["tokens_per_s"] is not None) == (protocol in ("embeddings", "rerank"))
    assert "#" in printed.err


def test_an_open_loop_over_tensors(fakes: Server, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--protocol", "kserve", "--rate", "1000", "--requests", "3")
    assert main(["bench", "fake/echo", "--url", fakes.url, *flags]) == 0
    assert "3 requests succeeded, 0 failed" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(fakes: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fake/absent", "--url", fakes.url, "--requests", "3"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "404: " in printed.err
