"""Format and size of images, read from their headers before any decoder runs.

The declared format is not trusted. PNG, JPEG, GIF, WebP and BMP are known; other data (SVG, archives, text) and images
with more pixels than the limit are refused. Reading a header takes a bounded number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frontend.http.threads import Steps, at_once, in_steps
from ipc.errors import InvalidInput
from ipc.settings import Limits

LONG_NBYTES = 64 << 10
"""Images with more bytes in all are looked at in a thread: a header may be as long as its file."""
FORMATS = ("png", "jpeg", "gif", "webp", "bmp")

_JPEG_SEGMENTS, _JPEG_JUNK_NBYTES = 2048, 256
"""Segments before the first scan, and bytes between two of them that are no marker: more is no photograph."""
_JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_JPEG_BARE = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})


def check_image(data: bytes, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for bytes that are no image of `FORMATS`, or one over `limits`; `where` is its JSON path."""
    if len(data) > limits.max_image_bytes:
        raise InvalidInput(
            f"{where}: {len(data)} bytes, the limit is {limits.max_image_bytes} (limits.max_image_bytes)"
        )
    kind = sniff(data)
    if kind is None:
        raise InvalidInput(f"{where}: not an image in one of {', '.join(FORMATS)}")
    size = dimensions(data, kind)
    if size is None or not all(size):
        raise InvalidInput(f"{where}: a {kind} image whose header cannot be read")
    width, height = size
    if width * height > limits.max_image_pixels:
        raise InvalidInput(
            f"{where}: {width} x {height} pixels, the limit is {limits.max_image_pixels} in all "
            "(limits.max_image_pixels)"
        )


async def check_all(images: Sequence[tuple[str, bytes]], limits: Limits) -> None:
    """`check_image` for each of them, by JSON path; in a thread, step by step, where that takes long."""
    steps = _each(images, limits)
    if sum(len(data) for _, data in images) > LONG_NBYTES:
        await in_steps(steps)
    else:
        at_once(steps)


def _each(images: Sequence[tuple[str, bytes]], limits: Limits) -> Steps[None]:
    for where, data in images:
        check_image(data, where, limits)
        yield


def sniff(data: bytes) -> str | None:
    """Format of an image by its magic bytes."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith(b"BM"):
        return "bmp"
    return None


def dimensions(data: bytes, kind: str) -> tuple[int, int] | None:
    """(width, height) in pixels that the header of a `kind` image states; None when the header is cut or broken."""
    try:
        return _READERS[kind](data)
    except IndexError:
        return None


def _int(data: bytes, start: int, nbytes: int, order: str = "little") -> int:
    if start + nbytes > len(data):
        raise IndexError
    return int.from_bytes(data[start : start + nbytes], "big" if order == "big" else "little")


def _png(data: bytes) -> tuple[int, int] | None:
    if data[12:16] != b"IHDR":
        return None
    return _int(data, 16, 4, "big"), _int(data, 20, 4, "big")


def _gif(data: bytes) -> tuple[int, int]:
    return _int(data, 6, 2), _int(data, 8, 2)


def _bmp(data: bytes) -> tuple[int, int]:
    if _int(data, 14, 4) == 12:
        return _int(data, 18, 2), _int(data, 20, 2)
    height = _int(data, 22, 4)
    return _int(data, 18, 4), min(height, (1 << 32) - height)


def _webp(data: bytes) -> tuple[int, int] | None:
    chunk = data[12:16]
    if chunk == b"VP8X":
        return _int(data, 24, 3) + 1, _int(data, 27, 3) + 1
    if chunk == b"VP8L":
        bits = _int(data, 21, 4)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return _int(data, 26, 2) & 0x3FFF, _int(data, 28, 2) & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """The size in the last frame header before the first scan, which is the header that decoders read."""
    at, size = 2, None
    for _ in range(_JPEG_SEGMENTS):
        at = data.find(b"\xff", at, at + _JPEG_JUNK_NBYTES)
        if at < 0:
            return None
        marker = _int(data, at + 1, 1)
        if marker == 0xDA:
            return size
        if marker == 0xD9:
            return None
        if marker in _JPEG_SIZES:
            size = _int(data, at + 7, 2, "big"), _int(data, at + 5, 2, "big")
        at += _jpeg_step(data, at, marker)
    return None


def _jpeg_step(data: bytes, at: int, marker: int) -> int:
    """Bytes from a marker to where the next one is looked for."""
    if marker == 0xFF:
        return 1
    return 2 if marker in _JPEG_BARE else 2 + max(2, _int(data, at + 2, 2, "big"))


_READERS: dict[str, Callable[[bytes], tuple[int, int] | None]] = {
    "png": _png,
    "jpeg": _jpeg,
    "gif": _gif,
    "webp": _webp,
    "bmp": _bmp,
}
