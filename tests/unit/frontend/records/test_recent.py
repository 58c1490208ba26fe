"""The rings of recent requests: bounded, shared between processes, never half a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.records import recent
from frontend.records.recent import (
    ANSWERS,
    ERRORS,
    SLOT_NBYTES,
    Recent,
    RecentReader,
    RecentWriter,
    ring_path,
    shown_message,
)
from frontend.status.frame import PHASES
from ipc.processes.paths import RunPaths, prepare_run_dir


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run", "test")
    prepare_run_dir(found)
    return found


def record(number: int, status: int = 200, model: str = "org/model") -> Recent:
    return Recent(
        float(number), f"req_{number}", "0" * 32, "sie", "encode", model, status, "", {"total": 1.5}
    )


def numbers(found: list[Recent]) -> list[int]:
    return [int(entry.at) for entry in found]


def test_a_reader_gets_what_is_new_of_all_frontends_in_the_order_of_time(paths: RunPaths) -> None:
    first, second = (RecentWriter(ring_path(paths, f"frontend-{slot}")) for slot in range(2))
    reader = RecentReader(paths)
    assert reader.read() == []
    first.add(record(2))
    second.add(record(1))
    second.add(record(3, status=500))
    assert reader.read() == [record(1), record(2), record(3, status=500)]
    first.add(record(4))
    assert numbers(reader.read()) == [4]
    assert reader.read() == []


def test_a_flood_of_answers_leaves_the_last_ones_and_all_errors(paths: RunPaths) -> None:
    writer = RecentWriter(ring_path(paths, "frontend-0"))
    for number in range(ERRORS):
        writer.add(record(number, status=503))
    for number in range(1000, 1000 + 3 * ANSWERS):
        writer.add(record(number))
    found = RecentReader(paths).read()
    assert numbers(found) == [*range(ERRORS), *range(1000 + 2 * ANSWERS, 1000 + 3 * ANSWERS)]
    assert ring_path(paths, "frontend-0").stat().st_size == recent.FILE_NBYTES


def test_a_new_life_of_a_slot_goes_on_where_the_old_one_ended(paths: RunPaths) -> None:
    reader = RecentReader(paths)
    for number in range(3):
        writer = RecentWriter(ring_path(paths, "frontend-0"))
        writer.add(record(number))
        writer.close()
    assert numbers(reader.read()) == [0, 1, 2]


def test_a_record_that_is_being_written_is_left_out_and_read_later(paths: RunPaths) -> None:
    path = ring_path(paths, "frontend-0")
    writer = RecentWriter(path)
    for number in range(2):
        writer.add(record(number))
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[2 * SLOT_NBYTES + 40] ^= 0xFF
    path.write_bytes(torn)
    reader = RecentReader(paths)
    assert numbers(reader.read()) == [0]
    path.write_bytes(whole)
    assert numbers(reader.read()) == [1]


@pytest.mark.parametrize("status", [200, 500])
def test_a_record_whose_writer_was_killed_in_the_middle_is_passed_over(paths: RunPaths, status: int) -> None:
    path = ring_path(paths, "frontend-0")
    writer, reader = RecentWriter(path), RecentReader(paths)
    for number in range(3):
        writer.add(record(number, status))
    place = 2 if status == 200 else ANSWERS + 2
    torn = bytearray(path.read_bytes())
    torn[place * SLOT_NBYTES + 40] ^= 0xFF
    path.write_bytes(torn)
    assert numbers(reader.read()) == [0], "what comes after it waits, so that the order stays"
    assert numbers(reader.read()) == [2]
    assert reader.read() == []
    RecentWriter(path).add(record(3, status))
    assert numbers(reader.read()) == [3], "and later ones are read once each"
    assert reader.read() == []


def test_a_client_that_went_away_is_no_error() -> None:
    assert not record(1, status=recent.CLIENT_GONE).failed
    assert record(1, status=400).failed


def test_the_longest_names_fit_and_a_longer_model_is_cut(paths: RunPaths) -> None:
    writer = RecentWriter(ring_path(paths, "frontend-0"))
    phases = dict.fromkeys((*PHASES, "total"), 123.456)
    writer.add(
        Recent(
            1.0,
            "r" * 128,
            "t" * 32,
            "sie",
            "embeddings",
            "\U0001f40e" * 5000,
            200,
            "",
            phases,
            shown_message("🐎" * 500, ""),
        )
    )
    (found,) = RecentReader(paths).read()
    assert found.model == "\U0001f40e" * 96 + "…"
    assert found.phases == phases


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("items: 2000 given, the limit is 1024", "items: 2000 given, the limit is 1024"),
        ("the worker's queue is full", "the worker's queue is full"),
        ("Model 'org/model' not found", "Model 'org/model' not found"),
        ("role: 'hunter2' is not one of user, system", "role: … is not one of user, system"),
        ('name: expected letters, got "it\'s mine"', "name: expected letters, got …"),
        ("got 'it\\'s mine' and 'more'", "got … and …"),
        ("got b'raw' here", "got … here"),
        ("cut 'in the midd", "cut …"),
        ("cut 'behind a \\", "cut …"),
        ("lines 'one\ntwo'", "lines …"),
    ],
)
def test_the_message_of_an_error_shows_no_value_of_a_request(message: str, shown: str) -> None:
    assert shown_message(message, "org/model") == shown


def test_a_long_message_is_cut_within_a_character() -> None:
    shown = shown_message("🐎" * 500, "")
    assert shown == "🐎" * 50 + "…"
    assert shown_message("\ud800", "") == "?"
