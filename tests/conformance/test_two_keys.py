"""Two keys on one server: no answer, header, count or page of one shows what the other sent."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.conftest import Keyed
from tests.harness.keys import bearer
from tests.harness.server import Answer
from tests.harness.status import frame_when, watching

MODEL = "/v1/encode/fake/echo"
SECRET = "the tram of key one"
HITS = "penstock_embedding_cache_hits_total"
KEPT_STATE = (
    "/v1/models",
    "/v1/models/fake/echo",
    "/metrics",
    "/openapi.json",
    "/",
    "/v1/responses/resp_two-keys-one",
    "/v2",
    "/v2/models/stats",
    "/v2/repository/index",
    "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status",
    "/v2/logging",
    "/v2/trace/setting",
    "/api/status",
    "/models",
    "/info",
)


def _send(served: Keyed, key: str, body: Any, request_id: str, path: str = MODEL) -> Answer:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "X-Request-ID": request_id}
    return served.server.request("POST", path, json.dumps(body).encode(), headers | bearer(served.keys[key]))


def _ids(frame: dict[str, Any]) -> set[str]:
    return {each["request_id"] for name in ("recent_requests", "recent_errors") for each in frame[name]}


def _seen_by(served: Keyed, key: str, until: set[str]) -> dict[str, Any]:
    """The first frame for a key that has these requests."""
    with watching(served.server, additional_headers=bearer(served.keys[key])) as viewer:
        return frame_when(viewer, lambda frame: until <= _ids(frame))


def test_recent_requests_are_those_of_the_watching_key(keyed_server: Keyed) -> None:
    first, second = {"two-keys-one", "two-keys-one-failed"}, {"two-keys-two", "two-keys-two-failed"}
    for key, (good, failed) in (("infer", sorted(first)), ("neighbour", sorted(second))):
        assert _send(keyed_server, key, {"items": [{"text": SECRET}]}, good).status == 200
        assert _send(keyed_server, key, {"items": [{"text": 1}]}, failed).status == 400
    seen = _seen_by(keyed_server, "both", first | second)
    assert first | second <= _ids(seen), "the operator sees all"
    for key, own, others in (("infer", first, second), ("neighbour", second, first)):
        text = json.dumps(_seen_by(keyed_server, key, own))
        assert not any(f'"{other}"' in text for other in others)
        assert SECRET not in text


def test_no_route_with_kept_state_shows_what_another_key_sent(keyed_server: Keyed) -> None:
    marks = (SECRET, "two-keys-mark", keyed_server.keys["infer"].split("_")[1])
    sent = {"items": [{"id": "two-keys-mark-item", "text": SECRET}]}
    theirs = _send(keyed_server, "infer", sent, "two-keys-mark")
    assert theirs.status == 200
    for path in KEPT_STATE:
        answer = keyed_server.server.request("GET", path, None, bearer(keyed_server.keys["neighbour"]))
        told = f"{dict(answer.headers)} {answer.body.decode(errors='replace')}"
        assert not any(mark in told for mark in marks), path


def test_the_same_text_of_two_keys_is_kept_for_each_alone(keyed_server: Keyed) -> None:
    body = {"items": [{"text": f"{SECRET} again"}]}

    def hits() -> float:
        lines = keyed_server.server.get("/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{HITS}{{"))

    known = hits()
    answers = [_send(keyed_server, key, body, f"two-keys-kept-{key}") for key in ("infer", "neighbour")]
    assert hits() == known
    assert answers[0].json()["items"] == answers[1].json()["items"]
    assert set(answers[0].headers) == set(answers[1].headers)


def test_an_id_of_a_request_may_be_used_again_by_another_key(keyed_server: Keyed) -> None:
    body = {"items": [{"text": "a"}]}
    answers = [_send(keyed_server, key, body, "two-keys-same") for key in ("infer", "neighbour")]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.headers["x-request-id"] for answer in answers] == ["two-keys-same"] * 2
