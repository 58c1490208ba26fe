"""`/`: the live page for browsers, `OK` for everyone else. The page is static and holds no data of the server.

`mount` adds the page and the stream that it shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend.http.inline_page import InlinePage
from frontend.services import Services
from frontend.status.stream import StreamResource

_HTML = Path(__file__).parent / "assets" / "page.html"
_STYLES = ("page.css",)
_SCRIPTS = ("format.js", "charts.js", "past.js", "panels.js", "stream.js")


class PageResource:
    """The page with its style and script inside."""

    def __init__(self) -> None:
        self._page = InlinePage(_HTML, _STYLES, _SCRIPTS)

    async def on_get(self, req: Request, resp: Response) -> None:
        """HTML when Accept names it, else `OK`."""
        resp.append_header("Vary", "Accept")
        if "text/html" not in (req.get_header("Accept") or "").lower():
            resp.content_type = falcon.MEDIA_TEXT
            resp.text = "OK"
            return
        self._page.send(req, resp)

    on_head = on_get


def mount(app: falcon.asgi.App[Any, Any], services: Services) -> None:
    """Add `/` and `/ws/status`."""
    app.add_route("/", PageResource())
    app.add_route("/ws/status", StreamResource(services))
    # The stream reads by itself what clients send, so Falcon need not do so to notice that they go.
    app.ws_options.max_receive_queue = 0
