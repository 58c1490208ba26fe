"""When a gateway leaves the queue, and when it comes back. The clock is moved by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.cluster.queue import Lane
from ipc.settings import Cluster


class Stage:
    """A lane over a queue that is there."""

    def __init__(self, **settings: Any) -> None:
        self.now_ns, self.made, self.there = 10**12, 0, True
        self.lane = Lane(Cluster(**settings), self, lambda: self.now_ns)  # type: ignore[arg-type]
        self.reasons: list[str] = []
        self.lane.on_trouble = self.reasons.append

    def again(self) -> None:
        self.made += 1
        self.there = False

    def confirm(self, item: str, data: bytes = b'{"stream":"W","seq":1}', status: str = "") -> None:
        message = SimpleNamespace(data=data, headers={"Status": status} if status else None)
        self.lane.confirmed(item, message)  # type: ignore[arg-type]

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.lane.tick()


def test_an_item_that_is_not_confirmed_in_time_is_trouble_for_a_second_and_longer_each_time() -> None:
    stage = Stage()
    for down_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert stage.lane.usable
        stage.lane.published("r.1")
        stage.pass_s(0.2)
        assert stage.lane.usable
        stage.pass_s(0.2)
        assert not stage.lane.usable
        stage.pass_s(down_s - 0.1)
        assert not stage.lane.usable
        stage.pass_s(0.2)
    assert stage.reasons == ["unconfirmed"] * 5 and stage.lane.troubles == 5


def test_a_confirmed_item_is_none_and_ends_the_growth() -> None:
    stage = Stage()
    stage.lane.published("r.1")
    stage.pass_s(0.4)
    stage.pass_s(1.1)
    stage.lane.published("r.2")
    stage.confirm("r.2")
    stage.pass_s(1.0)
    assert stage.lane.usable
    stage.lane.published("r.3")
    stage.pass_s(0.4)
    stage.pass_s(1.1)
    assert stage.lane.usable


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"", "503", "no stream"),
        (msgspec.json.encode({"error": {"code": 503, "description": "maximum messages"}}), "", "refused"),
    ],
)
def test_no_stream_and_a_full_one_are_trouble_at_once(data: bytes, status: str, reason: str) -> None:
    stage = Stage()
    stage.lane.published("r.1")
    stage.confirm("r.1", data, status)
    assert stage.reasons == [reason] and not stage.lane.usable and stage.made == (reason == "no stream")


def test_a_lost_broker_is_trouble_until_the_queue_is_made_again() -> None:
    stage = Stage()
    stage.lane.lost()
    stage.pass_s(10)
    assert not stage.lane.usable and stage.reasons == ["lost"]
    stage.there = True
    assert stage.lane.usable


def test_a_word_about_an_item_that_was_not_published_is_dropped() -> None:
    stage = Stage()
    stage.confirm("r.9", b'{"error":{}}')
    assert stage.lane.usable and not stage.reasons


def test_a_lane_can_be_chosen_by_settings() -> None:
    assert not Stage(lane="direct").lane.usable
    forced = Stage(lane="queue")
    forced.there = False
    assert forced.lane.usable
