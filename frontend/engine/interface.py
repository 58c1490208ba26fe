"""The border behind which models run: an `Engine` runs work, `Models` knows the models, `Control` loads and unloads.

`frontend.engine.local` is the implementation for workers of this host. The interface does not say where a model runs:

1. No instant of another host's clock crosses the border, no place in memory and no path. Arguments in `_ns` and the
   deadlines of a scope are CLOCK_MONOTONIC of this process, and an engine sends on how much time is left. `Work` comes
   without deadlines. `Answer.trace` is for the engine alone, which notes offsets in the scope. Large inputs lie in
   memory that the engine made (`Blocks`).
2. Workers have names. A number of a worker is for pages only.
3. What only some engines can do is asked for: `Engine.reads_regions`, `Models.control`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation, Pace, Past
from frontend.scope import ANY_BOX, Choice, RequestScope
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository import Wish
from ipc.errors import DependencyConflict, ModelLoadFailed, PenstockError, Unsupported
from ipc.wire.messages import Credits, ModelStatus, Work
from ipc.wire.stats import Stats

LOADING = "models are loading"
NONE_LOADED = "no model could be loaded"
"""Why a server is not ready: all models of its start failed to load."""
STATE_ORDER = ("loaded", "loading", "unloading", "failed", "available")
"""States of a model; over several workers, the first of these states is the state of the model."""


def why_failed(status: ModelStatus) -> PenstockError:
    """The failure of a load, as the worker reports it."""
    if status.error_class == "DEPENDENCY":
        return DependencyConflict(status.error_message, compatible_bundles=[])
    return ModelLoadFailed(
        status.error_message,
        error_class=status.error_class,
        attempts=status.attempts,
        permanent=status.permanent,
    )


class Block(Protocol):
    """Memory for the inputs of one request, made by an engine, in which the inputs need not be copied again."""

    buffer: memoryview
    """The bytes, writable until `release`."""

    def shorten(self, nbytes: int) -> None:
        """The payload is the first `nbytes`; the bytes behind are unused."""

    def release(self) -> None:
        """The request has its answer, or is given up. Safe to call twice and at any time."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Blocks(Protocol):
    """Makes blocks; the memory of all blocks together is bounded."""

    on_room: Callable[[], None]
    """Called when a block was given back, and when there will never be one."""

    @property
    def used_nbytes(self) -> int:
        """Bytes of all blocks."""

    @property
    def capacity_nbytes(self) -> int:
        """Largest block that could ever fit; 0 where inputs travel as bytes only."""

    async def reserve(self, nbytes: int) -> Block | None:
        """A block of that size; None when there is no room now, or never will be."""


class NoBlocks(Blocks):
    """Blocks of an engine that takes bytes only."""

    used_nbytes = capacity_nbytes = 0

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None

    async def reserve(self, nbytes: int) -> Block | None:
        """None: there never is room."""
        return None


Payload = bytes | memoryview | Block | None
"""Raw tensors that go with an infer call: bytes, or a block that the engine made."""


def bytes_of(payload: Payload) -> bytes | memoryview:
    """The bytes of a payload, wherever they are."""
    # PERF: every request asks, most without a payload; `bytes | memoryview` would make a type on each call.
    if payload is None:
        return b""
    return payload if isinstance(payload, (bytes, memoryview)) else payload.buffer


Wanted = Callable[[], bool]
"""Whether a model that was to be loaded is still wanted."""


def always() -> bool:
    """The model stays wanted."""
    return True


Counts = Callable[[], Mapping[tuple[str, str], float]]
"""How often things have happened so far at a gateway, by what and a label; `connected`: whether a broker is joined."""
Times = Callable[[], Sequence[tuple[str, str, float]]]
"""How long things have taken at a gateway since the last call: what, a label, seconds."""


def no_times() -> Sequence[tuple[str, str, float]]:
    """Of an engine that measures none."""
    return ()


