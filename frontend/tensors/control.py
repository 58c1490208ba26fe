"""Loads and unloads of models by name, and the index of all models, as both tensor protocols offer them.

Each load and unload is one row of the server's store (`ipc.store.wishes`), which frontends and workers follow.

1. `load` has the workers read the repository anew and writes the wish. Then `load` waits until every version that
   the policy chooses is loaded from its present files, and all frontends know.
2. A load may bring a configuration and files (`change`). A worker looks for mistakes in them before anything changes.
   Then they are in force by the row of the load, and all workers that answer follow at once.
3. A load that fails restores the row of before, unless somebody has unloaded the model meanwhile.
4. `unload` wishes the model unloaded, which also ends what a load brought. It returns once the workers were told.
5. A word to a worker is preceded by a look at the row: of a load and an unload at the same time the later one counts.

All of this needs `repository.control: explicit`.

A load by name may bring `config`, the model's configuration as JSON text, and its files, `file:<path>`. Files are taken
only where the operator allows files (`repository.allow_files`). A path leads below the model's directory, as
`1/model.onnx` does; over HTTP the content is base64, over gRPC bytes. With files nothing of the repository's own model
is used, so files need a configuration.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from frontend.engine.interface import Models
from frontend.http.bodies import BodyReader
from frontend.http.threads import off_loop_if
from frontend.tensors.models import TensorModels, VersionState
from frontend.tensors.request import UnavailableModel
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.ids import is_repository, model_of
from ipc.catalog.repository import CONFIGS, MOST_CONFIG_NBYTES, MOST_LEVELS, Wish, is_model_name, names_of
from ipc.errors import (
    BodyTooLarge,
    ControlDisabled,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    ModelLoadFailed,
    NoReplica,
    PenstockError,
    Unsupported,
)
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.store.wishes import Wishes

CONFIG = "config"
FILE = "file:"
MOST_FILES = 64
MOST_PART_NBYTES = 200


@dataclass(slots=True, frozen=True)
class Brought:
    """A configuration as JSON text, and files by their path below the model's directory."""

    config: str
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


def nbytes_of(parameters: Mapping[str, Any]) -> int:
    """About what the texts and bytes in parameters take."""
    return sum(len(value) for value in parameters.values() if isinstance(value, str | bytes))


def read_brought(parameters: Mapping[str, Any], settings: Settings) -> Brought | None:
    """What these parameters bring, None for nothing.

    Raises:
        InvalidInput: an unknown parameter, a wrong value or path, or files without a configuration.
        Unsupported: files where they are not allowed, or anything where files are not followed.
        BodyTooLarge: the files are larger than `repository.max_upload_bytes`.
    """
    if not parameters:
        return None
    for name in parameters:
        if name != CONFIG and not name.startswith(FILE):
            raise InvalidInput(f"load parameter {name[:100]!a}: expected '{CONFIG}' or '{FILE}<path>'")
    if not settings.catalog.watch:
        raise Unsupported(
            f"load parameter {min(parameters)[:100]!a}: this server follows no changes (catalog.watch)"
        )
    files = {name: value for name, value in parameters.items() if name.startswith(FILE)}
    if files and not settings.repository.allow_files:
        raise Unsupported(
            f"load parameter {min(files)[:100]!a}: models come from the repository only (repository.allow_files)"
        )
    if CONFIG not in parameters:
        raise InvalidInput(f"load parameter '{CONFIG}' is missing: files of a model need its configuration")
    return Brought(_config(parameters[CONFIG]), _files(files, settings.repository.max_upload_bytes))


