"""Inputs from kept ones: a few random changes of the kinds that break readers.

All chance comes from one `random.Random`, so the same one gives the same input; hypothesis brings its own, whose draws
it can make smaller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

MOST_NBYTES = 1 << 17
LARGE_NBYTES = 70_000
"""More than any piece in which large inputs are read."""
MOST_CHANGES = 8
NUMBERS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
           (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1)  # fmt: skip
_WORDS = rb"""{ } [ ] < > ( ) " ' : ; , . # \ / * & ! ? = | % @ -- \x \777 \u0000 \ud800 \udfff null true NaN Infinity
    1e999 -0 0x10 1_0 "": [[[[ {"a":{ input shape data datatype parameters name id inputs outputs binary_data_size BYTES
    BF16 FP32 shared_memory_region b64 cls count dims batch_size version timeout sequence_id triton_ [a.b/c] gzip"""
_BYTES = (b"\0", b"\r\n", b"\n", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" ", b"\t", b"\x80" * 10,
          b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"9" * 5000)  # fmt: skip
TOKENS = (*_WORDS.split(), *_BYTES)
_DIGITS = re.compile(rb"-?[0-9]+")

Change = Callable[[Random, bytearray, Sequence[bytes]], None]


def mutated(chance: Random, seeds: Sequence[bytes]) -> bytes:
    """One of `seeds` with 1 to `MOST_CHANGES` changes, at most `MOST_NBYTES` long."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, MOST_CHANGES)):
        chance.choice(CHANGES)(chance, data, seeds)
        del data[MOST_NBYTES:]
    return bytes(data)


def _place(chance: Random, data: bytearray) -> int:
    return chance.randint(0, len(data))


def _run(chance: Random, data: bytearray) -> tuple[int, int]:
    """A run of bytes, short ones more often than long ones."""
    start = _place(chance, data)
    return start, min(len(data), start + chance.choice((1, 2, 4, 8, 16, 64, 1024, len(data))))


def _flip(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _overwrite(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _insert(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(chance, data)
    data[at:at] = chance.choice(TOKENS) * chance.choice((1, 1, 1, 2, 50))


def _replace(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start, end = _run(chance, data)
    data[start:end] = chance.choice(TOKENS)


def _cut_out(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start, end = _run(chance, data)
    del data[start:end]


def _cut_off(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[_place(chance, data) :]


def _repeat(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start, end = _run(chance, data)
    data[end:end] = data[start:end] * chance.choice((1, 1, 2, 30))


def _inflate(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start, end = _run(chance, data)
    run = bytes(data[start:end]) or b" "
    data[end:end] = run * (LARGE_NBYTES // len(run))


def _splice(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = bytearray(chance.choice(seeds))
    start, end = _run(chance, other)
    at = _place(chance, data)
    data[at:at] = other[start:end]


def _number(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    found = [match.span() for match in _DIGITS.finditer(data)]
    if found:
        start, end = chance.choice(found)
        data[start:end] = b"%d" % chance.choice(NUMBERS)


def _integer(chance: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at, nbytes = _place(chance, data), chance.choice((1, 2, 4, 8))
    number = chance.choice(NUMBERS) % (1 << 8 * nbytes)
    data[at : at + nbytes] = number.to_bytes(nbytes, "big" if chance.randrange(2) else "little")


CHANGES: tuple[Change, ...] = (
    _flip,
    _overwrite,
    _insert,
    _replace,
    _cut_out,
    _cut_off,
    _repeat,
    _inflate,
    _splice,
    _number,
    _number,
    _integer,
)