class Engine(ABC):
    """Runs requests of all protocols."""

    blocks: Blocks
    """Memory for large inputs."""
    reads_regions = False
    """Whether the engine reads and writes shared memory of clients of this host."""

    @abstractmethod
    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work. The caller ends the lease of the answer. The scope gets worker, trace and phases.

        `payload` may not change before the work has ended, and the caller keeps a block. Cancelling the task cancels
        the work. Raises a `PenstockError`: `DeadlineExceeded` soon after the deadline of the scope, whatever became of
        the worker.
        """

    @abstractmethod
    def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AbstractAsyncContextManager[AnswerStream]:
        """Run planned work that is answered in parts, as `run`; leaving the context ends the work.

        The context is entered when the first part has arrived, or the stream has ended without a part.
        """

    @abstractmethod
    def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run planned work with a `GenerateCall`, as `run`; leaving the context ends the work.

        With `past` the text goes on behind the events that another process has told, none of which is told again.
        `pace` is told of all that arrives, and ends text that takes too long.
        The context is entered when the worker has tokenized the prompt. Raises a `PenstockError` for a request that
        fails before that.
        """

    @abstractmethod
    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason, which is `NONE_LOADED` after a start without success."""

    async def is_kept_alive(self) -> bool:
        """Whether a dead worker would be started again. If the answer stays no, the server ends as a whole."""
        return True


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. The view never changes, so any thread may read it.

    `name` tells the worker from all others, as labels of metrics do (`worker-0`). `number` is for pages: the slot of a
    worker of this host. `state` is absent, connecting, ready or leaving. `responsive`: the worker is ready and has
    answered lately. `preloaded`: the worker has tried all models of the start. `device` is the name of its device.
    `since`: when a worker that takes nothing new took its last (Unix seconds), 0 if that is unknown. `box` names the
    host of a worker in a cluster; empty for workers of this host.
    """

    name: str
    number: int
    state: str
    responsive: bool
    preloaded: bool
    device: str
    threads: int
    models: dict[str, ModelStatus]
    credits: Credits
    stats: Stats | None
    since: float = 0.0
    box: str = ""


@dataclass(frozen=True, slots=True)
class BoxView:
    """A host with workers at one moment, as a gateway knows the host. `profile` is its machine profile, or empty.

    `alive`: signs of life arrive. A box that drains finishes its work and takes no more. `room_s` and `wait_s` are
    those of its workers together, as `Credits` have them. `pool` is the pool whose work the box takes, `home` that of
    its settings.
    """

    name: str
    pool: str
    bundle: str
    alive: bool
    draining: bool
    room_s: float = 0.0
    wait_s: float = 0.0
    profile: str = ""
    home: str = ""

    @property
    def healthy(self) -> bool:
        """Whether the box takes new work."""
        return self.alive and not self.draining


class Models(ABC):
    """The models: which exist, and their states over all workers."""

    catalog: Catalog
    """The models that exist, by id."""
    control: Control | None = None
    """Loads and unloads the models; None where somebody else does, behind the engine."""

    def controlled(self) -> Control:
        """The control of the models. Raises `Unsupported` where the engine offers none."""
        if self.control is None:
            raise Unsupported(
                "models run elsewhere, and cannot be loaded, unloaded or read anew through this server"
            )
        return self.control

    def wished(self, model: str) -> bool | None:
        """Whether the hosts that have a model were told to load (true) or unload (false) the model by name last.

        None: neither, or this host is asked for its own wishes.
        """
        return None

    def is_by_name(self, entry: str) -> bool | None:
        """Whether the hosts that have a version load models by name alone; None: the settings of this host tell."""
        return None

    @property
    @abstractmethod
    def version(self) -> int:
        """Rises with every change of the catalog, of a model's state or of the workers."""

    @property
    @abstractmethod
    def is_told(self) -> bool:
        """Whether the models of repositories are known; a frontend that begins has to hear of them first."""

    @property
    @abstractmethod
    def is_learning(self) -> bool:
        """Whether the models are not known yet and a worker is up that will tell them."""

    @property
    @abstractmethod
    def removed(self) -> set[tuple[str, int]]:
        """(model, version) of what was in a repository while this frontend ran; some may be there again."""

    @abstractmethod
    def chosen(self, model: str) -> tuple[int, ...]:
        """The versions of a repository model that its files choose; more are served until one of them is loaded."""

    @abstractmethod
    def find(self, model: str) -> ModelEntry:
        """Catalog entry of a model name. Raises `ModelNotFound`."""

    @abstractmethod
    def status(self, model: str) -> ModelStatus:
        """State of a model over all workers: the first of `STATE_ORDER` that some worker reports."""

    @abstractmethod
    def is_loaded(self, model: str, revision: str = "") -> bool:
        """Whether some worker has the model, with files of that revision (empty: any)."""

    @abstractmethod
    def identity(self, model: str) -> str:
        """Stands for all that decides the numbers of a loaded model; empty while its workers differ, or without any."""

    @abstractmethod
    def why_unavailable(self, model: str) -> PenstockError:
        """Why no worker can run a model now, with a Retry-After where that helps."""

    @abstractmethod
    def workers(self) -> Sequence[WorkerView]:
        """All workers in the order of their numbers, also workers that are down."""

    def boxes(self) -> Sequence[BoxView]:
        """All hosts of a cluster by name, dead ones for a while too; none where models run on this host."""
        return ()

    @abstractmethod
    def watch(self, on: bool) -> bool:
        """Ask all workers to send `stats`, or to stop; returns whether all serving workers have answered since."""

    @abstractmethod
    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""

    @abstractmethod
    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        """Wait until some worker has the model or one of `others`; ask for the model if no worker has it.

        Of a cluster only workers count that the request's `choice` allows.

        Raises the reason if the model cannot be loaded, or not in time.
        """


