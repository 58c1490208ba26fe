"""The list of inputs that crashed workers, as several frontends share it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from frontend.engine.local.poison import PoisonList
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InferCall, InputItem, Step

CALL = EncodeCall([InputItem("boom")], ["dense"])
OTHER = EncodeCall([InputItem("fine")], ["dense"])


def test_a_poison_is_refused_at_once_here_and_after_a_look_elsewhere(tmp_path: Path) -> None:
    here, elsewhere = PoisonList(tmp_path, 600), PoisonList(tmp_path, 600)
    here.add("m", CALL)
    assert here.holds("m", CALL)
    assert not here.holds("m", OTHER) and not here.holds("other model", CALL)
    assert not elsewhere.holds("m", CALL)
    elsewhere.refresh()
    assert elsewhere.holds("m", CALL)


def test_a_poison_is_one_by_whatever_route_it_comes(tmp_path: Path) -> None:
    poison = PoisonList(tmp_path, 600)
    poison.add("m", CALL)
    assert poison.holds("m", EncodeCall([InputItem("boom")], ["dense"], names=FieldNames(text="input")))


def test_a_poison_survives_a_restart_and_ages_out(tmp_path: Path) -> None:
    PoisonList(tmp_path, 600).add("m", CALL)
    restarted = PoisonList(tmp_path, 600)
    restarted.refresh()
    assert restarted.holds("m", CALL)
    [note] = tmp_path.iterdir()
    os.utime(note, (time.time() - 601, time.time() - 601))
    restarted.refresh()
    assert not restarted.holds("m", CALL)
    assert not list(tmp_path.iterdir())


def test_notes_tell_nothing_about_the_text(tmp_path: Path) -> None:
    PoisonList(tmp_path, 600).add("m", CALL)
    [note] = tmp_path.iterdir()
    assert note.read_bytes() == b"" and "boom" not in note.name
    assert note.stat().st_mode & 0o777 == 0o600


def test_a_poison_is_refused_even_when_it_cannot_be_noted(tmp_path: Path) -> None:
    alone = PoisonList(tmp_path / "missing", 600)
    alone.add("m", CALL)
    assert alone.holds("m", CALL)
    alone.refresh()


def step(name: int, **flags: bool) -> InferCall:
    """A request of a sequence."""
    return InferCall([], [], step=Step(name, **flags))


def test_what_begins_a_sequence_is_the_same_input_under_any_id(tmp_path: Path) -> None:
    listed = PoisonList(tmp_path, 600)
    listed.add("m", step(1, start=True), b"bad")
    assert listed.holds("m", step(2, start=True), b"bad")
    assert not listed.holds("m", step(2, start=True), b"good")
    assert not listed.holds("m", step(2, start=True, end=True), b"bad")
    listed.add("m", step(1), b"later")
    assert listed.holds("m", step(1), b"later")
    assert not listed.holds("m", step(2), b"later"), "the state of another sequence is another"


def test_only_a_death_alone_makes_a_suspect_poison(tmp_path: Path) -> None:
    listed = PoisonList(tmp_path, 600)
    assert not listed.is_suspect("m", step(1, start=True))
    for name in (1, 2):
        listed.suspect("m", step(name, start=True), alone=False)
        assert listed.is_suspect("m", step(9, start=True)) and not listed.holds("m", step(9, start=True))
    listed.suspect("m", step(3, start=True), alone=True)
    assert listed.holds("m", step(4, start=True))
