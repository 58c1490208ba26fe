"""Standing requests of a bridge at the queue. The clock is moved by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from frontend.bridge.pulling import Puller


class Stage:
    """A puller whose requests are kept."""

    def __init__(self, room: int = 8) -> None:
        self.now_ns, self.room, self.gone = 10**12, room, 0
        self.sent: list[tuple[str, int]] = []
        self.taken: list[bytes] = []
        self.puller = Puller(
            "life", "next", self._send, lambda: self.room, self._take, self._missing, lambda: self.now_ns
        )

    def _send(self, subject: str, data: bytes, reply: str) -> None:
        assert subject == "next"
        self.sent.append((reply, msgspec.json.decode(data)["batch"]))

    def _take(self, message: Any) -> None:
        self.taken.append(message.data)
        self.room -= 1

    def _missing(self) -> None:
        self.gone += 1

    def item(self) -> None:
        self.puller.heard(SimpleNamespace(subject="sie.work.m.p", headers=None, data=b"item"))  # type: ignore[arg-type]

    def status(self, code: str, name: str, description: str = "") -> None:
        headers = {"Status": code, "Description": description}
        self.puller.heard(SimpleNamespace(subject=name, headers=headers, data=b""))  # type: ignore[arg-type]


def test_no_more_is_asked_for_than_there_is_room_and_again_when_half_is_used() -> None:
    stage = Stage(8)
    for _ in range(3):
        stage.puller.pull()
    assert [count for _, count in stage.sent] == [8]
    for _ in range(4):
        stage.item()
        stage.puller.pull()
    assert stage.puller.asked == 4 and len(stage.taken) == 4 and len(stage.sent) == 1
    stage.room = 8
    stage.puller.pull()
    assert [count for _, count in stage.sent] == [8, 4] and stage.puller.asked == 8


def test_a_box_without_room_asks_for_nothing() -> None:
    stage = Stage(0)
    stage.puller.pull()
    assert not stage.sent


def test_a_request_ends_by_a_word_of_the_broker_and_lives_by_heartbeats() -> None:
    stage = Stage(2)
    stage.puller.pull()
    name = stage.sent[0][0]
    for _ in range(4):
        stage.now_ns += 10**9
        stage.status("100", name, "Idle Heartbeat")
        stage.puller.tick()
    assert stage.puller.asked == 2
    stage.status("408", name, "Request Timeout")
    assert stage.puller.asked == 0
    stage.puller.pull()
    stage.now_ns += 2 * 10**9
    stage.puller.tick()
    assert stage.puller.asked == 0 and len(stage.sent) == 2


def test_without_a_consumer_all_requests_are_forgotten_and_the_queue_is_made() -> None:
    for code, description in (("503", ""), ("409", "Consumer Deleted")):
        stage = Stage(4)
        stage.puller.pull()
        stage.status(code, stage.sent[0][0], description)
        assert stage.puller.asked == 0 and stage.gone == 1
    stage = Stage(4)
    stage.puller.pull()
    stage.status("409", stage.sent[0][0], "Leadership Change")
    assert stage.puller.asked == 0 and not stage.gone
