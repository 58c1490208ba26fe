"""What a box tells of items that were given up, without a broker."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.bridge.dead_letters import DeadLetters
from ipc.settings import Cluster
from ipc.wire.cluster import Item
from ipc.wire.cluster_names import Names

ITEM = Item("r.1", "q", "encode", "org/m.1", "default", "r", "_INBOX.r.results")


class Box:
    def __init__(self, **settings: Any) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        broker: Any = SimpleNamespace(on_up=[], say=self._say, inline_nbytes=10_000)
        self.letters = DeadLetters(Cluster(box="a", **settings), broker, Names())

    def _say(self, subject: str, data: bytes) -> None:
        self.said.append((subject, msgspec.json.decode(data)))


def test_a_letter_names_the_item_and_holds_no_input() -> None:
    box = Box()
    box.letters.keep("poison", b"secret text", ITEM, "two workers died")
    ((subject, letter),) = box.said
    assert subject == "sie.dlq.org__m_dot_1"
    assert (letter["reason"], letter["box"], letter["nbytes"]) == ("poison", "a", 11)
    assert (letter["work_item_id"], letter["model_id"], letter["error"]) == (
        "r.1",
        "org/m.1",
        "two workers died",
    )
    assert letter["body"] == ""


def test_bodies_are_kept_where_the_settings_say_so_and_they_fit() -> None:
    box = Box(dead_letter_bodies=True)
    box.letters.keep("poison", b"text", ITEM)
    box.letters.keep("poison", b"x" * 9000, ITEM)
    assert [base64.b64decode(letter["body"]) for _, letter in box.said] == [b"text", b""]


@pytest.mark.parametrize("model", ["", "a\x00b", "\u2028"])
def test_what_names_no_model_has_a_letter_of_its_own(model: str) -> None:
    box = Box()
    box.letters.keep("unreadable", b"\xc1", msgspec.structs.replace(ITEM, model_id=model), "e" * 5000)
    box.letters.keep("unreadable", b"\xc1")
    assert [subject for subject, _ in box.said] == ["sie.dlq.unknown"] * 2
    assert len(box.said[0][1]["error"]) == 256
