"""LoRA adapters of generating models by name: /v1/load_lora_adapter, /v1/unload_lora_adapter and /v1/lora_adapters.

A load, in the form of vLLM:

1. The name must be free, and the directory must lie below one of `catalog.lora_dirs`, links followed.
2. The adapter becomes a row of the server's store (`ipc.store.wishes`), and the workers serve the adapter as if the
   catalog named it. One load runs at a time.
3. A request that generates nothing goes to the adapter, so that a worker reads, checks and proves the files. If that
   fails, the row goes again, and the answer says why.
4. All frontends know the adapter before the answer is sent. Other workers load the adapter for their first request.

An unload takes the row away. Requests under way keep their adapter to their end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation.errors import InvalidField, shown
from frontend.generation.outcome import Outcome
from frontend.generation.requests import decode, find_generator, receive
from frontend.generation.running import running
from frontend.http.bodies import until_disconnect
from frontend.http.threads import off_loop
from frontend.scope import RequestScope
from frontend.sending import answer_json
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import LORA_PART, ModelEntry, is_lora_name
from ipc.errors import DeadlineExceeded, InferenceFailed, LoraBusy, ModelNotFound, NoReplica
from ipc.store.wishes import BroughtLora, Wishes
from ipc.wire.messages import GenerateCall

FOLLOW_S = 10.0
"""How long the workers have to read the rows, after a load that failed too."""
MOST_PATH = 4096
CONFIG = "adapter_config.json"
_PROBE = "hello world"
_VARIANT = ":"
"""What stands between the name of a model and that of an adapter."""


class LoadAdapterRequest(msgspec.Struct):
    """Body of a load."""

    lora_name: Annotated[str, Meta(description="Name that requests call the adapter by.")]
    lora_path: Annotated[
        str, Meta(description="Directory of the adapter in PEFT's layout, below one of `catalog.lora_dirs`.")
    ]
    base_model_name: Annotated[
        str | None,
        Meta(description="The model that the adapter was trained on; by default the default model."),
    ] = None
    load_inplace: Annotated[
        bool, Meta(description="Replace an adapter of this name that was loaded by a request.")
    ] = False


class UnloadAdapterRequest(msgspec.Struct):
    """Body of an unload."""

    lora_name: Annotated[str, Meta(description="Name of the adapter.")]


class ListedAdapter(msgspec.Struct):
    """One adapter."""

    id: Annotated[str, Meta(description="Name of the model with the adapter.")]
    object: Annotated[Literal["lora_adapter"], Meta(description="Names the form of this object.")]
    lora_name: Annotated[str, Meta(description="Name of the adapter.")]
    base_model_name: Annotated[str, Meta(description="The model whose weights the adapter changes.")]
    state: Annotated[
        Literal["available", "loading", "loaded", "unloading"],
        Meta(description="The state on the worker that is furthest; an available one is loaded on demand."),
    ]
    source: Annotated[Literal["catalog", "request"], Meta(description="What has named the adapter.")]


class AdapterList(msgspec.Struct):
    """All adapters of generating models."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[ListedAdapter], Meta(description="The list.")]


