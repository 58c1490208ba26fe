"""Recent requests of a frame by the key that watches: the feed without a server."""

from __future__ import annotations

import json
from pathlib import Path

from frontend.access.api_keys import KeyEntry, fresh, hashed
from frontend.access.gate import ANONYMOUS, Gate, Grant
from frontend.records.recent import Recent
from frontend.server.drain import Drain
from frontend.services import Services
from frontend.status.frame import recent_fields
from frontend.status.history import SHOWN_ERRORS, SHOWN_REQUESTS, Traffic
from frontend.status.stream import Feed, StreamResource
from ipc.catalog.entries import Catalog
from ipc.metrics.files import Totals
from ipc.settings import load


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
    assert recent_fields(_traffic(), "three") == {"recent_requests": [], "recent_errors": []}
    everybody = recent_fields(_traffic(), None)["recent_requests"]
    assert [each["request_id"] for each in everybody[:3]] == ["one-2000", "two-2000", "-2000"]


def test_viewers_of_one_frame_get_their_own_requests_beside_the_same_sums(tmp_path: Path) -> None:
    feed = Feed(_services(tmp_path, Gate()))
    feed._frame, feed._seen = '{"ready":true}', _traffic()
    for owner in ("one", "two", None):
        frame = json.loads(feed._frame_for(owner))
        assert frame == {"ready": True, **recent_fields(_traffic(), owner)}


def test_only_the_scope_admin_and_a_server_without_keys_show_all_callers(tmp_path: Path) -> None:
    key = fresh()
    closed = StreamResource(_services(tmp_path, Gate((KeyEntry(name="a", hash=hashed(key)),))))
    assert closed._owner_of(Grant("a", "one")) == "one"
    assert closed._owner_of(Grant("a", "one", operates=True)) is None
    assert closed._owner_of(ANONYMOUS) == "", "nobody's requests"
    assert StreamResource(_services(tmp_path, Gate()))._owner_of(ANONYMOUS) is None
