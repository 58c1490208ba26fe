"""A body that no model could answer is refused before its model is looked up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.wire import assert_refused, assert_refused_openai
from tests.harness.cluster import ways_to
from tests.harness.server import Server

server = ways_to("sie")

TEXTS = [{"text": "a"}]
LONG = "a" * (1 << 20) + "b"


def params(**fields: Any) -> dict[str, Any]:
    """A body of encode or extract with these parameters."""
    return {"items": TEXTS, "params": fields}


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "long text": ("encode", {"items": [*TEXTS, {"text": LONG}]}, "items[1].text"),
    "policy": ("encode", params(options={"overflow_policy": 5}), "params.options.overflow_policy"),
    "instruction": ("encode", params(options={"instruction": 5}), "params.options.instruction"),
    "lora": ("extract", params(options={"lora_id": 5}), "params.options.lora_id"),
    "label": ("extract", params(labels=["\n"]), "params.labels[0]"),
    "schema": ("extract", params(output_schema={"a": "b" * 70_000}), "params.output_schema"),
    "long integer": ("extract", params(output_schema={"a": [1 << 70]}), "params.output_schema.a[0]"),
    "query": ("score", {"query": {"text": LONG}, "items": TEXTS}, "query.text"),
    "profile": ("score", {"query": TEXTS[0], "items": TEXTS, "options": {"profile": 5}}, "options.profile"),
}
BAD_ELSEWHERE: dict[str, tuple[str, dict[str, Any], str]] = {
    "query": ("rerank", {"query": LONG, "documents": ["a"]}, "query: "),
    "document": ("rerank", {"query": "a", "documents": ["a", {}]}, "documents[1].text: "),
    "long document": ("rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]: "),
    "policy": ("rerank", {"query": "a", "documents": ["a"], "overflow_policy": "no"}, "overflow_policy: "),
    "embeddings policy": ("embeddings", {"input": "a", "overflow_policy": "no"}, "overflow_policy: "),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_wins_over_an_unknown_model(server: Server, name: str) -> None:
    route, body, field = BAD[name]
    message = assert_refused(server.post(f"/v1/{route}/org/none", body), 400, "INVALID_INPUT")
    assert message.startswith(f"{field}: ")


@pytest.mark.parametrize("name", BAD_ELSEWHERE)
def test_a_bad_body_wins_in_the_forms_of_others_too(server: Server, name: str) -> None:
    route, body, beginning = BAD_ELSEWHERE[name]
    answer = server.post(f"/v1/{route}", {"model": "org/none", **body})
    message = assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input")
    assert message.startswith(beginning)