class Adapters:
    """The adapters that requests load and unload."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @cached_property
    def _wishes(self) -> Wishes:
        # NOTE: the store of a frontend exists once the frontend has started.
        return Wishes(self._services.settings.paths, self._services.store)

    async def load(self, scope: RequestScope, request: LoadAdapterRequest) -> None:
        """Load an adapter and wait for a worker to have it.

        Raises `InvalidField` for a name, path or files that will not do, `LoraBusy` while another load runs,
        `LoraUnavailable` for a model without adapters, and why the model cannot be loaded.
        """
        services = self._services
        base = find_generator(
            request.base_model_name, services.directory, services.settings, field="base_model_name"
        )
        if _VARIANT in base.id:
            raise InvalidField("base_model_name", f"'{base.id}' is a variant, name its model")
        _check_name(request.lora_name)
        directory = await off_loop(_directory_of, request.lora_path, services.settings.catalog.lora_dirs)
        until_ns = scope.deadline_ns
        async with self._alone():
            self._check_free(request, base)
            former = self._wishes.loras().get(request.lora_name)
            if former is not None:
                await self._end(request.lora_name, until_ns)
            try:
                await self._bring(request.lora_name, BroughtLora(base.id, str(directory)), until_ns)
                await self._try(scope, f"{base.id}{_VARIANT}{request.lora_name}")
            except BaseException:
                await asyncio.shield(self._undo(request.lora_name, former))
                raise

    async def unload(self, name: str, until_ns: int) -> None:
        """Unload an adapter that a request has loaded.

        Raises `ModelNotFound` where there is none of this name, and `InvalidField` for one that the catalog names.
        """
        if not await self._end(name, until_ns):
            if any(name in entry.text_loras for entry in self._services.catalog.sources):
                raise InvalidField(
                    "lora_name", f"'{name}' is named by the catalog, whose file can be changed"
                )
            raise ModelNotFound(f"no LoRA adapter {name[:200]!a} was loaded")

    def listed(self) -> list[ListedAdapter]:
        """The adapters of all models that generate text, by the catalog's order."""
        rows = self._wishes.loras()
        return [
            self._listed(entry, name, rows)
            for entry in self._services.catalog.sources
            for name in entry.text_loras
        ]

    def _listed(self, entry: ModelEntry, name: str, rows: Any) -> ListedAdapter:
        model, is_row = f"{entry.id}{_VARIANT}{name}", name in rows and rows[name].model == entry.id
        state: Any = self._services.directory.status(model).loras.get(name, "available")
        return ListedAdapter(model, "lora_adapter", name, entry.id, state, "request" if is_row else "catalog")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        try:
            async with self._wishes.loras_locked(deadline.after(0)):
                yield
        except DeadlineExceeded as error:
            raise LoraBusy("another LoRA adapter is being loaded", retry_after_s=1) from error

    def _check_free(self, request: LoadAdapterRequest, base: ModelEntry) -> None:
        """Raise `InvalidField` for the name of something else."""
        name, catalog = request.lora_name, self._services.catalog
        if name in self._wishes.loras():
            if not request.load_inplace:
                text = f"the LoRA adapter '{name}' has been loaded already; set load_inplace to replace it"
                raise InvalidField("lora_name", text)
        elif name in catalog or f"{base.id}{_VARIANT}{name}" in catalog:
            raise InvalidField("lora_name", f"a model or adapter '{name}' is served already")

    async def _try(self, scope: RequestScope, model: str) -> None:
        """Have a worker load the adapter. Raises `InvalidField` with what is wrong with the files."""
        entry = find_generator(model, self._services.directory, self._services.settings)
        call, outcome = GenerateCall(text=_PROBE, counts_only=True), Outcome(1)
        try:
            async with running(self._services, scope, entry, call) as generation:
                await outcome.gather(generation)
        except InferenceFailed as error:
            raise InvalidField("lora_path", error.message) from error

    async def _bring(self, name: str, lora: BroughtLora, until_ns: int) -> None:
        await self._wishes.bring_lora(name, lora, until_ns)
        await self._tell()

    async def _undo(self, name: str, former: BroughtLora | None) -> None:
        """A load has failed: the adapter that had the name before is back, or none."""
        await self._end(name, 0)
        if former is not None:
            with contextlib.suppress(NoReplica, DeadlineExceeded):
                await self._bring(name, former, 0)

    async def _end(self, name: str, until_ns: int) -> bool:
        ended = await self._wishes.end_lora(name, until_ns)
        if ended:
            with contextlib.suppress(NoReplica, DeadlineExceeded):
                # NOTE: workers that are not up, or late, read the rows by themselves.
                await self._tell()
        return ended

    async def _tell(self) -> None:
        """Have all workers read the rows, and all frontends hear of them."""
        control, until_ns = self._services.directory.controlled(), deadline.after(FOLLOW_S)
        await control.reread(until_ns)
        await control.spread(until_ns)


def _check_name(name: str) -> None:
    if not is_lora_name(name):
        raise InvalidField("lora_name", f"{name[:200]!a} is no name of one or two parts of {LORA_PART}")


def _directory_of(text: str, roots: tuple[str, ...]) -> Path:
    """The directory that a path means, links followed. Blocks on files.

    Raises `InvalidField` unless the directory lies below one of `roots` and holds an adapter. The message is the same
    for a path that is not there and a path outside.
    """
    if not roots:
        raise InvalidField("lora_path", "this server loads no adapters: catalog.lora_dirs names no directory")
    if not text or len(text) > MOST_PATH or "\0" in text:
        raise InvalidField(
            "lora_path", f"{len(text)} characters given, 1 to {MOST_PATH} without NUL are allowed"
        )
    for root in map(Path, roots):
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            place = root.resolve(strict=True)
            directory = (place / text).resolve(strict=True)
            inside = directory != place and directory.is_relative_to(place)
            if inside and all(file.resolve().is_relative_to(place) for file in _files(directory)):
                return directory
    raise InvalidField("lora_path", f"{shown(text)!a} is no adapter below a directory of catalog.lora_dirs")


def _files(directory: Path) -> list[Path]:
    """The files of an adapter. Raises `FileNotFoundError` without a configuration."""
    config = (directory / CONFIG).resolve(strict=True)
    return [config, directory / "adapter_model.safetensors"]


class LoadAdapterResource:
    """POST of a load."""

    def __init__(self, services: Services) -> None:
        self._services, self._adapters = services, Adapters(services)

    async def on_post(self, req: Request, resp: Response) -> None:
        """A line of text once the adapter is loaded."""
        request = await receive(self._services, req, lambda body: decode(body, LoadAdapterRequest, 8))
        scope: RequestScope = req.context.penstock
        await until_disconnect(self._adapters.load(scope, request), req.scope)
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = f"Success: LoRA adapter '{request.lora_name}' added successfully."


class UnloadAdapterResource:
    """POST of an unload."""

    def __init__(self, services: Services) -> None:
        self._services, self._adapters = services, Adapters(services)

    async def on_post(self, req: Request, resp: Response) -> None:
        """A line of text once no new request finds the adapter."""
        request = await receive(self._services, req, lambda body: decode(body, UnloadAdapterRequest, 8))
        await self._adapters.unload(request.lora_name, req.context.penstock.deadline_ns)
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = f"Success: LoRA adapter '{request.lora_name}' removed successfully."


class AdaptersResource:
    """GET of the list."""

    def __init__(self, services: Services) -> None:
        self._adapters = Adapters(services)

    async def on_get(self, req: Request, resp: Response) -> None:
        """All adapters."""
        answer_json(resp, AdapterList("list", self._adapters.listed()))
