"""Trace ids that callers send, in the present version of the header and in those to come."""

from __future__ import annotations

import re

import pytest

from frontend.scope import scope_of_ids
from ipc.settings import Limits

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("given", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"01-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-03-what-the-future-holds", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-02-", f"00-{TRACE}-{SPAN}-00"),
    ],
)
def test_a_valid_traceparent_is_taken_up(given: str, parent: str) -> None:
    made = scope_of_ids("", given, Limits())
    assert (made.trace_id, made.parent) == (TRACE, parent)


@pytest.mark.parametrize(
    "given",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01more",
        f"01-{TRACE}-{SPAN}",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"01-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_any_other_is_replaced(given: str) -> None:
    made = scope_of_ids("", given, Limits())
    assert made.parent == "" and made.trace_id != TRACE
    assert re.fullmatch("[0-9a-f]{32}", made.trace_id)
