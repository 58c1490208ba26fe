"""Runs a `GenerateCall`: finds its model, waits until the model is loaded, plans the work, starts the engine.

1. The time of a request is bounded until its first token, and then between two tokens; a stream may last. A caller that
   sends X-Request-Timeout bounds the whole request instead.
2. The call gets its space: what a worker keeps of a prompt is found by the same API key and `cache_salt` only.
3. The engine's context is entered when the worker has tokenized the prompt. What fails before has a status of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from falcon.asgi import Request

from frontend.engine.planning import cost_of, plan
from frontend.engine.scope import RequestScope
from frontend.generation.events import Generation
from frontend.generation.models import find_generator
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import GenerateCall, ModelStatus

LONGEST_S = 86400.0
"""Bound of a request whose stream goes on and on."""


async def find_loaded(
    services: Services, req: Request, scope: RequestScope, name: str | None
) -> tuple[ModelEntry, ModelStatus]:
    """The model that a request names, loaded; from now on the times of generated text bound the request.

    Raises `ModelNotFound`, or why the model cannot be loaded in time.
    """
    entry = find_generator(name, services.catalog, services.settings)
    scope.names(entry.id)
    status = await services.directory.ensure_loaded(entry.id, scope.deadline_ns)
    _bound_times(req, scope, services)
    return entry, status


def _bound_times(req: Request, scope: RequestScope, services: Services) -> None:
    """Replace the deadline of all requests by those of generated text, unless the caller named a deadline."""
    if req.get_header("X-Request-Timeout") is None:
        scope.start_by_ns = deadline.after(services.settings.generation.first_token_timeout_s)
        scope.deadline_ns = deadline.after(LONGEST_S)


@asynccontextmanager
async def running(
    services: Services, scope: RequestScope, entry: ModelEntry, status: ModelStatus, call: GenerateCall
) -> AsyncIterator[Generation]:
    """The generation of a call on a loaded model; leaving the context ends the work."""
    space = _space_of("" if services.settings.generation.share_prefixes else scope.grant.caller, call.salt)
    call = msgspec.structs.replace(call, space=space)
    cost = cost_of(call, status, services.settings.limits)
    work = plan(scope, services.settings, entry.id, call, cost, lane="interactive")
    async with services.engine.generate(scope, work) as generation:
        yield generation


def _space_of(owner: str, salt: str) -> str:
    """The name of what one key keeps under one salt; empty, the space of all, without either."""
    if not owner and not salt:
        return ""
    return hashlib.blake2b(f"{len(owner)}:{owner}{salt}".encode(), digest_size=16).hexdigest()
