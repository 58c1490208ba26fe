"""Warnings that would repeat are written once, then seldom and with their number. The clock is moved by hand."""

from __future__ import annotations

import logging

import pytest

from ipc.logs import AGAIN_S, Seldom


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the logger of these tests has written."""
    return [record.message for record in caplog.records if record.name == "test"]


def test_a_kind_of_warning_is_written_at_once_and_then_seldom_with_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_ns = [0]
    seldom = Seldom(logging.getLogger("test"), lambda: now_ns[0])
    for _ in range(3):
        seldom.warning("a row was dropped", "bad")
    seldom.warning("a word was dropped", "bad")
    assert lines(caplog) == ["a row was dropped: bad", "a word was dropped: bad"]
    now_ns[0] = int(AGAIN_S * 1e9)
    seldom.warning("a row was dropped", "worse")
    assert lines(caplog)[2:] == ["a row was dropped: worse (3 times since the last line)"]


def test_a_trouble_that_is_over_is_written_at_once_when_it_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seldom = Seldom(logging.getLogger("test"), lambda: 10**12)
    seldom.over("the bucket cannot be read")
    for _ in range(2):
        seldom.warning("the bucket cannot be read", "away")
    seldom.over("the bucket cannot be read")
    seldom.warning("the bucket cannot be read", "away again")
    assert lines(caplog) == [
        "the bucket cannot be read: away",
        "the bucket cannot be read: away again",
    ]
