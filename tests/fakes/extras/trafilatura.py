"""Finds the text of pages without a parser: a command in the page says what happens."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any


def bare_extraction(page: bytes, **options: Any) -> dict[str, Any] | None:
    """The page without tags; `#hang`, `#crash`, `#raise`, `#nothing`, `#print`, `#memory`, `#write`, `#net`, `#much`"""
    if b"#hang" in page:
        time.sleep(3600)
    if b"#spin" in page:
        while True:
            pass
    if b"#crash" in page:
        os.abort()
    if b"#raise" in page:
        raise ValueError("a page of strangers")
    if b"#nothing" in page:
        return None
    if b"#print" in page:
        print('{"text": "printed"}', flush=True)
    if b"#memory" in page:
        return {"text": str(len(bytearray(8 << 30)))}
    if b"#write" in page:
        try:
            with tempfile.TemporaryFile(buffering=0) as file:
                file.write(b"x")
        except OSError:
            return {"text": "no file"}
    if b"#net" in page:
        return {"text": str(Path("/proc/self/ns/net").readlink())}
    if b"#much" in page:
        return {"text": "x" * (64 << 20)}
    found = re.search(rb"<title>(.*?)</title>", page)
    text = re.sub(r"<[^>]*>", "", page.decode(errors="replace"))
    return {"text": text.strip(), "title": found[1].decode() if found else None}
