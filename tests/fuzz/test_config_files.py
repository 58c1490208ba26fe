"""Configuration files of model repositories: thousands of broken ones, each refused in a moment and without growth."""

from __future__ import annotations

import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.repository.test_repository_properties import PIECES, VALID, read
from workers.repository import configuration

pytestmark = pytest.mark.fuzz
LONGEST_S = 5.0
"""No file takes longer; the longest one is 1 MiB of brackets."""


def timed(raw: bytes) -> None:
    """Read a file in both forms."""
    for parse in (configuration.parse_text, configuration.parse_yaml):
        began = time.monotonic()
        read(raw, parse)
        assert time.monotonic() - began < LONGEST_S


@pytest.mark.timeout(900)
@given(st.data())
@settings(settings.get_profile("default"), max_examples=20_000, deadline=None)
def test_no_file_crashes_hangs_or_grows(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([VALID, b"", b"input: [{name: A, dims: [1]}]\n"])))
    for _ in range(data.draw(st.integers(0, 12))):
        at = data.draw(st.integers(0, len(raw)))
        put = data.draw(PIECES | st.binary(max_size=8) | st.text(max_size=8).map(str.encode))
        raw[at : at + data.draw(st.integers(0, 16))] = put * data.draw(st.sampled_from([1, 1, 1, 2, 50]))
    timed(bytes(raw))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20, "kilobytes"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "piece", [b"[", b"{", b"<", b"a: [", b"- ", b"? ", b'"', b"input {", b"input { dims: [", b"\n ", b"#"]
)
def test_a_file_of_one_piece_over_and_over(piece: bytes) -> None:
    timed((piece * (configuration.MOST_CONFIG_NBYTES // len(piece)))[: configuration.MOST_CONFIG_NBYTES])
