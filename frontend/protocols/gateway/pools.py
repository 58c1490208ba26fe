"""`/v1/pools`: boxes that are reserved for the requests that name a pool.

Whoever may ask for vectors may look at pools; who makes, renews or removes a pool needs the scope `admin`.
"""

from __future__ import annotations

from typing import Annotated, Any

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.pools import Pools
from frontend.protocols.sie import faults
from frontend.protocols.sie.errors import ModelErrorResponse
from frontend.protocols.sie.schemas import FlatBody, decode, refuse_repeated
from frontend.route_rows import Route, asking
from frontend.sending import answer_json
from frontend.services import Services
from ipc.errors import InvalidInput, PoolNotFound
from ipc.wire.cluster_pools import LEASE_S, MOST_BOXES, MOST_LEASE_S, PoolSpec

PATH = "/v1/pools"
MOST_NBYTES = 64 << 10
_SHOWN = 64


class PoolRequest(FlatBody):
    """A pool to make, or new values for a pool that is there."""

    name: Annotated[str, Meta(description="1 to 63 of `a-z`, `0-9` and `-`; upper case is made lower.")]
    gpus: Annotated[
        dict[str, int] | None, Meta(description="Boxes by machine profile that make the pool active.")
    ] = None
    gpu_caps: Annotated[
        dict[str, int] | None, Meta(description="The most boxes by machine profile; by default `gpus`.")
    ] = None
    bundle: Annotated[str | None, Meta(description="The bundle of the boxes; by default any.")] = None
    ttl_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_LEASE_S)] | None,
        Meta(description=f"Length of the lease; by default {LEASE_S}."),
    ] = None
    minimum_worker_count: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_BOXES)] | None,
        Meta(description="Boxes to keep there, for who starts machines; 0 or more."),
    ] = None
    pinned_models: Annotated[list[str] | None, Meta(description="Models that the boxes keep loaded.")] = None
    queue_pool: Annotated[
        str | None, Meta(description="The pool of settings from which boxes come; by default `default`.")
    ] = None


class AssignedWorker(msgspec.Struct):
    """A box of a pool."""

    name: Annotated[str, Meta(description="Name of the box.")]
    url: Annotated[str, Meta(description="Empty: boxes are asked through gateways.")]
    gpu: Annotated[str, Meta(description="Machine profile of the box.")]
    bundle: Annotated[str, Meta(description="Bundle of the box.")]


class PoolValues(msgspec.Struct):
    """What a pool was asked to be."""

    name: Annotated[str, Meta(description="Name of the pool.")]
    queue_pool: Annotated[str, Meta(description="The pool of settings from which boxes come.")]
    gpus: Annotated[dict[str, int], Meta(description="Boxes that make the pool active.")]
    gpu_caps: Annotated[dict[str, int], Meta(description="The most boxes.")]
    bundle: Annotated[str | None, Meta(description="The bundle of the boxes.")]
    ttl_seconds: Annotated[int, Meta(description="Length of the lease.")]
    minimum_worker_count: Annotated[int, Meta(description="Boxes to keep there.")]
    pinned_models: Annotated[list[str], Meta(description="Models that the boxes keep loaded.")]


class PoolStatus(msgspec.Struct):
    """What a pool is now."""

    state: Annotated[str, Meta(description="pending, active or expired.")]
    assigned_workers: Annotated[list[AssignedWorker], Meta(description="Boxes that take work.")]
    created_at: Annotated[float, Meta(description="Unix seconds; 0 for a pool of settings.")]
    last_renewed: Annotated[float, Meta(description="Unix seconds; 0 for a pool of settings.")]


class PoolObject(msgspec.Struct):
    """A pool."""

    name: Annotated[str, Meta(description="Name of the pool.")]
    spec: Annotated[PoolValues, Meta(description="What was asked for.")]
    status: Annotated[PoolStatus, Meta(description="What is there.")]


class PoolList(msgspec.Struct):
    """All pools."""

    pools: Annotated[list[PoolObject], Meta(description="By name.")]


class Said(msgspec.Struct):
    """What was done."""

    message: Annotated[str, Meta(description="What is said.")]


def spec_of(body: bytes) -> PoolSpec:
    """The pool that a body asks for. Raises `InvalidInput` that names the field."""
    request = decode(body, PoolRequest, binary=False)
    refuse_repeated(body, *request.keys(), binary=False)
    given = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
    given["name"] = request.name.lower()
    for field in ("gpus", "gpu_caps"):
        if field in given:
            given[field] = _lowered(field, given[field])
    for field in ("bundle", "queue_pool"):
        if not given.get(field):
            given.pop(field, None)
    if "bundle" in given:
        given["bundle"] = given["bundle"].lower()
    try:
        return msgspec.convert(given, PoolSpec)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        where = path.rstrip("`").rpartition("$.")[2] or "body"
        value = given.get(where)
        shown = f" {value[:_SHOWN]!a}:" if isinstance(value, str) else ""
        raise InvalidInput(f"{where}:{shown} {text[:1].lower()}{text[1:]}") from error


