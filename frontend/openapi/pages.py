"""`/openapi.json`, and `/docs`, which shows it in the browser without the internet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend.http.inline_page import InlinePage
from frontend.openapi.document import schema

_HTML = Path(__file__).parent / "assets" / "docs.html"


class SchemaResource:
    """The document, made once."""

    def __init__(self) -> None:
        self._schema = schema()

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON, whatever Accept says."""
        resp.content_type = falcon.MEDIA_JSON
        resp.set_header("Cache-Control", "no-cache")
        resp.data = self._schema

    on_head = on_get


class DocsResource:
    """The page."""

    def __init__(self) -> None:
        self._page = InlinePage(_HTML, ("docs.css",), ("docs.js",))

    async def on_get(self, req: Request, resp: Response) -> None:
        """HTML."""
        self._page.send(req, resp)

    on_head = on_get


def mount(app: falcon.asgi.App[Any, Any]) -> None:
    """Add the routes; `/redoc` is where other servers have their second page."""
    docs = DocsResource()
    app.add_route("/openapi.json", SchemaResource())
    app.add_route("/docs", docs)
    app.add_route("/redoc", docs)
