"""The engine as protocols see it: runs work on models, and knows which models exist and in which states.

`frontend.engine.local` is the implementation for workers of this host. The interface does not say where a model runs:
the request's scope has the deadline, and an engine that reaches other hosts turns the deadline into time left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from frontend.engine.answer import Answer, AnswerStream
from frontend.engine.events import Generation
from frontend.engine.whole_answers import WholeAnswers
from frontend.scope import RequestScope
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository import Override
from ipc.errors import PenstockError
from ipc.memory.input_arena import InputBlock
from ipc.wire.messages import Credits, ModelStatus, Work
from ipc.wire.stats import Stats

Payload = bytes | memoryview | InputBlock | None
"""Raw tensors that go with an infer call: bytes, or a block of this frontend's input arena."""

NONE_LOADED = "no model could be loaded"
"""Why a server is not ready all of whose models of the start failed to load."""
STATE_ORDER = ("loaded", "loading", "unloading", "failed", "available")
"""States of a model; over several workers, the first of these states is the state of the model."""


Wanted = Callable[[], bool]
"""Whether a model that was to be loaded is still wanted."""


def always() -> bool:
    """Nobody may change their mind."""
    return True


class Engine(ABC):
    """Runs requests of all protocols."""

    answers: WholeAnswers | None = None
    """Whole answers of requests that come again, where the engine keeps embeddings."""

    @abstractmethod
    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work; its lease is the caller's to end. Notes worker, trace and phases in the scope.

        `payload` may not change before the work has ended, and a block is still the caller's then. Cancelling the task
        cancels the work. Raises a `PenstockError`.
        """

    @abstractmethod
    def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AbstractAsyncContextManager[AnswerStream]:
        """Run planned work that is answered in parts, as `run`; leaving the context ends the work.

        The context is entered when the first part has arrived, or the stream has ended without a part.
        """

    @abstractmethod
    def generate(self, scope: RequestScope, work: Work) -> AbstractAsyncContextManager[Generation]:
        """Run planned work with a `GenerateCall`, as `run`; leaving the context ends the work.

        The context is entered when the worker has tokenized the prompt. Raises a `PenstockError` for a request that
        fails before that.
        """

    @abstractmethod
    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason, which is `NONE_LOADED` after a start without success."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. The view never changes, so any thread may read it.

    `state` is absent, connecting, ready or leaving. `responsive`: the worker is ready and has answered lately.
    `preloaded`: the worker has tried all models of the start. `name` is the name of its device. `since`: when a worker
    that takes nothing new took its last (Unix seconds), 0 if that is unknown.
    """

    slot: int
    state: str
    responsive: bool
    preloaded: bool
    name: str
    threads: int
    models: dict[str, ModelStatus]
    credits: Credits
    stats: Stats | None
    since: float = 0.0


class Directory(ABC):
    """The models: which exist, their states over all workers, loads and unloads."""

    catalog: Catalog
    """The models that exist, by id."""

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
    def removed(self) -> set[tuple[str, int]]:
        """(model, version) of what was in a repository while this frontend ran; some may be there again."""

    @abstractmethod
    def chosen(self, model: str) -> tuple[int, ...]:
        """The versions of a repository model that its files choose; more are served until one of them is loaded."""

    @abstractmethod
    async def reread(self, until_ns: int, draft: Override | None = None) -> bool:
        """Have the files of all models read now; returns whether they say something else than before.

        With a `draft` only this override is looked at. Raises `InvalidInput` for files or a draft that cannot be
        served, `ModelLoadFailed` for a draft of a model that no repository has, `NoReplica`, and `DeadlineExceeded`.
        """

    @abstractmethod
    async def spread(self, until_ns: int) -> None:
        """Wait until all frontends know the models and states that this one knows. Raises `DeadlineExceeded`."""

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
        """All workers by slot, also workers that are down."""

    @abstractmethod
    def watch(self, on: bool) -> bool:
        """Ask all workers to send `stats`, or to stop; returns whether all serving workers have answered since."""

    @abstractmethod
    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""

    @abstractmethod
    async def ensure_loaded(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> ModelStatus:
        """Wait until some worker has the model or one of `others`; ask for the model if no worker has it.

        Raises the reason if the model cannot be loaded, or not in time.
        """

    @abstractmethod
    async def load(self, model: str, wait: bool, deadline_ns: int, is_wanted: Wanted = always) -> str:
        """Load a model although its last load may have failed; returns its state, `loading` only unless `wait`.

        `is_wanted` is asked before each word to a worker: of a load and an unload by name at the same time, the later
        one counts. Raises the error that keeps the model from being loaded.
        """

    @abstractmethod
    async def renew(self, model: str, deadline_ns: int, is_wanted: Wanted = always) -> None:
        """Wait until all workers that serve older files of a model serve the present ones. Raises why one cannot."""

    @abstractmethod
    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """Unload a model from every worker; returns `available`, or `unloading` unless `wait`."""