def _lowered(field: str, counts: dict[str, int]) -> dict[str, int]:
    """Counts by machine profile in lower case. Raises `InvalidInput` for a profile that is there twice."""
    lowered: dict[str, int] = {}
    for profile, count in counts.items():
        if profile.lower() in lowered:
            raise InvalidInput(
                f"{field}: {profile[:_SHOWN]!a} is there twice; upper and lower case are the same"
            )
        lowered[profile.lower()] = count
    return lowered


def _pools(services: Services) -> Pools:
    assert services.pools is not None, "a gateway has pools"
    return services.pools


def check_admin(req: Request, services: Services) -> None:
    """Raise an `AccessRefused` unless the caller may change the cluster."""
    services.access.grant_for(req.scope, "admin", spend=False)


def answer_as(resp: Response, value: dict[str, Any], form: type[msgspec.Struct]) -> None:
    """Answer with the fields of `form`, which describes the answer."""
    answer_json(resp, msgspec.convert(value, form))


class PoolsResource:
    """All pools."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The pools by name."""
        answer_as(resp, {"pools": _pools(self._services).all()}, PoolList)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Make or change a pool: 201 for a new one, else 200. Raises `InvalidInput`, `Forbidden` and `StateFull`."""
        services = self._services
        check_admin(req, services)
        async with services.bodies.receive(req, req.context.penstock.deadline_ns, MOST_NBYTES) as body:
            spec = spec_of(body)
        pool, is_new = await _pools(services).put(spec)
        resp.status = falcon.HTTP_201 if is_new else falcon.HTTP_200
        answer_as(resp, pool, PoolObject)


class PoolResource:
    """One pool."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, pool: str) -> None:
        """The pool. Raises `PoolNotFound`."""
        answer_as(resp, _pools(self._services).find(pool.lower()), PoolObject)

    async def on_delete(self, req: Request, resp: Response, pool: str) -> None:
        """Remove the pool. Raises `PoolNotFound` and `Forbidden`."""
        check_admin(req, self._services)
        await _pools(self._services).remove(pool.lower())
        answer_json(resp, Said(f"pool {pool.lower()!r} is removed"))


class RenewResource:
    """The lease of one pool."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, pool: str) -> None:
        """Begin the lease anew. Raises `PoolNotFound`."""
        check_admin(req, self._services)
        answer_as(resp, await _pools(self._services).renew(pool.lower()), PoolObject)


class NoPoolResource:
    """Paths below a pool that are none."""

    def __init__(self, services: Services) -> None:
        pass

    async def on_get(self, req: Request, resp: Response, **_: str) -> None:
        """Raises `PoolNotFound`."""
        raise PoolNotFound("the path names no pool")

    on_post = on_delete = on_put = on_get


_EXAMPLE = {"name": "bench", "gpus": {"l4": 2}}
_FAULTS = faults(400, 401, 403, 408, 413, 429, 503, 507, form=ModelErrorResponse)
_ONE = faults(401, 403, 404, 429, 503, form=ModelErrorResponse)

ROUTES = (
    Route("get", PATH, PoolsResource, "All pools.", "cluster", answer=PoolList, errors=_ONE),
    asking(
        PATH,
        PoolsResource,
        "Make a pool, or change one and begin its lease anew. A key needs the scope admin.",
        PoolRequest,
        PoolObject,
        _EXAMPLE,
        tag="cluster",
        errors=_FAULTS,
        also={201: "The pool is new."},
    ),
    Route("get", f"{PATH}/{{pool}}", PoolResource, "A pool.", "cluster", answer=PoolObject, errors=_ONE),
    Route(
        "delete",
        f"{PATH}/{{pool}}",
        PoolResource,
        "Remove a pool; its boxes go back. A key needs the scope admin.",
        "cluster",
        answer=Said,
        errors=_ONE,
    ),
    Route(
        "post",
        f"{PATH}/{{pool}}/renew",
        RenewResource,
        "Begin the lease of a pool anew. A key needs the scope admin.",
        "cluster",
        answer=PoolObject,
        errors=_ONE,
    ),
    Route("get", f"{PATH}/{{pool}}/{{rest:path}}", NoPoolResource),
)
