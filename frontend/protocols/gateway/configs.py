"""`/v1/configs`: models that the boxes of a cluster shall serve, in the documents of SIE's configuration service.

Whoever may ask for vectors may look; who adds a model, or takes all documents, needs the scope `admin`. A path that
begins so belongs to this contract, not to `/v1/config` of KServe.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import yaml
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.interface import Configs
from frontend.protocols.gateway.pools import answer_as, check_admin
from frontend.protocols.sie import faults
from frontend.protocols.sie.errors import ModelErrorResponse
from frontend.protocols.sie.schemas import FlatBody, decode, refuse_repeated
from frontend.route_rows import Folder, Parameter, Route, asking
from frontend.sending import answer_json
from frontend.services import Services
from ipc.errors import InvalidInput, ModelNotFound
from ipc.wire.cluster_configs import MOST_NBYTES, check_id

PATH = "/v1/configs"
YAML = "application/x-yaml"
MOST_QUESTION_NBYTES = 64 << 10
_STATUS = "/status"


class ResolveRequest(FlatBody):
    """A model whose bundle is asked for."""

    model: Annotated[str, Meta(description="Name of the model, also as `bundle:/model`.")]
    bundle: Annotated[str | None, Meta(description="The bundle that the model shall have.")] = None


class Resolved(msgspec.Struct):
    """Where requests for a model go."""

    model: Annotated[str, Meta(description="Name of the model.")]
    resolved_bundle: Annotated[str, Meta(description="The bundle that serves requests which name none.")]
    compatible_bundles: Annotated[list[str], Meta(description="Bundles that can serve the model.")]
    profiles: Annotated[list[str], Meta(description="Profiles of the model.")]


class ConfigAdded(msgspec.Struct):
    """What a document has added."""

    model_id: Annotated[str, Meta(description="Id of the model.")]
    created_profiles: Annotated[list[str], Meta(description="Profiles that are new.")]
    existing_profiles_skipped: Annotated[list[str], Meta(description="Profiles that were there.")]
    warnings: Annotated[list[str], Meta(description="What may keep the model from being served.")]
    routable_bundles_by_profile: Annotated[
        dict[str, list[str]], Meta(description="Bundles that can run each new profile.")
    ]
    router_id: Annotated[str, Meta(description="The gateway that answers.")]


class ConfiguredModel(msgspec.Struct):
    """A model that is configured."""

    model_id: Annotated[str, Meta(description="Id of the model.")]
    profiles: Annotated[list[str], Meta(description="Profiles of the model.")]
    source: Annotated[str, Meta(description="`api`, or `filesystem` for files of boxes.")]


class ConfiguredModels(msgspec.Struct):
    """All models that are configured."""

    models: Annotated[list[ConfiguredModel], Meta(description="By name.")]


class UnsupportedWorker(msgspec.Struct):
    """A box that refuses a configuration."""

    name: Annotated[str, Meta(description="Name of the box.")]
    message: Annotated[str, Meta(description="Why.")]


class BundleStatus(msgspec.Struct):
    """What the boxes of a bundle have of all that is configured for them."""

    bundle_id: Annotated[str, Meta(description="Name of the bundle.")]
    expected_bundle_config_hash: Annotated[str, Meta(description="Digest of what is configured.")]
    total_eligible_workers: Annotated[int, Meta(description="Boxes that take work.")]
    acked_workers: Annotated[list[str], Meta(description="Boxes that serve what is configured.")]
    pending_workers: Annotated[list[str], Meta(description="Boxes that do not yet.")]
    unsupported_workers: Annotated[list[UnsupportedWorker], Meta(description="Boxes that refuse the model.")]
    acked: Annotated[bool, Meta(description="Whether all boxes serve what is configured.")]


class ConfigStatus(msgspec.Struct):
    """Which boxes have a model as it is configured."""

    model_id: Annotated[str, Meta(description="Id of the model.")]
    config_epoch: Annotated[int, Meta(description="Number of the last change.")]
    all_bundles_acked: Annotated[bool, Meta(description="Whether all bundles have all of their boxes.")]
    no_bundles: Annotated[bool, Meta(description="Whether no bundle with boxes can run the model.")]
    bundles: Annotated[list[BundleStatus], Meta(description="Bundles that can run the model.")]
    source: Annotated[str, Meta(description="`api`, or `filesystem` for files of boxes.")]


class BundleRow(msgspec.Struct):
    """A bundle of boxes."""

    bundle_id: Annotated[str, Meta(description="Name of the bundle.")]
    priority: Annotated[
        int, Meta(description="Its place among the bundles; the first serves plain requests.")
    ]
    adapter_count: Annotated[int, Meta(description="Number of its adapters.")]
    source: Annotated[str, Meta(description="`boxes`.")]
    connected_workers: Annotated[int, Meta(description="Boxes that take work.")]


class Bundles(msgspec.Struct):
    """All bundles that have boxes."""

    bundles: Annotated[list[BundleRow], Meta(description="By priority.")]


class Epoch(msgspec.Struct):
    """How far configurations have come."""

    epoch: Annotated[int, Meta(description="Number of the last change; 0 before the first.")]
    bundles_hash: Annotated[str, Meta(description="Digest of bundles and their adapters.")]
    bundle_config_hashes_hash: Annotated[str, Meta(description="Digest of what is configured for them.")]


class ExportedModel(msgspec.Struct):
    """The document of a model."""

    model_id: Annotated[str, Meta(description="Id of the model.")]
    source: Annotated[str, Meta(description="`api`.")]
    model_config: Annotated[dict[str, Any], Meta(description="The document.")]
    affected_bundles: Annotated[list[str], Meta(description="Bundles that can run the model.")]


class Export(msgspec.Struct):
    """All documents of one epoch."""

    epoch: Annotated[int, Meta(description="Number of the last change.")]
    models: Annotated[list[ExportedModel], Meta(description="By name.")]


def _configs(services: Services) -> Configs:
    assert services.configs is not None, "a gateway has configurations"
    return services.configs


def _answer_yaml(resp: Response, value: Any) -> None:
    resp.content_type = YAML
    resp.data = yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode()


class ModelsResource:
    """All models."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The models by name. Raises `QueueUnavailable`."""
        answer_as(resp, {"models": _configs(self._services).models()}, ConfiguredModels)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Add a model or profiles: 201 with new profiles, else 200. Raises as `Configs.put` does."""
        services = self._services
        check_admin(req, services)
        async with services.bodies.receive(req, req.context.penstock.deadline_ns, MOST_NBYTES) as body:
            key = req.get_header("Idempotency-Key") or ""
            resp.status, answer = await _configs(services).put(body, key)
        answer_json(resp, msgspec.json.decode(answer, type=ConfigAdded))


class ModelResource:
    """One model, and below it its status."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """The document in YAML, or the status in JSON. Raises `InvalidInput` and `ModelNotFound`."""
        configs = _configs(self._services)
        name = model.removesuffix(_STATUS)
        check_id(name)
        if name != model:
            answer_as(resp, configs.status(name), ConfigStatus)
        else:
            _answer_yaml(resp, configs.document(name))


class BundlesResource:
    """All bundles."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The bundles by priority."""
        answer_as(resp, {"bundles": _configs(self._services).bundles()}, Bundles)


