"""Elements of BYTES tensors: taken apart and joined, and every length that lies is refused."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest

from ipc.errors import InvalidInput
from ipc.memory import datatypes


def raw(*elements: bytes) -> bytes:
    """The tensor, written by hand."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    "elements",
    [
        [],
        [b""],
        [b"abc"],
        [b"", b"", b""],
        [b"ab", b"cd", b"ef"],
        [b"a", b"", b"bcd"],
        [b"\x00\xff" * 40, b"\x04\x00\x00\x00"],
        [bytes([at]) * 7 for at in range(256)],
    ],
)
def test_elements_survive_joining_and_splitting(elements: list[bytes]) -> None:
    joined = datatypes.join(elements)
    assert joined == raw(*elements)
    for data in (joined, memoryview(joined), memoryview(bytearray(joined))):
        assert [bytes(found) for found in datatypes.split(data, len(elements), "x")] == elements


def test_elements_of_random_lengths_survive() -> None:
    chance = random.Random(3)
    for _ in range(200):
        elements = [chance.randbytes(chance.choice((0, 1, 4, 9))) for _ in range(chance.randrange(9))]
        found = datatypes.split(raw(*elements), len(elements), "x")
        assert [bytes(element) for element in found] == elements


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"", 1, "x: expected 1 elements, got 0"),
        (raw(b"a"), 0, "x: expected 0 elements, got 5 bytes more"),
        (raw(b"a", b"b"), 1, "x: expected 1 elements, got 5 bytes more"),
        (raw(b"a"), 2, "x: expected 2 elements, got 1"),
        (b"\x01", 1, "x: element 0 has no complete length: 1 of 4 bytes"),
        (raw(b"ab") + b"\x00\x00\x00", 2, "x: element 1 has no complete length: 3 of 4 bytes"),
        (struct.pack("<I", 2) + b"a", 1, "x: element 0 says 2 bytes, but 1 are left"),
        (struct.pack("<I", 0xFFFFFFFF) + b"a" * 8, 1, "x: element 0 says 4294967295 bytes, but 8 are left"),
        (raw(b"ab") + struct.pack("<I", 3) + b"ab", 2, "x: element 1 says 3 bytes, but 2 are left"),
        (raw(b"ab") + b"z", 1, "x: expected 1 elements, got 1 bytes more"),
    ],
)
def test_lengths_that_lie_are_refused(data: bytes, count: int, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        datatypes.split(data, count, "x")
    assert refused.value.message.startswith(message)


def test_random_bytes_never_do_anything_else() -> None:
    chance = random.Random(4)
    for _ in range(2000):
        data, count = chance.randbytes(chance.randrange(40)), chance.randrange(6)
        data = bytes(byte if chance.random() < 0.3 else byte % 3 for byte in data)
        try:
            found = datatypes.split(data, count, "x")
        except InvalidInput:
            continue
        assert raw(*map(bytes, found)) == data
        assert len(found) == count


@pytest.mark.parametrize("lengths", [[0] * 50, [7] * 50, [0, 900, 3], [5000], [5000, 6000], []])
def test_elements_as_objects_are_those_of_the_tensor(lengths: list[int]) -> None:
    chance = random.Random(5)
    elements = [chance.randbytes(length) for length in lengths]
    found = datatypes.objects(memoryview(raw(*elements)), len(elements), "x")
    assert found.shape == (len(elements),) and found.tolist() == elements
    assert all(type(element) is bytes for element in found)
    with pytest.raises(InvalidInput, match=f"x: expected {len(elements) + 1} elements, got {len(elements)}"):
        datatypes.objects(raw(*elements), len(elements) + 1, "x")


@pytest.mark.parametrize("odd", [b"", b"y"])
def test_objects_of_many_empty_elements_take_no_view_each(odd: bytes) -> None:
    count = 50_000
    data = raw(*[b""] * (count - 1), odd)
    tracemalloc.start()
    found = datatypes.objects(data, count, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == count and peak < 40 * count


def test_elements_of_a_request_are_counted_together() -> None:
    most = datatypes.MOST_ELEMENTS
    datatypes.check_counts([("a", most // 2), ("b", most // 2)])
    with pytest.raises(
        InvalidInput, match=f"^a: it has {most + 1} elements of BYTES, a request may have {most}$"
    ):
        datatypes.check_counts([("a", most + 1), ("b", 1)])
    with pytest.raises(InvalidInput, match=f"^b: it has {most} elements of BYTES and those before it 1, "):
        datatypes.check_counts([("a", 1), ("b", most)])
    with pytest.raises(InvalidInput, match=r"^a: it has more than 2\^62 elements"):
        datatypes.check_counts([("a", 10**5000)])
