"""Image files as clients should not send them, and unusual ones that must work, built byte by byte."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

import numpy as np
from PIL import Image

from tests.tiny.pictures import encoded, picture

MAGIC = b"\x89PNG\r\n\x1a\n"
END = struct.pack(">I4sI", 0, b"IEND", zlib.crc32(b"IEND"))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width: int, height: int) -> bytes:
    """The header chunk of an RGB PNG."""
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def png(*chunks: bytes, width: int = 1, height: int = 1) -> bytes:
    """A grey PNG with `chunks` between its header and its pixels."""
    pixels = zlib.compress((b"\0" + b"\x80" * 3 * width) * height)
    return MAGIC + header(width, height) + b"".join(chunks) + chunk(b"IDAT", pixels) + END


def vast_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises this many pixels."""
    return MAGIC + header(width, height) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + END


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """An image file with options of its format."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def bomb(nbytes: int) -> bytes:
    """Zeros by the million, compressed."""
    return b"a\0\0" + zlib.compress(bytes(nbytes), 9)


def gif(frame_width: int, frame_height: int) -> bytes:
    """A GIF of one by one pixel whose only frame has another size."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHHB", 0, 0, frame_width, frame_height, 0) + b"\x02\x02\x44\x01\0;"


def scanned_jpeg(scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    whole = saved(picture(7), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * scans + b"\xff\xd9"


def animated_webp(frames: int) -> bytes:
    """An animation whose first frame is `picture(8)`."""
    others = [Image.new("RGB", (96, 72), (at, 0, 0)) for at in range(frames - 1)]
    return saved(picture(8), "WEBP", save_all=True, append_images=others, lossless=True)


def animated_gif(frames: int) -> bytes:
    """An animation that shows `picture(8)` again and again."""
    whole = encoded(picture(8), "GIF")
    start = 13 + 3 * 2 ** ((whole[10] & 7) + 1)
    return whole[:start] + whole[start:-1] * frames + whole[-1:]


def zipped() -> bytes:
    """A zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.png", encoded(picture(1)))
    return out.getvalue()


def sixteen_bits() -> tuple[bytes, Image.Image]:
    """A grey PNG of sixteen bits, and what it looks like in eight."""
    grey = np.asarray(picture(9).convert("L")).astype(np.uint16)
    return saved(Image.fromarray(grey * 256 + 255 - grey), "PNG"), Image.fromarray(grey.astype(np.uint8))


def rotated() -> tuple[bytes, Image.Image]:
    """A JPEG that lies on its side and says so, and what it looks like upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(picture(10), "JPEG", quality=95, exif=exif)
    return data, Image.open(io.BytesIO(data)).rotate(-90, expand=True)


def as_seen(data: bytes) -> Image.Image:
    """What Pillow makes of a file, in RGB."""
    return Image.open(io.BytesIO(data)).convert("RGB")


REFUSED: dict[str, tuple[bytes, str]] = {
    "fifty thousand pixels squared": (vast_png(50_000, 50_000), "50000 x 50000 pixels"),
    "four thousand million pixels wide": (vast_png(2**32 - 1, 1), "limits.max_image_pixels"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "png, jpeg, gif, webp, bmp"),
    "zip": (zipped(), "not an image"),
    "TIFF": (encoded(picture(1), "TIFF"), "not an image"),
    "nothing": (b"", "not an image"),
    "a text": (b"river", "not an image"),
    "no pixels": (vast_png(0, 5), "header cannot be read"),
    "only a magic": (MAGIC, "header cannot be read"),
    "a JPEG without frame": (b"\xff\xd8\xff\xda\x00\x02", "header cannot be read"),
    "a JPEG of markers": (b"\xff\xd8" + b"\xff\xd0" * 500_000, "header cannot be read"),
    "a JPEG of filling": (b"\xff\xd8" + b"\xff" * 1_000_000, "header cannot be read"),
}
"""Files that are refused by their header, and what the refusal says."""

FAILED: dict[str, bytes] = {
    "JPEG cut in half": (whole := encoded(picture(2), "JPEG"))[: len(whole) // 2],
    "PNG cut in half": (whole := encoded(picture(2)))[: len(whole) // 2],
    "WebP cut in half": (whole := encoded(picture(2), "WEBP"))[: len(whole) // 2],
    "BMP cut in half": (whole := encoded(picture(2), "BMP"))[: len(whole) // 2],
    "GIF cut in half": (whole := encoded(picture(2), "GIF"))[: len(whole) // 2],
    "text that unpacks to 20 MB": png(chunk(b"zTXt", bomb(20 << 20))),
    "colour profile that unpacks to 20 MB": png(chunk(b"iCCP", bomb(20 << 20))),
    "a hundred texts of 1 MB": png(chunk(b"zTXt", bomb(1 << 20)) * 100),
    "PNG of a hundred thousand chunks": png(chunk(b"abCd") * 100_000),
    "JPEG of a thousand scans": scanned_jpeg(1000),
    "second header with more pixels": png(header(9000, 9000)),
    "frame larger than its GIF": gif(9000, 9000),
    "a strip": png(width=1, height=201),
    "a strip across": png(width=40_000, height=2),
}
"""Files that pass for images by their header and cannot be used."""

USED: dict[str, tuple[bytes, Image.Image]] = {
    "one pixel": ((one := png()), as_seen(one)),
    "long": ((long := png(width=2, height=300)), as_seen(long)),
    "CMYK": ((cmyk := encoded(picture(3).convert("CMYK"), "JPEG")), as_seen(cmyk)),
    "grey": ((grey := encoded(picture(3).convert("L"), "JPEG")), as_seen(grey)),
    "black and white": ((bits := encoded(picture(3).convert("1"))), as_seen(bits)),
    "grey with alpha": ((alpha := encoded(picture(3).convert("LA"))), as_seen(alpha)),
    "palette with alpha": (
        (palette := saved(picture(3).convert("P"), "PNG", transparency=bytes(range(256)))),
        as_seen(palette),
    ),
    "sixteen bits": sixteen_bits(),
    "on its side": rotated(),
    "interlaced GIF": ((lines := saved(picture(3), "GIF", interlace=1)), as_seen(lines)),
    "animated WebP": (animated_webp(30), picture(8)),
    "GIF of ten thousand frames": ((frames := animated_gif(10_000)), as_seen(frames)),
    "BMP": ((bmp := encoded(picture(3), "BMP")), as_seen(bmp)),
    "progressive JPEG": ((scans := saved(picture(3), "JPEG", progressive=True)), as_seen(scans)),
}
"""Unusual files, and what they show."""
