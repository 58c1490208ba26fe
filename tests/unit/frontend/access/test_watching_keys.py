"""Runs and recent requests of a frame by the key that watches: the feed without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from frontend.access.api_keys import KeyEntry, fresh, hashed
from frontend.access.gate import ANONYMOUS, Gate, Grant
from frontend.records.recent import LiveRun, Recent
from frontend.server.drain import Drain
from frontend.services import Services
from frontend.status.agents import SHOWN_RUNS, run_fields
from frontend.status.frame import recent_fields
from frontend.status.history import SHOWN_ERRORS, SHOWN_REQUESTS, Traffic
from frontend.status.stream import Feed, StreamResource, Viewer
from ipc.catalog.entries import Catalog
from ipc.metrics.files import Totals
from ipc.settings import load

LOCAL: dict[str, Any] = {
    "type": "websocket", "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 80), "headers": [(b"host", b"localhost")]
}  # fmt: skip
"""The head of a handshake from the own machine."""


def _record(number: int, owner: str, status: int = 200) -> Recent:
    code = "" if status == 200 else "INVALID_INPUT"
    message = f"item {number}" if code else ""
    return Recent(
        float(number), f"{owner}-{number}", "", "sie", "encode", "m", status, code, {}, message, owner
    )


def _traffic() -> Traffic:
    requests = [_record(number, owner) for number in range(2000, 1900, -1) for owner in ("one", "two", "")]
    errors = [_record(number, owner, 400) for number in range(900, 800, -1) for owner in ("one", "two")]
    return Traffic(Totals(), requests, errors, {"": {}})


def _services(tmp_path: Path, gate: Gate) -> Services:
    return Services(load(None, {"run.dir": str(tmp_path)}), Catalog([]), gate, drain=Drain())


def test_a_key_sees_its_own_requests_whatever_others_send() -> None:
    found = recent_fields(_traffic(), "one")
    assert [each["request_id"] for each in found["recent_requests"]] == [
        f"one-{number}" for number in range(2000, 2000 - SHOWN_REQUESTS, -1)
    ]
    assert [each["request_id"] for each in found["recent_errors"]] == [
        f"one-{number}" for number in range(900, 900 - SHOWN_ERRORS, -1)
    ]
    assert recent_fields(_traffic(), "three") == {"recent_requests": [], "runs": [], "recent_errors": []}
    everybody = recent_fields(_traffic(), None)["recent_requests"]
    assert [each["request_id"] for each in everybody[:3]] == ["one-2000", "two-2000", "-2000"]


def test_viewers_of_one_frame_get_their_own_requests_beside_the_same_sums(tmp_path: Path) -> None:
    feed = Feed(_services(tmp_path, Gate()))
    feed._frame, feed._seen = '{"ready":true}', _traffic()
    for owner in ("one", "two", None):
        frame = json.loads(feed._frame_for(Viewer(owner)))
        assert frame == {"ready": True, **recent_fields(_traffic(), owner)}


def test_only_the_scope_admin_and_a_server_without_keys_show_all_callers(tmp_path: Path) -> None:
    key = fresh()
    closed = StreamResource(_services(tmp_path, Gate((KeyEntry(name="a", hash=hashed(key)),))))
    assert closed._viewer_of(Grant("a", "one"), LOCAL) == Viewer("one")
    assert closed._viewer_of(Grant("a", "one", operates=True), LOCAL) == Viewer(None, operates=True)
    assert closed._viewer_of(ANONYMOUS, LOCAL) == Viewer(""), "nobody's requests"


def test_without_keys_everybody_sees_all_callers_and_the_own_machine_operates(tmp_path: Path) -> None:
    watched = StreamResource(_services(tmp_path, Gate()))
    assert watched._viewer_of(ANONYMOUS, LOCAL) == Viewer(None, operates=True)
    for other in ({"client": ("192.0.2.7", 9)}, {"headers": [(b"host", b"192.0.2.1")]}):
        assert watched._viewer_of(ANONYMOUS, LOCAL | other) == Viewer(None)
    foreign = [*LOCAL["headers"], (b"origin", b"http://evil.example")]
    assert watched._viewer_of(ANONYMOUS, LOCAL | {"headers": foreign}) == Viewer(None)


RUN = LiveRun("r1", "m", "one", 5.0, "approval", 9.0, 1, 2, "Python code", "secret()", 900, "appr_1")
"""A run of the key `one` that waits."""


def test_arguments_and_ids_of_decisions_are_for_those_who_operate_the_server() -> None:
    own, other = RUN, msgspec.structs.replace(RUN, request_id="r2", owner="two", began=4.0)
    seen = replace(_traffic(), runs=[other, own])
    [shown] = recent_fields(seen, "one")["runs"]
    assert (shown["request_id"], shown["arguments"], shown["approval_id"]) == ("r1", None, "")
    assert "secret" not in json.dumps(recent_fields(seen, None))
    everything = recent_fields(seen, None, operates=True)["runs"]
    assert [run["request_id"] for run in everything] == ["r2", "r1"]
    assert (everything[1]["arguments"], everything[1]["arguments_chars"]) == ("secret()", 900)
    assert everything[1]["approval_id"] == "appr_1"


def test_of_many_runs_those_that_wait_are_shown() -> None:
    works = msgspec.structs.replace(RUN, doing="model", approval_id="", request_id="works")
    waits = msgspec.structs.replace(RUN, request_id="waits", began=8.0)
    shown = run_fields([*[works] * 2 * SHOWN_RUNS, waits], None, operates=True)
    assert len(shown) == SHOWN_RUNS and shown[-1]["request_id"] == "waits"
