"""Bodies of multipart/form-data, part by part."""

from __future__ import annotations

BOUNDARY = "a-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
END = f"--{BOUNDARY}--\r\n".encode()


def part(name: str, data: bytes | str, filename: str | None = None) -> bytes:
    """One part with its head."""
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + (data if isinstance(data, bytes) else data.encode()) + b"\r\n"