class Control(ABC):
    """Loads and unloads the models of all workers, and has their files read anew."""

    @property
    @abstractmethod
    def reaches_all(self) -> bool:
        """Whether a message to all workers reaches every live worker: false while a worker is being joined."""

    @abstractmethod
    async def reread(self, until_ns: int, model: str = "", draft: Wish | None = None) -> bool:
        """Have the files of all models read now; returns whether they say something else than before.

        With a `draft` only what this wish brings for `model` is looked at. Raises `InvalidInput` for files or a draft
        that cannot be served, `ModelLoadFailed` for a draft of a model that no repository has, `NoReplica`, and
        `DeadlineExceeded`.
        """

    @abstractmethod
    async def spread(self, until_ns: int) -> None:
        """Wait until all frontends know the models and states that this one knows. Raises `DeadlineExceeded`."""

    @abstractmethod
    async def load(self, model: str, wait: bool, deadline_ns: int, is_wanted: Wanted = always) -> str:
        """Load a model although its last load may have failed; returns its state, `loading` only unless `wait`.

        With `wait`, workers that serve older files of the model load the present ones, too. `is_wanted` is asked before
        each word to a worker: of a load and an unload by name at the same time, the later one counts. Raises the error
        that keeps the model from being loaded.
        """

    @abstractmethod
    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """Unload a model from every worker; returns `available`, or `unloading` unless `wait`."""


class Configs(ABC):
    """Configurations of models at a gateway, for its routes.

    Changes raise `QueueUnavailable` where no broker keeps the configurations. Reading raises `QueueUnavailable` before
    they were read; what was read once is still shown then.
    """

    @abstractmethod
    async def put(self, body: bytes, key: str) -> tuple[int, bytes]:
        """Add the model or the profiles of a document in YAML; returns HTTP status and JSON of the answer.

        `key` is the Idempotency-Key, empty for none. Raises `InvalidInput`, `ConfigRefused`, `ContentConflict`,
        `KeyReused` and `StateFull`.
        """

    @abstractmethod
    def models(self) -> list[dict[str, Any]]:
        """Models by name, with their profiles and whether they come from here (`api`) or from files of boxes."""

    @abstractmethod
    def document(self, model: str) -> dict[str, Any]:
        """The document of a model. Raises `ModelNotFound`."""

    @abstractmethod
    def status(self, model: str) -> dict[str, Any]:
        """Which boxes of which bundles have what is configured. Raises `ModelNotFound`."""

    @abstractmethod
    def bundles(self) -> list[dict[str, Any]]:
        """Bundles by name, with the adapters that their boxes have and the number of boxes that take work."""

    @abstractmethod
    def resolve(self, model: str, bundle: str) -> dict[str, Any]:
        """Where requests for a model go. Raises `ModelNotFound` and `DependencyConflict`."""

    @abstractmethod
    def epoch(self) -> dict[str, Any]:
        """The number of the last change, and digests of bundles and of what is configured for them."""

    @abstractmethod
    def export(self) -> dict[str, Any]:
        """All documents of one epoch."""
