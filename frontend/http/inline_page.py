"""A page of one file: HTML with its style and script inside, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import falcon
from falcon.asgi import Request, Response


class InlinePage:
    """HTML in which `/* style */` and `/* script */` stand for the named files of the same folder."""

    def __init__(self, html: Path, styles: Sequence[str], scripts: Sequence[str]) -> None:
        """Read the files. Raises `RuntimeError` when a mark is missing."""
        style, script = (f"\n{_joined(html.parent, names)}" for names in (styles, scripts))
        page = html.read_text(encoding="utf-8")
        for mark, text in (("/* style */", style), ("/* script */", script)):
            if page.count(mark) != 1:
                raise RuntimeError(f"{html.name} must contain {mark} once")
            page = page.replace(mark, text)
        self._page = page.encode()
        self._etag = hashlib.sha256(self._page).hexdigest()[:16]
        self._headers = page_headers(_source_hash(script), _source_hash(style), "data:")

    def send(self, req: Request, resp: Response) -> None:
        """Answer with the page, or with 304 when the client has it."""
        resp.set_headers(self._headers)
        resp.etag = self._etag
        if any(tag in (self._etag, "*") for tag in req.if_none_match or ()):
            resp.status = falcon.HTTP_304
            return
        resp.content_type = falcon.MEDIA_HTML
        resp.data = self._page


def page_headers(scripts: str, styles: str, images: str) -> dict[str, str]:
    """Headers of a page that may load scripts, styles and images from these sources, and may ask this server only."""
    policy = (
        "default-src 'none'",
        f"script-src {scripts}",
        f"style-src {styles}",
        f"img-src {images}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _joined(folder: Path, names: Sequence[str]) -> str:
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _source_hash(text: str) -> str:
    """Source expression of an inline element (Content Security Policy Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
