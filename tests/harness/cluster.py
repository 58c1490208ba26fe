"""Boxes and gateways as real processes, joined by a real broker.

A `Box` is workers of simulated models and a bridge, without frontends of its own. A gateway is a `Server` without
workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import lives
from tests.harness.broker import broker
from tests.harness.nursery import Forked
from tests.harness.ports import free_port
from tests.harness.server import Server, alive, make_server, serving, wait_until

SETTINGS = {"queue.max_wait_s": 120, "limits.load_wait_s": 60}
_OF_FRONTENDS = tuple(
    f"PENSTOCK_{section}__"
    for section in (
        "CACHE",
        "FETCH",
        "GENERATION",
        "GRPC",
        "KSERVE",
        "LIMITS",
        "LOG",
        "QUEUE",
        "SERVER",
        "SHARED_MEMORY",
        "TRACING",
    )
)
"""What the settings of a gateway begin with that it shares with the frontends of a box."""
GATEWAY = pytest.param("gateway", marks=pytest.mark.long)
WAYS = ("workers", GATEWAY)
"""The ways to a model: through frontends of its host, and through a gateway whose only box is this host."""

_COUNTED = "TEST_COUNTED_TASKS"
"""Variable that names the file into which a bridge writes the number of its tasks."""


def tell_tasks() -> None:
    """Have SIGUSR2 write the number of tasks of the running event loop."""
    place = Path(os.environ[_COUNTED])

    def tell(*_: object) -> None:
        beside = place.with_suffix(".new")
        beside.write_text(str(len(asyncio.all_tasks())))
        beside.rename(place)

    signal.signal(signal.SIGUSR2, tell)


class Box:
    """A host of the cluster: one worker for each slot, and the bridge."""

    def __init__(
        self,
        place: Path,
        name: str,
        brokers: Sequence[str],
        models: Sequence[str] = ("fake/echo",),
        settings: Mapping[str, Any] | None = None,
        catalog: Path | None = None,
        counts_tasks: bool = False,
    ) -> None:
        """`counts_tasks`: the bridge can be asked how many tasks it has."""
        place.mkdir(parents=True, exist_ok=True)
        chosen = {"cluster.urls": ",".join(brokers), "cluster.box": name, **SETTINGS, **(settings or {})}
        where = {"catalog": catalog} if catalog is not None else {}
        self.server = make_server(place, models, chosen, **where)
        self.name, self._log_path = name, place / "bridge.log"
        self._counted = place / "bridge.tasks" if counts_tasks else None
        self.bridge: Forked | None = None
        self._told, self._status = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), ""
        self._told.bind(f"\0penstock-box-{uuid.uuid4().hex}")
        self._told.setblocking(False)

    @property
    def status(self) -> str:
        """What the bridge told systemd last: whether there is a broker, its items, the answers that it keeps."""
        with contextlib.suppress(BlockingIOError):
            while True:
                for line in self._told.recv(4096).decode().splitlines():
                    if line.startswith("STATUS="):
                        self._status = line.removeprefix("STATUS=")
        return self._status

    @property
    def items(self) -> int:
        """Items that the bridge holds, as it told last."""
        found = re.search(r"(\d+) items", self.status)
        return int(found[1]) if found else 0

    @property
    def log(self) -> str:
        """Everything that the bridge wrote."""
        return self._log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start workers and bridge."""
        self.server.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.server.start_workers()
        self.start_bridge()

    def start_bridge(self) -> None:
        """Start the bridge alone, another life of the box."""
        told = {"NOTIFY_SOCKET": f"@{self._told.getsockname()[1:].decode()}"}
        prelude = ""
        if self._counted is not None:
            told[_COUNTED], prelude = str(self._counted), f"{__name__}:tell_tasks"
        with self._log_path.open("ab") as log:
            self.bridge = lives.python(
                "frontends", ("-m", "frontend.bridge"), self.server.environment | told, log.fileno(), prelude
            )

    def tasks(self) -> int:
        """Tasks of the bridge's event loop, of a box that counts them."""
        assert self._counted is not None
        self._counted.unlink(missing_ok=True)
        self.tell(signal.SIGUSR2)
        wait_until(self._counted.exists, what="the number of tasks")
        return int(self._counted.read_text())

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the bridge."""
        assert self.bridge is not None
        self.bridge.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End the bridge by a signal; returns its exit code."""
        self.tell(number)
        assert self.bridge is not None
        return self.bridge.wait(40)

    def stop(self) -> None:
        """End everything in order, and assert that nothing is left."""
        bridge = self.bridge
        assert bridge is not None
        # A bridge that has told its state heeds signals; a bridge that is still being imported dies of them.
        wait_until(lambda: bool(self.status) or bridge.poll() is not None, what="the state of the bridge")
        assert self.end(signal.SIGTERM) == 0, self.log[-4000:]
        for worker in self.server.workers:
            worker.terminate()
        wait_until(lambda: not self.server.pids(), what="the end of all processes of the box")
        self.server.assert_nothing_left()
        assert "Traceback" not in self.log, self.log[-4000:]

    def kill(self) -> None:
        """End everything that still runs, and remove what it left."""
        for worker in self.server.workers:
            worker.kill()
        if self.bridge is not None and alive(self.bridge.pid):
            self.bridge.send_signal(signal.SIGKILL)
            self.bridge.send_signal(signal.SIGCONT)
            self.bridge.wait(40)
        for arena in self.server.arenas():
            arena.unlink(missing_ok=True)
        self._told.close()


@contextlib.contextmanager
def box(place: Path, name: str, brokers: Sequence[str], **more: Any) -> Iterator[Box]:
    """A box that runs; afterwards nothing of it is left."""
    one = Box(place, name, brokers, **more)
    try:
        one.start()
        yield one
        one.stop()
    except BaseException:
        sys.stderr.write(f"\nlast lines of box {name}:\n{one.log[-4000:]}\n{one.server.log[-2000:]}\n")
        raise
    finally:
        one.kill()


