"""The models over HTTP: which are served, in which state (GET /v1/models), and POST /v1/admin/{load,unload}/{model}.

The list of models in the forms of OpenAI and Anthropic, page by page.

1. An entry has the fields of both forms. The first entry is `default`, where `default` stands for a model.
2. Without parameters the list is whole. `limit`, `after_id` and `before_id` cut a page, as clients of Anthropic ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.boxes import boxes_with
from frontend.generation.requests import DEFAULT, default_model, model_status
from frontend.http.bodies import until_disconnect
from frontend.http.fields import instant
from frontend.protocols.sie.schemas import AdminRequest, read_aside
from frontend.sending import answer_json
from frontend.services import Services
from ipc.catalog.entries import DEFAULT_SIMILARITY, ENCODE_OUTPUTS, ModelEntry, Profile
from ipc.catalog.repository import VersionEntry
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.wire.messages import ModelStatus
from ipc.wire.tools import Remotes

OWNER = "local"
MAX_LIMIT = 1000
INPUT_ORDER = ("text", "image", "audio", "video", "document")
OUTPUT_ORDER = (*ENCODE_OUTPUTS, "score", "json")


class ListedModel(msgspec.Struct, kw_only=True):
    """A model in the forms of OpenAI and Anthropic; `root` is the model behind `default` or a profile.

    `max_sequences` and `tools` are there for loaded models that generate text, `vision` for those that read pictures,
    `tools_available` for those that can call tools of this server. `limited_by` is there where a setting keeps
    `max_input_tokens` below what the model could take. `precision`, `weight_bytes`, `cache_bytes` and `cache_tokens`
    are there for loaded models that generate text.
    """

    id: Annotated[str, Meta(description="Name that requests call the model by.")]
    object: Annotated[Literal["model"], Meta(description="Names the form of this object.")] = "model"
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    owned_by: Annotated[str, Meta(description="Who serves the model.")] = OWNER
    type: Annotated[Literal["model"], Meta(description="Names the form of this object.")] = "model"
    display_name: Annotated[str, Meta(description="The name for people.")]
    created_at: Annotated[str, Meta(description="Time since which the model is known, as RFC 3339.")]
    lifecycle: Annotated[Literal["active"], Meta(description="Whether the model will stay.")] = "active"
    max_input_tokens: Annotated[int | None, Meta(description="Longest input in tokens.")]
    root: Annotated[str, Meta(description="The model that this one is a form of.")]
    parent: Annotated[str | None, Meta(description="The model whose weights this one adapts.")]
    status: Annotated[
        Literal["loaded", "unloaded", "reloading"] | msgspec.UnsetType, Meta(description="The state.")
    ] = msgspec.UNSET
    max_sequences: Annotated[int | msgspec.UnsetType, Meta(description="Sequences that run together.")] = (
        msgspec.UNSET
    )
    tools: Annotated[
        str | msgspec.UnsetType,
        Meta(description="How the model is shown functions: `template`, `system text` or `none`."),
    ] = msgspec.UNSET
    tools_available: Annotated[
        bool | msgspec.UnsetType,
        Meta(description="True where requests may let the model call tools that run on the server."),
    ] = msgspec.UNSET
    mcp_tools_count: Annotated[
        int | msgspec.UnsetType, Meta(description="Tools of MCP servers that the model may call now.")
    ] = msgspec.UNSET
    mcp_servers_connected: Annotated[
        int | msgspec.UnsetType, Meta(description="MCP servers that are connected now.")
    ] = msgspec.UNSET
    limited_by: Annotated[
        str | msgspec.UnsetType, Meta(description="The setting that bounds `max_input_tokens`.")
    ] = msgspec.UNSET
    precision: Annotated[
        str | msgspec.UnsetType,
        Meta(
            description="What the linear layers are in memory: `float32`, `bfloat16`, `int8`, `int4+int8`, ..."
        ),
    ] = msgspec.UNSET
    weight_bytes: Annotated[int | msgspec.UnsetType, Meta(description="Bytes of all weights in memory.")] = (
        msgspec.UNSET
    )
    cache_bytes: Annotated[
        int | msgspec.UnsetType, Meta(description="Bytes of the cache that is left for texts.")
    ] = msgspec.UNSET
    cache_tokens: Annotated[
        int | msgspec.UnsetType, Meta(description="Tokens of all texts together that the cache holds.")
    ] = msgspec.UNSET
    vision: Annotated[
        bool | msgspec.UnsetType, Meta(description="True where conversations may have pictures.")
    ] = msgspec.UNSET


def listed_model(
    name: str,
    model: str,
    max_input_tokens: int | None,
    created: float,
    status: ModelStatus,
    *,
    has_tools: bool = False,
    remotes: Remotes | None = None,
) -> ListedModel:
    """The entry `name`, which stands for `model` of this status; an alias has no status.

    `has_tools`: the server runs tools, which the model can call if the model is shown functions. `remotes` are the MCP
    servers of the server, if any.
    """
    base, _, profile = model.partition(":")
    aliased, takes_tools = name != model, has_tools and status.tools not in ("", "none")
    if not takes_tools:
        remotes = None
    return ListedModel(
        id=name,
        created=int(created),
        display_name=name,
        created_at=instant(int(created)),
        max_input_tokens=max_input_tokens,
        root=model if aliased else base,
        parent=base if profile else None,
        status=msgspec.UNSET if aliased else model_status(status.state),  # type: ignore[arg-type]
        max_sequences=status.max_sequences or msgspec.UNSET,
        tools=status.tools or msgspec.UNSET,
        tools_available=takes_tools or msgspec.UNSET,
        mcp_tools_count=msgspec.UNSET if remotes is None else len(remotes.tools),
        mcp_servers_connected=msgspec.UNSET if remotes is None else remotes.connected,
        limited_by=status.limited_by or msgspec.UNSET,
        precision=status.precision or msgspec.UNSET,
        weight_bytes=status.weight_bytes or msgspec.UNSET,
        cache_bytes=status.cache_bytes or msgspec.UNSET,
        cache_tokens=status.cache_tokens or msgspec.UNSET,
        vision=status.sees or msgspec.UNSET,
    )


def page_of(names: Sequence[str], req: Request) -> tuple[Sequence[str], bool]:
    """(the names of the page that a request asks for, whether more follow in its direction). Raises `InvalidInput`."""
    limit = _limit(req)
    after, before = req.get_param("after_id"), req.get_param("before_id")
    if after is not None and before is not None:
        raise InvalidInput("before_id: cannot be used together with after_id")
    if before is not None:
        names = names[: _place(names, before, "before_id")]
        return names[-limit:], len(names) > limit
    if after is not None:
        names = names[_place(names, after, "after_id") + 1 :]
    return names[:limit], len(names) > limit


def _limit(req: Request) -> int:
    given = req.get_param("limit")
    if given is None:
        return sys.maxsize
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= MAX_LIMIT):
        raise InvalidInput(f"limit: {given[:64]!a} is not in 1 to {MAX_LIMIT}")
    return int(given)


def _place(names: Sequence[str], name: str, parameter: str) -> int:
    if name not in names:
        raise InvalidInput(f"{parameter}: no model {name[:200]!a} is listed")
    return names.index(name)


class LoadFault(msgspec.Struct):
    """Why the last load failed."""

    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]
    attempts: Annotated[int, Meta(description="Loads that were tried.")]
    permanent: Annotated[bool, Meta(description="Whether the load is tried again only by hand.")]


class ProfileInfo(msgspec.Struct):
    """A named variation of a model."""

    is_default: Annotated[bool, Meta(description="Whether a request without a profile means this one.")]
    output_types: Annotated[list[str], Meta(description="The outputs: dense, sparse, multivector, score.")]
    output_similarity: Annotated[dict[str, str], Meta(description="How two outputs are compared.")]


_STATES = ["available", "loading", "loaded", "unloading", "failed"]
State = Annotated[str, msgspec.Meta(extra_json_schema={"enum": _STATES})]


class ModelInfo(msgspec.Struct):
    """Inputs, outputs and state of a model."""

    name: Annotated[str, Meta(description="The name.")]
    inputs: Annotated[list[str], Meta(description="What the model takes.")]
    outputs: Annotated[list[str], Meta(description="What the model gives.")]
    dims: Annotated[dict[str, int], Meta(description="Length of a vector.")]
    loaded: Annotated[bool, Meta(description="Whether a worker has the model ready.")]
    state: Annotated[State, Meta(description="The state.")]
    last_error: Annotated[LoadFault | None, Meta(description="Why the last load failed.")]
    max_sequence_length: Annotated[int | None, Meta(description="Longest input in tokens.")]
    profiles: Annotated[dict[str, ProfileInfo], Meta(description="Named variations of the model.")]
    bundles: Annotated[
        list[str] | msgspec.UnsetType,
        Meta(description="Of a gateway: bundles of the boxes that serve the model."),
    ] = msgspec.UNSET
    worker_count: Annotated[
        int | msgspec.UnsetType, Meta(description="Of a gateway: boxes that have the model ready.")
    ] = msgspec.UNSET
    workers: Annotated[
        list[str] | msgspec.UnsetType, Meta(description="Of a gateway: the names of these boxes.")
    ] = msgspec.UNSET


ModelDetails = msgspec.defstruct(
    "ModelDetails",
    [(each.encode_name, each.type, each.default) for each in msgspec.structs.fields(ListedModel)],
    bases=(ModelInfo,),
    namespace={"__doc__": "One model in all forms."},
    kw_only=True,
)
"""`ModelInfo` and `ListedModel` in one object."""


class ModelsResponse(msgspec.Struct):
    """Models in all forms; `first_id` and `last_id` name the first and the last entry of `data`."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[ListedModel], Meta(description="The list.")]
    has_more: Annotated[bool, Meta(description="Whether there are more behind the last one.")]
    first_id: Annotated[str | None, Meta(description="Id of the first of these.")]
    last_id: Annotated[str | None, Meta(description="Id of the last of these.")]
    models: Annotated[list[ModelInfo], Meta(description="The models, in the form of SIE.")]


