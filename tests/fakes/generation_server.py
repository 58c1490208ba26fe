"""The routes of generated text over an engine that tells recorded events: in memory, or on a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import falcon.asgi
import msgspec
import orjson
import uvicorn
from falcon.testing import TestClient
from falcon.util import async_to_sync

from frontend.access.gate import Gate
from frontend.app import Application, DeadlineMiddleware, ErrorRenderer, RequestMiddleware, access_middleware
from frontend.engine.events import Arguments, Called, Ended, Event, Finished, Started, Text
from frontend.http.listeners import Listeners
from frontend.protocols.agent import AgentProtocol
from frontend.protocols.chat import ChatProtocol
from frontend.protocols.files import FilesProtocol
from frontend.protocols.messages import MessagesProtocol
from frontend.protocols.ollama import OllamaProtocol
from frontend.protocols.registry import Protocols
from frontend.protocols.responses import ResponsesProtocol
from frontend.protocols.sie import SieProtocol
from frontend.protocols.skills import SkillsProtocol
from frontend.services import Services
from frontend.state.state import State
from ipc.catalog.entries import OutputSpec
from ipc.errors import PenstockError
from ipc.wire.messages import ModelStatus
from tests.fakes.described_answers import DescribedAnswers
from tests.fakes.engine import InProcessDirectory
from tests.fakes.generation import RecordedEngine, Step
from tests.fakes.tensors import entry, services_of

CHAT, DENSE = "tiny/chat", "org/dense"
ENDED = Ended(4, 2, prompt_s=0.5, completion_s=0.5)
SCRIPT: list[Step] = [
    [Started(4)],
    [Text(0, "Hello")],
    [Text(0, " you"), Finished(0, "stop", tokens=2), ENDED],
]
"""A prompt of four tokens, answered with "Hello you"."""


def in_pieces(called: Called, nbytes: int = 3) -> list[Event]:
    """The events of a call whose arguments come in pieces of so many characters."""
    begun, *_, end = called.events()
    pieces = range(0, len(called.arguments), nbytes)
    return [begun, *(Arguments(called.choice, called.arguments[at : at + nbytes]) for at in pieces), end]


def calling(call_id: str, name: str, city: str) -> list[Step]:
    """A prompt of nine tokens, answered with a call of the tool `name` for a city."""
    called = Called(0, 0, call_id, name, f'{{"city":"{city}"}}')
    return [[Started(9)], [*called.events(), Finished(0, "tool_calls", tokens=7), Ended(9, 7)]]


def app_of(services: Services, known: Protocols, *, with_keys: bool = False) -> falcon.asgi.App[Any, Any]:
    """An application with the middleware, the error forms and the routes of these protocols."""
    cors, access = access_middleware(services, known)
    middleware = [RequestMiddleware(services, known), cors, *([access] if with_keys else [])]
    described = DescribedAnswers(is_gateway=services.settings.is_gateway)
    app = falcon.asgi.App(middleware=[*middleware, DeadlineMiddleware(services), described])
    renderer = ErrorRenderer(known)
    app.add_error_handler(Exception, renderer.unexpected)
    app.add_error_handler(falcon.HTTPError, renderer.http)
    app.add_error_handler(PenstockError, renderer.penstock)
    known.mount(app, services)
    return app


@contextmanager
def listening(application: Application) -> Iterator[str]:
    """The address of an application on a socket, as the beginning of a URL."""
    config = uvicorn.Config(
        application, host="127.0.0.1", port=0, lifespan="off", log_level="error", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="listening-server", daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class RecordedServer:
    """All protocols of JSON in and out, over a model that tells recorded events and one that gives vectors."""

    def __init__(
        self, root: Path, gate: Gate | None = None, *, seeing: Sequence[str] = (), **settings: Any
    ) -> None:
        """`gate` may ask for keys; models of `seeing` read pictures; `settings` as `section__field`."""
        texts = dict.fromkeys((CHAT, *seeing))
        generators = [msgspec.structs.replace(entry(name), outputs={"chat": OutputSpec()}) for name in texts]
        self.services: Services = services_of(root, [*generators, entry(DENSE)], [], **settings)
        self.services.engine.client.inputs.close()  # type: ignore[attr-defined]
        statuses = [
            ModelStatus(name, "loaded", max_sequence_length=64, sees=name in seeing, image_tokens=20)
            for name in (*texts, DENSE)
        ]
        self.services.state = State(self.services.settings)
        self.engine = RecordedEngine([SCRIPT])
        self.services.engine = self.engine
        self.services.directory = InProcessDirectory(self.services.catalog, statuses)
        if gate is not None:
            self.services.access = gate
        self.known = Protocols(
            [
                SieProtocol(),
                ChatProtocol(),
                ResponsesProtocol(),
                MessagesProtocol(),
                FilesProtocol(),
                SkillsProtocol(),
                AgentProtocol(),
                OllamaProtocol(),
            ]
        )
        app = app_of(self.services, self.known, with_keys=gate is not None)
        self.client = TestClient(app)
        self.application = Application(
            app, self.known, self.services, Listeners(self.services.settings.server)
        )

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The response to JSON."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.client.simulate_post(
            path, body=raw, headers={"Content-Type": "application/json", **headers}
        )

    def script(self, *scripts: Sequence[Step] | PenstockError) -> None:
        """What the engine tells from now on, a script for each request, the last for all that follow."""
        self.engine.scripts = list(scripts)

    def anew(self) -> RecordedServer:
        """This server, which answers "Hello you" from now on and has been asked nothing."""
        self.script(SCRIPT)
        self.engine.works.clear()
        return self

    def close(self) -> None:
        """End the connections of fetches."""
        async_to_sync(self.services.close_fetcher)

    def listening(self) -> AbstractContextManager[str]:
        """The address of this server on a socket, as the beginning of a URL."""
        return listening(self.application)
