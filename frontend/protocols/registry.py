"""The protocols of this build, and the choice of the protocol that renders the errors of a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import falcon
import falcon.asgi
import orjson

from frontend.services import Services
from ipc.errors import PenstockError

if TYPE_CHECKING:
    from falcon.asgi import Request

    from frontend.grpc.call import GrpcService


Rendered = tuple[int, dict[str, Any] | None, dict[str, str]]
"""(status, JSON body or None for an empty one, headers) of an error."""


def as_bytes(rendered: Rendered) -> tuple[int, bytes, dict[str, str]]:
    """The rendered error with its body as bytes, and the media type among the headers."""
    status, body, headers = rendered
    if body is None:
        return status, b"", headers
    return status, orjson.dumps(body), {"Content-Type": "application/json", **headers}


class WireProtocol(Protocol):
    """One contract: its routes, and its form of an error."""

    name: str
    prefixes: Sequence[str]

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes of this protocol."""

    def inference_at(self, path: str) -> tuple[str, str]:
        """(operation, model) of `path`, to count requests refused before a responder; empty for other paths."""

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """The form of an error on `path`; `req` is None if the server refuses the request itself."""

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """The form of an error of the framework: unknown paths, wrong methods, bad header fields."""


class Protocols:
    """The protocols of an application. Each path belongs to one of them."""

    def __init__(self, known: Sequence[WireProtocol]) -> None:
        self._known = known

    def __iter__(self) -> Iterator[WireProtocol]:
        return iter(self._known)

    def of(self, path: str) -> WireProtocol:
        """The protocol with the longest prefix of whole segments of `path`; the first protocol, if none fits."""
        # PERF: called for every request, so the time does not grow with the number of prefixes.
        whole, folders, best, end = f"{path}/", self._folders, self._known[0], 0
        while end := whole.find("/", end) + 1:
            found = folders.get(whole[:end])
            if found is None:
                break
            best = found[-1] if found else best
        return best

    @cached_property
    def _folders(self) -> dict[str, list[WireProtocol]]:
        """The protocols with a prefix by prefix, the first protocol last, and an empty list for folders above a prefix.

        Made at the first request: protocols learn which of their routes are served when they are mounted.
        """
        found: dict[str, list[WireProtocol]] = {}
        for protocol in reversed(self._known):
            for prefix in protocol.prefixes:
                folder = ""
                for segment in prefix.rstrip("/").split("/"):
                    folder += f"{segment}/"
                    found.setdefault(folder, [])
                found[folder].append(protocol)
        return found


def protocols() -> Protocols:
    """All protocols of this build, most specific prefix first."""
    from frontend.protocols.chat import ChatProtocol
    from frontend.protocols.cohere import CohereProtocol
    from frontend.protocols.infinity import InfinityProtocol
    from frontend.protocols.kserve_v2 import KserveProtocol
    from frontend.protocols.messages import MessagesProtocol
    from frontend.protocols.ollama import OllamaProtocol
    from frontend.protocols.responses import ResponsesProtocol
    from frontend.protocols.sie import SieProtocol
    from frontend.protocols.tei import TeiProtocol
    from frontend.protocols.trtis_v1 import TrtisProtocol
    from frontend.protocols.vllm import VllmProtocol

    known: list[WireProtocol] = [
        SieProtocol(),
        CohereProtocol(),
        ChatProtocol(),
        ResponsesProtocol(),
        MessagesProtocol(),
        TeiProtocol(),
        VllmProtocol(),
        InfinityProtocol(),
        OllamaProtocol(),
        TrtisProtocol(),
        KserveProtocol(),
    ]
    return Protocols(known)


def schema() -> bytes:
    """The OpenAPI document of this build as JSON. The first call takes a fifth of a second."""
    from frontend.protocols import tables

    return tables.schema()


def grpc_services(services: Services) -> list[GrpcService]:
    """All services of the gRPC server. To be called in frontends only, since it imports gRPC."""
    from frontend.protocols.kserve_v2.grpc.service import KserveService
    from frontend.protocols.trtis_v1.grpc.service import TrtisService

    return [KserveService(services.settings.kserve, services.restrictions), TrtisService(services)]
