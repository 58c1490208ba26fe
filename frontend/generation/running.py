"""Runs a `GenerateCall`: finds its model, waits until the model is loaded, plans the work, starts the engine.

1. A request for a model that does not exist is refused at once. The wait for a load belongs to the run, so that a
   stream may open meanwhile.
2. The time of a request is bounded until its first token, and then between two tokens; a stream may last. A caller that
   sends X-Request-Timeout bounds the whole request instead.
3. The call gets its space: what a worker keeps of a prompt is found by the same API key and `cache_salt` only.
4. The engine's context is entered when the worker has tokenized the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from falcon.asgi import Request

from frontend.engine.events import Generation
from frontend.engine.planning import cost_of, pace_of, plan
from frontend.generation.models import find_generator
from frontend.scope import RequestScope
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import GenerateCall

LONGEST_S = 86400.0
"""Bound of a request whose stream goes on and on."""


def named_model(services: Services, scope: RequestScope, name: str | None) -> ModelEntry:
    """The model that a request names. Raises `ModelNotFound`, or `InvalidField` for a model that generates no text."""
    entry = find_generator(name, services.catalog, services.settings)
    scope.names(entry.id)
    return entry


def _bound_times(req: Request, scope: RequestScope, services: Services) -> None:
    """Replace the deadline of all requests by those of generated text, unless the caller named a deadline."""
    if not scope.start_by_ns and req.get_header("X-Request-Timeout") is None:
        scope.start_by_ns = deadline.after(services.settings.generation.first_token_timeout_s)
        scope.deadline_ns = deadline.after(LONGEST_S)


@asynccontextmanager
async def running(
    services: Services, req: Request, scope: RequestScope, entry: ModelEntry, call: GenerateCall
) -> AsyncIterator[Generation]:
    """The generation of a call on a model, which is loaded first; leaving the context ends the work.

    Raises why the model cannot be loaded in time. From the load on the times of generated text bound the request.
    """
    status = await services.directory.ensure_loaded(entry.id, scope.waits_until_ns)
    _bound_times(req, scope, services)
    space = _space_of("" if services.settings.generation.share_prefixes else scope.grant.caller, call.salt)
    call = msgspec.structs.replace(call, space=space)
    cost = cost_of(call, status, services.settings.limits)
    work = plan(scope, services.settings, entry.id, call, cost, lane="interactive")
    pace = pace_of(scope, services.settings, services.recorder, entry.id)
    async with services.engine.generate(scope, work, pace) as generation:
        yield generation


def _space_of(owner: str, salt: str) -> str:
    """The name of what one key keeps under one salt; empty, the space of all, without either."""
    if not owner and not salt:
        return ""
    return hashlib.blake2b(f"{len(owner)}:{owner}{salt}".encode(), digest_size=16).hexdigest()