class ModelState(msgspec.Struct):
    """State of a model after a load or unload was asked for."""

    name: Annotated[str, Meta(description="The name.")]
    state: Annotated[State, Meta(description="The state.")]


def model_info(entry: ModelEntry, status: ModelStatus) -> ModelInfo:
    """ModelInfo of the contract."""
    dims = {name: spec.dims or status.dims.get(name) for name, spec in entry.outputs.items()}
    return ModelInfo(
        entry.id,
        [name for name in INPUT_ORDER if name in entry.inputs],
        [name for name in OUTPUT_ORDER if name in entry.outputs],
        {name: width for name, width in dims.items() if width},
        status.state == "loaded",
        status.state,
        _last_error(status) if status.state == "failed" else None,
        status.max_sequence_length or entry.max_sequence_length or None,
        {name: _profile(entry, name) for name in dict.fromkeys(("default", *entry.profiles))},
    )


def _last_error(status: ModelStatus) -> LoadFault:
    return LoadFault(status.error_class, status.error_message, status.attempts, status.permanent)


def _profile(entry: ModelEntry, name: str) -> ProfileInfo:
    profile = entry.profiles.get(name, Profile())
    outputs = list(profile.output_types or entry.encode_outputs)
    return ProfileInfo(
        name == "default", outputs, {output: _similarity(entry, profile, output) for output in outputs}
    )


