"""Packed bodies: what is unpacked, what is refused and when, and which encoding an answer gets."""

from __future__ import annotations

import gzip
import random
import zlib
from dataclasses import dataclass

import pytest

from frontend.http.threads import at_once
from frontend.protocols.kserve_v2 import infer
from ipc.errors import BodyTooLarge, InvalidInput, Unsupported

TEXT = b'{"inputs": []}' * 50
PACKED = {"gzip": gzip.compress(TEXT), "deflate": zlib.compress(TEXT)}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_unpacked(encoding: str) -> None:
    assert at_once(infer.unpack(PACKED[encoding], encoding, len(TEXT), 200)) == TEXT


@pytest.mark.parametrize("encoding", PACKED)
def test_the_limit_is_the_unpacked_size(encoding: str) -> None:
    with pytest.raises(BodyTooLarge, match=r"limits\.max_body_bytes"):
        at_once(infer.unpack(PACKED[encoding], encoding, len(TEXT) - 1, 200))


@dataclass
class Counts:
    """Bytes that all streams were handed, and that they made."""

    handed: int = 0
    made: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What unpacking costs."""
    found = Counts()
    real = zlib.decompressobj

    class Counting:
        def __init__(self, window: int) -> None:
            self.stream = real(window)

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            part = self.stream.decompress(data, most)
            found.handed += len(data)
            found.made += len(part)
            return part

    monkeypatch.setattr(infer.zlib, "decompressobj", Counting)
    return found


@pytest.mark.parametrize("encoding", PACKED)
def test_a_bomb_ends_at_the_ratio_without_growing_further(encoding: str, counts: Counts) -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, 16 + 15 if encoding == "gzip" else 15)
    packed = b"".join([*(bomb.compress(bytes(1 << 20)) for _ in range(64)), bomb.flush()])
    with pytest.raises(BodyTooLarge, match=r"kserve\.max_unpack_ratio"):
        at_once(infer.unpack(packed, encoding, 1 << 30, 100))
    assert counts.made <= max(infer.FREE_NBYTES, 100 * len(packed)) + 1


@pytest.mark.parametrize(
    ("content", "handed"),
    [(random.Random(1).randbytes(8 << 20), 1.0), (bytes(8 << 20), 8.0)],
    ids=["random", "zeros"],
)
def test_a_large_body_is_not_read_over_and_over(content: bytes, handed: float, counts: Counts) -> None:
    packed = gzip.compress(content, 1)
    assert at_once(infer.unpack(packed, "gzip", len(content), 2000)) == content
    assert counts.handed <= handed * len(packed)


@pytest.mark.parametrize("nbytes", [0, 1, (64 << 10) - 18, (64 << 10) - 11, 64 << 10, 150_000])
def test_what_follows_or_is_missing_is_seen_wherever_the_stream_ends(nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    packed = zlib.compress(content, 0)
    assert at_once(infer.unpack(packed, "deflate", nbytes + 1, 200)) == content
    for more in (1, 7, 200_000):
        with pytest.raises(InvalidInput, match=f"^{more} bytes follow the deflate stream"):
            at_once(infer.unpack(packed + bytes(more), "deflate", nbytes + 1, 200))
    for less in {1, 4, 5, len(packed) // 2, len(packed)}:
        with pytest.raises(InvalidInput, match="ends before its stream does"):
            at_once(infer.unpack(packed[:-less], "deflate", nbytes + 1, 200))


@pytest.mark.parametrize("nbytes", [0, 1, 150_000])
def test_a_gzip_body_of_several_members_is_read_whole(nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    packed = gzip.compress(TEXT) + gzip.compress(content, 0) + gzip.compress(b"") + gzip.compress(TEXT)
    whole = TEXT + content + TEXT
    assert at_once(infer.unpack(packed, "gzip", len(whole), 200)) == whole
    with pytest.raises(BodyTooLarge):
        at_once(infer.unpack(packed, "gzip", len(whole) - 1, 200))
    with pytest.raises(InvalidInput, match="ends before its stream does"):
        at_once(infer.unpack(packed[:-1], "gzip", len(whole), 200))
    with pytest.raises(InvalidInput, match="is not valid gzip"):
        at_once(infer.unpack(packed + bytes(7), "gzip", len(whole), 200))


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize(
    "damage", [lambda p: p[:-1], lambda p: p[:5], lambda p: b"", lambda p: b"x" + p, lambda p: p + b"x"]
)
def test_a_damaged_body_is_refused(encoding: str, damage: object) -> None:
    with pytest.raises(InvalidInput):
        at_once(infer.unpack(damage(PACKED[encoding]), encoding, 1 << 20, 200))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("header", "encoding"),
    [(None, ""), ("", ""), ("identity", ""), ("GZip", "gzip"), (" deflate ", "deflate"), ("X-Gzip", "gzip")],
)
def test_content_encodings(header: str | None, encoding: str) -> None:
    assert infer.encoding_of(header) == encoding


@pytest.mark.parametrize("header", ["br", "gzip, deflate", "zstd", "x" * 500])
def test_other_content_encodings_are_not_supported(header: str) -> None:
    with pytest.raises(Unsupported, match="gzip and deflate"):
        infer.encoding_of(header)


@pytest.mark.parametrize(
    ("accept", "json", "binary"),
    [
        (None, "", ""),
        ("", "", ""),
        ("*", "", ""),
        ("br", "", ""),
        ("gzip", "gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("gzip, deflate, br", "gzip", ""),
        ("gzip;q=0.3, deflate;q=0.8", "deflate", ""),
        ("gzip;q=0", "", ""),
        ("gzip;q=0.5, identity;q=0.9", "", ""),
        ("GZIP ; Q=1", "gzip", "gzip"),
        ("gzip;q=x", "", ""),
        ("gzip;q=nan", "", ""),
    ],
)
def test_the_encoding_of_an_answer(accept: str | None, json: str, binary: str) -> None:
    assert infer.choose(accept, binary=False) == json
    assert infer.choose(accept, binary=True) == binary


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_answers_are_packed_whole(encoding: str, unpack: object) -> None:
    packed = at_once(infer.pack([b"head", memoryview(b"tail" * 100)], encoding))
    assert unpack(packed) == b"head" + b"tail" * 100  # type: ignore[operator]