def _config(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(
            f"load parameter '{CONFIG}': expected the JSON text of a model configuration, got {_kind(value)}"
        )
    if len(value) > MOST_CONFIG_NBYTES:
        raise InvalidInput(
            f"load parameter '{CONFIG}': {len(value)} characters, the limit is {MOST_CONFIG_NBYTES}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"load parameter '{CONFIG}': not valid Unicode") from None
    return value


def _files(given: Mapping[str, Any], most_nbytes: int) -> dict[str, bytes]:
    if len(given) > MOST_FILES:
        raise InvalidInput(f"load parameters: {len(given)} files, the limit is {MOST_FILES}")
    files = {_path(name): _content(name, value) for name, value in given.items()}
    nbytes = sum(map(len, files.values()))
    if nbytes > most_nbytes:
        raise BodyTooLarge(
            f"load parameters: the files have {nbytes} bytes, the limit is {most_nbytes} (repository.max_upload_bytes)"
        )
    for path in files:
        if any(other.startswith(f"{path}/") for other in files):
            raise InvalidInput(f"load parameter {(FILE + path)[:100]!a}: another file lies below it")
    return files


def _path(name: str) -> str:
    path = name.removeprefix(FILE)
    parts = path.split("/")
    if len(parts) > MOST_LEVELS or not all(map(_is_part, parts)) or path in CONFIGS:
        raise InvalidInput(
            f"load parameter {name[:100]!a}: expected a path below the model's directory, as {FILE}1/model.onnx"
        )
    return path


def _is_part(part: str) -> bool:
    """Whether this can be the name of a file or directory that counts as part of a model."""
    return (
        part.isprintable()
        and 0 < len(part.encode(errors="surrogatepass")) <= MOST_PART_NBYTES
        and not part.startswith(".")
        and "\\" not in part
    )


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"load parameter {name[:100]!a}: expected a file in base64, got {_kind(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"load parameter {name[:100]!a}: not valid base64") from None


def _kind(value: Any) -> str:
    names = {bool: "a truth value", dict: "an object", list: "a list", bytes: "bytes", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")


log = logging.getLogger(__name__)

FOLLOW_S = 5.0
"""How long a change waits for the workers to read it, and for other frontends to know of it."""
LEARN_S = 2.0
"""How long a frontend that begins waits for the models of workers that are up."""
LONG_NBYTES = 64 << 10
"""Parameters of a load above this size are read by a thread."""
JOIN_S = 2.5
"""How long an unload waits for workers that are being joined."""
UNLOAD_S = 5.0
"""How long an unload waits for the workers to say that they have begun."""


class ControlServices(Protocol):
    """The part of `frontend.services.Services` that control of models by name uses.

    `Services` holds the control, so the control cannot import `Services`. `tensor_models` exists once the frontend has
    started.
    """

    settings: Settings
    catalog: Catalog
    store: Store
    directory: Models
    bodies: BodyReader
    tensor_models: TensorModels


class RepositoryControl:
    """Loads, unloads and lists the models of this server."""

    def __init__(self, services: ControlServices) -> None:
        self._services = services
        self._explicit = services.settings.repository.control == "explicit"
        self.wishes = Wishes(services.settings.paths, services.store)

    async def begin(self) -> None:
        """The frontend starts: delete what dead frontends left, and learn the models of workers that are up.

        On a reload, or after the death of another frontend, the first request so finds the models of repositories.
        """
        directory = self._services.directory
        await self.wishes.sweep_unless_locked()
        try:
            await directory.wait(lambda: not directory.is_learning, deadline.after(LEARN_S))
        except DeadlineExceeded:
            of = "box" if self._services.settings.is_gateway else "worker"
            log.warning("no %s has told its models yet", of)

    async def load(self, model: str, parameters: dict[str, Any], deadline_ns: int) -> None:
        """Load all chosen versions and wait for them. `parameters` is emptied: files in it are large, and loads long.

        Raises `ControlDisabled`, and as `Models.controlled`; `InvalidInput` and `Unsupported` as
        `read_brought` and `change` do; `NoReplica`; `DeadlineExceeded`; `ModelLoadFailed` whose message begins
        `failed to load '<model>', `, for unknown models too. The server serves the models of before until the load has
        succeeded.
        """
        self._check_allowed()
        brought = await self._brought(parameters)
        if brought is not None:
            async with self.change(model, brought, deadline_ns):
                await self._load_entries(model, await self._entries(model, deadline_ns), deadline_ns)
            return
        if self._services.settings.catalog.watch:
            # A load serves files that were copied there just now.
            await self._reread(model, deadline_ns)
        entries = await self._entries(model, deadline_ns)
        await self.wishes.wish_loaded(model_of(entries[0]), deadline_ns)
        await self._load_entries(model, entries, deadline_ns)

    async def unload(self, model: str, parameters: Mapping[str, Any], deadline_ns: int) -> None:
        """Begin to unload all versions, and end what a load brought; an unknown model is no error.

        Raises `ControlDisabled`, `InvalidInput` for a parameter other than `unload_dependents`, and as `Table.change`.
        """
        self._check_allowed()
        _check_unload(parameters)
        name, versions = model, list[tuple[int, str]]()
        try:
            versions = list(await self._services.tensor_models.told_versions(model, deadline_ns))
            name = model_of(versions[0][1])
        except NoReplica:
            # No worker has said yet which models there are. Workers that start later read the wish.
            pass
        except UnavailableModel:
            if self.wishes.get(model) is None:
                log.info("model %a is not unloaded: there is none of that name", model[:200])
                return
        former = await self.wishes.put(name, Wish(loaded=False), deadline_ns)
        log.info("model %a is unloaded by name", name[:200])
        until = deadline.after(UNLOAD_S)
        await asyncio.gather(*(self._unload_entry(entry, until) for _, entry in versions))
        if former is not None and former.config is not None:
            await self._end(name, former, deadline_ns)

    def index(self, ready_only: bool = False) -> list[tuple[str, VersionState]]:
        """Name of the model and state of every version of every model, by name and version.

        Raises `NoReplica` while no worker has said which models repositories have.
        """
        if not self._services.directory.is_told:
            raise NoReplica("no worker is up", retry_after_s=2)
        return [
            (name, state)
            for name in self._services.tensor_models.names()
            for state in self._services.tensor_models.states(name)
            if state.state == "READY" or not ready_only
        ]

    def wished(self, model: str) -> bool | None:
        """Whether the model was loaded by name (true) or unloaded (false) last; None: neither.

        No request may load a model that was unloaded by name.
        """
        return self.wishes.loaded(model) if self._explicit else None

    @asynccontextmanager
    async def change(self, model: str, brought: Brought, until_ns: int) -> AsyncIterator[None]:
        """Put in force what a load brought. An error inside the context restores what was in force before.

        `brought` is emptied once its files are written.

        Raises:
            InvalidInput: a name, a configuration or files that cannot be served.
            BodyTooLarge: files of all models would take more than `repository.max_upload_bytes`.
            DeadlineExceeded: another load went on for too long.
            ModelLoadFailed: the files cannot be kept, or no repository has the model of a configuration.
            NoReplica: no worker is up that could look at them.
        """
        async with contextlib.AsyncExitStack() as changing:
            with self._services.bodies.holding(brought.nbytes):
                await changing.enter_async_context(self.wishes.locked(until_ns))
                wish = await self._draft(model, brought, until_ns)
            former: Wish | None = None
            try:
                try:
                    # NOTE: a load that is cancelled in `put` may have changed the row all the same.
                    former = self.wishes.get(model)
                    former = await self.wishes.put(model, wish, until_ns)
                except OSError as error:
                    raise ModelLoadFailed(
                        f"failed to load {shown(model)}, its configuration cannot be kept: {error.strerror}"
                    ) from error
                await self._reread(model, deadline.after(FOLLOW_S))
                yield
                if not self.wishes.is_in_force(model, wish):
                    # An unload took the place of the wish, perhaps another load the place of the unload.
                    raise ModelLoadFailed(
                        f"failed to load {shown(model)}, the load was given up: the model was unloaded meanwhile"
                    )
            except BaseException:
                await asyncio.shield(self._undo(model, wish, former))
                raise
            self.wishes.discard(former)

    async def _undo(self, model: str, wish: Wish, former: Wish | None) -> None:
        """The load of a wish has failed: restore the former wish, unless an unload has ended both."""
        try:
            if await self.wishes.restore(model, wish, former):
                log.info("model %a is served as before its load failed", model)
                await self._reread(model, deadline.after(FOLLOW_S))
        except (PenstockError, OSError) as error:
            log.error("model %a is not served as before its load failed: %s", model, error)
        for ended in (wish, former):
            self.wishes.discard(ended)

    async def _end(self, model: str, former: Wish, deadline_ns: int) -> None:
        """A model is unloaded for which a load had brought something; wait for a while until all processes know."""
        try:
            await self._reread(model, deadline.after(FOLLOW_S))
        except NoReplica:
            log.info("what a load brought for model %a has ended; no worker is up that has to know", model)
        except PenstockError as error:
            log.error(
                "not all workers know that what a load brought for model %a has ended: %s", model, error
            )
        finally:
            self.wishes.discard(former)
        with contextlib.suppress(DeadlineExceeded):
            await self._services.directory.controlled().spread(min(deadline_ns, deadline.after(FOLLOW_S)))

    async def _draft(self, model: str, brought: Brought, until_ns: int) -> Wish:
        """Write the files of a load in a thread, and have a worker look at them before they are in force."""
        drafting = asyncio.ensure_future(asyncio.to_thread(self._write_draft, model, brought))
        try:
            draft = await asyncio.shield(drafting)
        except asyncio.CancelledError:
            # NOTE: the thread writes on, and must have ended before another load has the lock.
            await asyncio.wait([drafting])
            if drafting.exception() is None:
                self.wishes.discard(drafting.result())
            raise
        finally:
            brought.files.clear()
        try:
            await self._services.directory.controlled().reread(until_ns, model, draft)
        except BaseException as error:
            self.wishes.discard(draft)
            if isinstance(error, InvalidInput | ModelLoadFailed):
                raise type(error)(f"failed to load {shown(model)}, {error.message}") from error
            raise
        return draft

    def _write_draft(self, model: str, brought: Brought) -> Wish:
        """Write the files of a wish that is not in force yet. Blocks on files."""
        where, settings = f"failed to load {shown(model)}", self._services.settings.repository
        if not is_model_name(model):
            raise InvalidInput(f"{where}, this is no name for a model")
        if model in names_of(e for e in self._services.catalog.entries if not is_repository(e.id)):
            raise InvalidInput(f"{where}, a model of the catalog is configured there only")
        try:
            self.wishes.sweep()
            if brought.files and self.wishes.nbytes() + brought.nbytes > settings.max_upload_bytes:
                raise BodyTooLarge(
                    f"{where}, files that loads brought would take more than {settings.max_upload_bytes} bytes "
                    "together (repository.max_upload_bytes); unload a model first"
                )
            return self.wishes.draft(model, brought.config, brought.files)
        except OSError as error:
            raise ModelLoadFailed(f"{where}, its files cannot be kept: {error.strerror}") from error

    async def _brought(self, parameters: dict[str, Any]) -> Brought | None:
        nbytes = nbytes_of(parameters)
        with self._services.bodies.holding(nbytes):
            long = nbytes > LONG_NBYTES
            try:
                return await off_loop_if(long, read_brought, parameters, self._services.settings)
            finally:
                parameters.clear()

    async def _reread(self, model: str, until_ns: int) -> None:
        """Have the workers read the files and rows of all models. Raises `ModelLoadFailed`, and `NoReplica`."""
        where = f"failed to load {shown(model)}"
        try:
            await self._services.directory.controlled().reread(until_ns)
        except InvalidInput as error:
            raise ModelLoadFailed(f"{where}, {error.message.removeprefix('the ')}") from error
        except DeadlineExceeded as error:
            raise ModelLoadFailed(f"{where}, the workers have not read its files yet; try again") from error

    def _check_allowed(self) -> None:
        self._services.directory.controlled()
        if not self._explicit:
            raise ControlDisabled(
                "explicit model load / unload is not allowed if model control is not enabled "
                "(repository.control: explicit)"
            )

    async def _entries(self, model: str, deadline_ns: int) -> list[str]:
        """Catalog ids of all versions that the files choose. Raises `ModelLoadFailed` for a model that they lack."""
        services = self._services
        try:
            versions = await services.tensor_models.told_versions(model, deadline_ns)
        except UnavailableModel:
            raise ModelLoadFailed(
                f"failed to load {shown(model)}, the repository has no such model"
            ) from None
        chosen = services.directory.chosen(model)
        return [entry for number, entry in versions if not chosen or number in chosen]

    async def _load_entries(self, model: str, entries: list[str], deadline_ns: int) -> None:
        log.info("model %a is loaded by name", model[:200])
        loads = [self._load_entry(model, entry, deadline_ns) for entry in entries]
        for error in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        try:
            # The next request may come to any frontend.
            await self._services.directory.controlled().spread(min(deadline_ns, deadline.after(FOLLOW_S)))
        except DeadlineExceeded:
            log.warning("another frontend does not know yet that model %a is loaded", model[:200])

    async def _load_entry(self, model: str, entry: str, deadline_ns: int) -> None:
        directory, limits = self._services.directory, self._services.settings.limits

        def is_told() -> bool:
            return any(worker.responsive and entry in worker.models for worker in directory.workers())

        def is_wanted() -> bool:
            return self.wishes.loaded(model_of(entry)) is not False

        # A frontend that has just started, or whose worker starts again, has nobody to ask yet.
        with contextlib.suppress(DeadlineExceeded):
            await directory.wait(is_told, min(deadline_ns, deadline.after(limits.restart_wait_s)))
        try:
            await directory.controlled().load(entry, True, deadline_ns, is_wanted)
        except ModelError as error:
            raise ModelLoadFailed(f"failed to load {shown(model)}, {error.message}") from error

    async def _unload_entry(self, entry: str, until_ns: int) -> None:
        directory, control = self._services.directory, self._services.directory.controlled()
        # NOTE: a worker that is only being joined is told nothing, and may have the model.
        with contextlib.suppress(DeadlineExceeded):
            await directory.wait(lambda: control.reaches_all, min(until_ns, deadline.after(JOIN_S)))
        if self.wishes.loaded(model_of(entry)):
            log.info("model %s is not unloaded: somebody has loaded it by name meanwhile", entry)
            return
        try:
            await control.unload(entry, False, until_ns)
        except DeadlineExceeded:
            log.warning("no worker has said yet that it unloads model %s", entry)


def shown(model: str) -> str:
    """A model's name in messages, in single quotes."""
    return f"'{ascii(model[:200])[1:-1]}'"


def _check_unload(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name != "unload_dependents":
            raise InvalidInput(f"unload parameter {name[:100]!a}: expected 'unload_dependents'")
        if not isinstance(value, bool):
            raise InvalidInput(
                f"unload parameter 'unload_dependents': expected true or false, got {str(value)[:100]!a}"
            )