def _similarity(entry: ModelEntry, profile: Profile, output: str) -> str:
    """How two outputs are compared; dense vectors that are made of token vectors (MUVERA) by their dot product."""
    stated = entry.outputs[output].similarity if output in entry.outputs else "dot"
    return profile.similarity.get(output) or stated or DEFAULT_SIMILARITY[output]


class ModelsResource:
    """All models."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The list in all forms; models of named tensors have an index of their own. Raises `InvalidInput`."""
        services, aliases = self._services, _aliases(self._services)
        listed = [each.id for each in services.catalog.values() if not isinstance(each, VersionEntry)]
        names, has_more = page_of([*aliases, *listed], req)
        infos = {name: _info(services, aliases.get(name, name)) for name in names}
        entries = [_listed(services, name, info) for name, info in infos.items()]
        first, last = (names[0], names[-1]) if names else (None, None)
        models = [info for name, info in infos.items() if name not in aliases]
        answer_json(resp, ModelsResponse("list", entries, has_more, first, last, models))


class ModelResource:
    """One model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """The bare ModelInfo with the fields of an entry of the list."""
        info = _info(self._services, _aliases(self._services).get(model, model))
        listed = msgspec.to_builtins(_listed(self._services, model, info))
        answer_json(resp, msgspec.convert(msgspec.to_builtins(info) | listed, ModelDetails))


def _aliases(services: Services) -> dict[str, str]:
    """Ids by further names of models, with what `default` stands for, if that is a model and none has this name."""
    catalog = services.catalog
    model = default_model(catalog, services.settings)
    is_free = model in catalog and DEFAULT not in catalog
    return {**({DEFAULT: model} if is_free else {}), **catalog.aliases}


def _info(services: Services, model: str) -> ModelInfo:
    """ModelInfo of a model. Raises `ModelNotFound`."""
    directory = services.directory
    entry = directory.find(model)
    info = model_info(entry, directory.status(entry.id))
    if services.settings.is_gateway:
        names = {worker.box for worker in directory.workers() if entry.id in worker.models}
        info.bundles = sorted({box.bundle for box in directory.boxes() if box.name in names})
        info.workers = boxes_with(entry.id, directory)
        info.worker_count = len(info.workers)
    return info


def _listed(services: Services, name: str, info: ModelInfo) -> ListedModel:
    """The entry `name` of the list, for a model."""
    status = services.directory.status(info.name)
    length, since = info.max_sequence_length, services.started_at
    parts = services.agent
    remotes = None if parts is None else parts.host.remotes
    has_tools = parts is not None and bool(parts.offer.features or remotes)
    return listed_model(name, info.name, length, since, status, has_tools=has_tools, remotes=remotes)


class AdminResource:
    """POST of `load` or, if not `load`, of `unload`."""

    def __init__(self, services: Services, *, load: bool) -> None:
        self._services, self._load = services, load

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """200 with the final state; 202 with the present state if the client does not wait or the deadline passes."""
        services, context = self._services, req.context.penstock
        async with services.bodies.receive(req, context.deadline_ns) as body:
            given = (body or b"{}", "application/json", AdminRequest, services.settings.limits)
            wait = (await read_aside(*given)).wait
        entry = services.directory.find(model)
        state = await until_disconnect(self._run(entry.id, wait is not False, context.deadline_ns), req.scope)
        final = state == ("loaded" if self._load else "available")
        resp.status = falcon.HTTP_200 if final else falcon.HTTP_202
        answer_json(resp, ModelState(entry.id, state))

    async def _run(self, model: str, wait: bool, deadline_ns: int) -> str:
        directory = self._services.directory
        try:
            control = directory.controlled()
            return await (control.load if self._load else control.unload)(model, wait, deadline_ns)
        except DeadlineExceeded:
            return directory.status(model).state
