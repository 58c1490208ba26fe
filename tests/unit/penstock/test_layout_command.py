"""`penstock layout`: the key that goes with the question, and models whose requests have no layout."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

from penstock import target
from penstock.cli import main

SIDES: dict[str, Any] = {"inputs": [{"name": "COUNT", "datatype": "INT32", "shape": [1]}], "outputs": []}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[urllib.request.Request]:
    """The requests of the command, which get the answers of a decoupled model."""
    requests: list[urllib.request.Request] = []

    def answer(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        requests.append(request)
        policy = {"model_transaction_policy": {"decoupled": True}}
        return io.BytesIO(json.dumps(policy if request.full_url.endswith("/config") else SIDES).encode())

    monkeypatch.setattr(target._DIRECT, "open", answer)
    return requests


def test_a_decoupled_model_is_asked_by_its_stream(
    asked: list[urllib.request.Request], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "countdown", "--url", "http://host:9"]) == 0
    assert capsys.readouterr().out.endswith("POST http://host:9/v2/models/countdown/generate_stream\n")
    assert {request.get_header("Authorization") for request in asked} == {None}


def test_a_script_is_given_headers_and_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}
    answers = {"/config": {"max_batch_size": 8}, "": {"inputs": [*SIDES["inputs"], text], "outputs": []}}

    def answer(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        return io.BytesIO(json.dumps(answers[request.full_url.partition("/v2/models/m")[2]]).encode())

    monkeypatch.setattr(target._DIRECT, "open", answer)
    assert main(["layout", "m", "--url", "http://host:9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kserve, trtis = found["requests"]
    assert (kserve["url"], trtis["url"]) == ("http://host:9/v2/models/m/infer", "http://host:9/api/infer/m")
    assert [(each["name"], each["nbytes"]) for each in kserve["inputs"]] == [("COUNT", 4), ("TEXT", 8)]
    assert int(kserve["headers"]["Content-Length"]) == len(kserve["head"]) + 12
    assert trtis["headers"]["Content-Length"] == "12"
    assert main(["layout", "m", "--url", "http://host:9"]) == 0
    shown = capsys.readouterr().out
    assert f"  NV-InferRequest: {trtis['headers']['NV-InferRequest']}\n" in shown and kserve["head"] in shown
    assert (
        "<8 bytes of TEXT: BYTES [1, 1], little-endian, each element behind its length in 4 bytes>" in shown
    )


def test_the_key_of_the_environment_goes_with_the_question(
    asked: list[urllib.request.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "pk-1")
    assert main(["layout", "countdown"]) == 0
    assert [request.get_header("Authorization") for request in asked] == ["Bearer pk-1"] * 2
    assert asked[0].full_url == "http://127.0.0.1:8080/v2/models/countdown"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": "no such model"}', "404: no such model"),
        (b"gone", "404: gone"),
        (b"[]", "404: []"),
        (b'{"error": {"message": "no"}}', "404: no"),
        (b'{"error": "no\\u001b[2J\\nsuch"}', "404: no[2J such\n"),
    ],
)
def test_the_sentence_of_the_server_is_shown(
    body: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise urllib.error.HTTPError("http://host", 404, "", Message(), io.BytesIO(body))

    monkeypatch.setattr(target._DIRECT, "open", refuse)
    assert main(["layout", "nobody"]) == 1
    assert sentence in capsys.readouterr().err