@contextlib.contextmanager
def bridge_beside(server: Server, url: str) -> Iterator[None]:
    """A bridge beside the workers of a server that runs, which is a box of this broker from then on."""
    environment = server.environment | {"PENSTOCK_CLUSTER__URLS": url, "PENSTOCK_CLUSTER__BOX": "beside"}
    with (server.run_dir.parent / "bridge.log").open("ab") as log:
        bridge = lives.python("frontends", ("-m", "frontend.bridge"), environment, log.fileno())
    try:
        yield
    finally:
        bridge.send_signal(signal.SIGKILL)
        bridge.wait(40)


@contextlib.contextmanager
def gateway(
    place: Path, brokers: Sequence[str], settings: Mapping[str, Any] | None = None
) -> Iterator[Server]:
    """A gateway that accepts requests; afterwards nothing of it is left."""
    place.mkdir(parents=True, exist_ok=True)
    chosen = {"server.engine": "cluster", "cluster.urls": ",".join(brokers), **SETTINGS, **(settings or {})}
    with serving(place, (), chosen, workers=False) as server:
        yield server
        assert server.stop() == 0


@contextlib.contextmanager
def gateway_beside(place: Path, server: Server, key: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A gateway that has all models of a server that runs, and the settings of its frontends.

    Its only box is a bridge beside the workers of that server, which does not have the models that the command of the
    server alone names. `key` are the headers of a client that may list models.
    """
    named = {each.rpartition("=")[2] for each in server.named if "=" in each}
    place.mkdir(parents=True, exist_ok=True)
    settings = {
        name.removeprefix("PENSTOCK_").replace("__", ".").lower(): value
        for name, value in server.environment.items()
        if name.startswith(_OF_FRONTENDS) and not name.endswith("__BIND")
    }
    if settings.get("grpc.enabled") == "true":
        settings["grpc.bind"] = f"127.0.0.1:{free_port()}"
    with (
        broker(place / "broker") as one,
        bridge_beside(server, one.url),
        gateway(place / "near", [one.url], settings) as near,
    ):
        wait_until(
            lambda: _loaded(near, key) == _loaded(server, key, named), what="all models at the gateway"
        )
        yield near


def ways_to(
    of: str,
    others: Mapping[str, Callable[[Path, Server], AbstractContextManager[Server]]] | None = None,
    key: Callable[[Any], Mapping[str, str]] | None = None,
) -> Any:
    """A fixture of a file, which has the server of the fixture `of` by each of `WAYS` and by those of `others`.

    `of` gives a `Server`, or a named tuple whose field `server` is the server; the fixture gives the same. `others` are
    starts of a further server beside the first, by the name of their cases. `key` makes the headers of a client that
    may list models from what `of` gives.
    """

    def ways(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, **fixtures: Any
    ) -> Iterator[Any]:
        local = fixtures[of]
        if request.param == "workers":
            yield local
            return
        server = local if isinstance(local, Server) else local.server
        gateway = partial(gateway_beside, key=key(local) if key else None)
        beside = {"gateway": gateway, **(others or {})}
        with beside[request.param](tmp_path_factory.mktemp("beside"), server) as near:
            yield near if isinstance(local, Server) else local._replace(server=near)

    # pytest reads the names of the fixtures that a fixture needs from the signature.
    needed = ("request", "tmp_path_factory", of)
    ways.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in needed]
    )
    return pytest.fixture(scope="module", params=[*WAYS, *(others or {})])(ways)


def _loaded(server: Server, key: Mapping[str, str] | None, but: Container[str] = ()) -> dict[str, Any]:
    """Whether each model is loaded, by its name, `but` for some."""
    models = server.request("GET", "/v1/models", headers=key).json()["models"]
    return {model["name"]: model["loaded"] for model in models if model["name"] not in but}


@contextlib.contextmanager
def gateway_over(
    place: Path, brokers: Sequence[str], boxes: set[str], settings: Mapping[str, Any]
) -> Iterator[Server]:
    """A gateway that has had an answer of a box, and knows that these boxes live."""
    with gateway(place, brokers, settings) as server:
        wait_until(lambda: serves(server), what="the first answer of a box")
        wait_until(lambda: living(server) == boxes, what="all boxes")
        yield server


def is_gateway(server: Server) -> bool:
    """Whether models run at boxes, so that the server has no regions and loads no models by name."""
    return server.environment.get("PENSTOCK_SERVER__ENGINE") == "cluster"


def living(server: Server) -> set[str]:
    """Names of the boxes that take work, as the gateway tells."""
    answer = server.request("GET", "/health", headers={"Accept": "application/json"}).json()
    return {worker["name"] for worker in answer["workers"] if worker["healthy"]}


def is_cut_off(server: Server) -> bool:
    """Whether a new request is told that there is no broker; one that is in flight waits for its deadline."""
    answer = server.post("/v1/encode/fake/echo", {"items": [{"text": "x"}]}, x_request_timeout="0.5")
    return b"QUEUE_UNAVAILABLE" in answer.body


def held(hold: Path, text: str = "x") -> dict[str, Any]:
    """The body of a request that stays at its box as long as the file `hold` is there."""
    return {"items": [{"text": f"#hold {hold} {text}"}]}


def in_flight(server: Server) -> float:
    """Requests that the gateway has not answered yet."""
    return server.metric("penstock_requests_in_flight")


def serves(server: Server, model: str = "fake/echo") -> bool:
    """Whether a gateway has a box with the model."""
    return server.encode(model, ["x"]).status == 200
