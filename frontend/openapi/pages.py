"""The routes of the API's description: the document, and Swagger UI, which shows the document without the internet.

1. `/openapi.json` and `/api-doc/openapi.json` give the document, which a frontend makes at the first request for the
   document. Making the document takes a fifth of a second, and no start of a frontend waits for it.
2. `/docs`, `/docs/` and `/redoc` give the page. Its policy lets the page load from this server only.
3. `/docs/<file>` gives the page's files: our style, our script that starts Swagger UI, and Swagger UI from the package
   `swagger-ui-py`, of which nothing is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import falcon
from falcon.asgi import Request, Response

from frontend.http.inline_page import page_headers

_OWN = Path(__file__).parent / "assets"
_PAGE = "docs.html"
_TYPES = {".html": falcon.MEDIA_HTML, ".css": "text/css", ".js": "text/javascript", ".png": falcon.MEDIA_PNG}
_OURS = (_PAGE, "page.css", "start.js")
_PACKAGED = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
_HEADERS = page_headers("'self'", "'self'", "'self' data:")


def _files() -> dict[str, Path]:
    """Files of the page by name. Raises `RuntimeError` if the package of Swagger UI is missing."""
    package = find_spec("swagger_ui")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the package swagger-ui-py is not installed; /docs needs its files")
    packaged = Path(package.submodule_search_locations[0]) / "static"
    return {name: packaged / name for name in _PACKAGED} | {name: _OWN / name for name in _OURS}


@cache
def _read(path: Path) -> tuple[bytes, str]:
    """A file and its ETag. Kept, since frontends may serve the file at any time."""
    data = path.read_bytes()
    return data, hashlib.sha256(data).hexdigest()[:16]


class SchemaResource:
    """The document, which `schema` makes once."""

    def __init__(self, schema: Callable[[], bytes]) -> None:
        self._schema = schema

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON, whatever Accept says."""
        resp.content_type = falcon.MEDIA_JSON
        resp.set_header("Cache-Control", "no-cache")
        resp.data = await asyncio.to_thread(self._schema)

    on_head = on_get


class SwaggerResource:
    """The page, and its files by name."""

    def __init__(self) -> None:
        self._files = _files()

    async def on_get(self, req: Request, resp: Response, name: str = "") -> None:
        """A file, or 304 when the client has it. Raises `falcon.HTTPNotFound` for a file that the page lacks."""
        path = self._files.get(name or _PAGE)
        if path is None:
            raise falcon.HTTPNotFound
        data, tag = await asyncio.to_thread(_read, path)
        resp.set_headers(_HEADERS)
        resp.etag = tag
        if any(one in (tag, "*") for one in req.if_none_match or ()):
            resp.status = falcon.HTTP_304
            return
        resp.content_type = _TYPES[path.suffix]
        resp.data = data

    on_head = on_get
