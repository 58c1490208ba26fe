"""Large values in parts: the whole comes back, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest

from ipc.errors import ProtocolError
from ipc.wire.cluster import VERSION, encode
from ipc.wire.cluster_parts import MOST_PARTS, PART_NBYTES, Head, Part, cut, is_part, joined, part_key

VALUE = bytes(range(256)) * 1000


@pytest.mark.parametrize("most", [1, 100, 1000, PART_NBYTES, 1 << 20])
def test_a_value_comes_back_whole_and_each_part_fits(most: int) -> None:
    found = cut("a.b", VALUE, most)
    assert list(found)[-1] == "a.b" and sum(map(is_part, found)) == len(found) - 1 > 0
    assert joined("a.b", found["a.b"], found) == VALUE
    if most >= 100:
        assert max(map(len, found.values())) <= min(most, PART_NBYTES)


def test_a_small_value_is_no_head() -> None:
    assert cut("a", b"small", 100) == {"a": b"small"} and joined("a", b"small", {}) == b"small"


def test_parts_of_another_value_or_missing_ones_are_none() -> None:
    found, other = cut("a", VALUE, 1000), cut("a", VALUE[::-1], 1000)
    digest = msgspec.msgpack.decode(found["a"])[2]
    for changed in (
        {part_key("a", 0): other[part_key("a", 0)]},
        {part_key("a", 0): found[part_key("a", 1)]},
        {part_key("a", 0): b"\xc1"},
        {part_key("a", 0): encode(Part(VERSION, digest, b"other bytes"))},
        {part_key("a", 0): encode(Part(VERSION, digest, bytes(9 << 20)))},
    ):
        with pytest.raises(ProtocolError):
            joined("a", found["a"], found | changed)
    with pytest.raises(ProtocolError):
        joined("a", found["a"], {})
    for head in (
        Head(VERSION + 1, digest, 1),
        Head(VERSION, digest, MOST_PARTS + 1),
        Head(VERSION, digest, 0),
    ):
        with pytest.raises(ProtocolError):
            joined("a", encode(head), found)