class BundleResource:
    """One bundle."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, bundle: str) -> None:
        """The bundle in YAML. Raises `ModelNotFound`."""
        by_id = {each["bundle_id"]: each for each in _configs(self._services).bundles()}
        if bundle not in by_id:
            raise ModelNotFound(f"bundle {bundle[:64]!a} has no boxes", error="bundle_not_found")
        one = by_id[bundle]
        shown = {"name": bundle, **{name: one[name] for name in ("priority", "source", "adapters")}}
        _answer_yaml(resp, shown)


class EpochResource:
    """How far configurations have come."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The epoch. Raises `QueueUnavailable`."""
        answer_as(resp, _configs(self._services).epoch(), Epoch)


class ExportResource:
    """All documents."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """All documents of one epoch. Raises `QueueUnavailable`."""
        check_admin(req, self._services)
        answer_as(resp, _configs(self._services).export(), Export)


class ResolveResource:
    """Where requests for a model go."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """The bundle of a model. Raises `InvalidInput`, `ModelNotFound` and `DependencyConflict`."""
        services = self._services
        until_ns = req.context.penstock.deadline_ns
        async with services.bodies.receive(req, until_ns, MOST_QUESTION_NBYTES) as body:
            asked = decode(body, ResolveRequest, binary=False)
            refuse_repeated(body, *asked.keys(), binary=False)
        bundle, mark, rest = asked.model.partition(":/")
        if not mark:
            bundle, rest = "", asked.model
        if not rest or (mark and not bundle):
            raise InvalidInput(f"model: {asked.model[:64]!a} names no model", error="invalid_model_spec")
        answer_as(resp, _configs(services).resolve(rest, bundle or asked.bundle or ""), Resolved)


class NoConfigResource:
    """Paths of the folder that are none."""

    def __init__(self, services: Services) -> None:
        pass

    async def on_get(self, req: Request, resp: Response, **_: str) -> None:
        """Raises `ModelNotFound`."""
        raise ModelNotFound("the path names no configuration", error="not_found")

    on_post = on_put = on_delete = on_get


_ONE = faults(400, 401, 403, 404, 429, 503, form=ModelErrorResponse)
_ADDING = faults(400, 401, 403, 408, 409, 413, 422, 429, 503, 507, form=ModelErrorResponse)
_ASKING = faults(400, 401, 403, 404, 408, 409, 413, 429, 503, form=ModelErrorResponse)
_KEY = Parameter("Idempotency-Key", "header", "The same key and body again get the first answer, for a day.")
_MODEL = Folder(f"{PATH}/models/{{model:path}}", ModelResource)


def _showing(path: str, resource: Any, summary: str, answer: Any, **more: Any) -> Route:
    return Route("get", f"{PATH}{path}", resource, summary, "cluster", answer=answer, errors=_ONE, **more)


ROUTES = (
    _showing("/models", ModelsResource, "Models of gateways and of the files of boxes.", ConfiguredModels),
    Route(
        "post",
        f"{PATH}/models",
        ModelsResource,
        "Add a model, or profiles of a model, in YAML; nothing that is there changes. A key needs the scope admin.",
        "cluster",
        answer=ConfigAdded,
        also={201: "Profiles are new."},
        errors=_ADDING,
        parameters=(_KEY,),
        request_media=(YAML,),
    ),
    _showing(
        "/models/{model:path}/status", ModelResource, "Which boxes have it.", ConfigStatus, under=_MODEL
    ),
    _showing(
        "/models/{model:path}", ModelResource, "The document of a model.", None, media=(YAML,), under=_MODEL
    ),
    _showing("/bundles", BundlesResource, "Bundles that have boxes.", Bundles),
    _showing("/bundles/{bundle}", BundleResource, "A bundle.", None, media=(YAML,)),
    _showing("/epoch", EpochResource, "How far configurations have come.", Epoch),
    _showing("/export", ExportResource, "All documents. A key needs the scope admin.", Export),
    asking(
        f"{PATH}/resolve",
        ResolveResource,
        "Where requests for a model go.",
        ResolveRequest,
        Resolved,
        {"model": "sentence-transformers/all-MiniLM-L6-v2"},
        tag="cluster",
        errors=_ASKING,
    ),
    Route("get", PATH, NoConfigResource),
    Route("get", f"{PATH}/{{rest:path}}", NoConfigResource),
)
