"""Runs the `GenerateCall` of a request for generated text, and sends the answer.

`running` loads the model, plans the work and starts the engine:

1. The wait for a load belongs to the run, so that a stream may open meanwhile.
2. The time of a request is bounded until its first token, and then between two tokens; a stream may last. A caller that
   sends X-Request-Timeout bounds the whole request instead.
3. Pictures of messages are fetched and checked (`frontend.generation.pictures`), and held until the end.
4. The call gets its space: blocks of a prompt are found by the same API key and `cache_salt` only. The call also gets
   the LoRA adapter of its model.
5. The engine's context is entered when the worker has tokenized the prompt.

`send_json` sends an answer that is whole, `send_stream` events while the text comes.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from types import TracebackType

import falcon
import msgspec
from falcon.asgi import Request, Response

from frontend.engine.events import Generation, Past
from frontend.engine.planning import cost_of, lora_of, pace_of, plan
from frontend.generation.errors import status_of
from frontend.generation.outcome import Outcome
from frontend.generation.pictures import have_parts, laid_out, looked_at, of_field
from frontend.http.threads import off_loop_if
from frontend.scope import RequestScope
from frontend.sending import COMMENT, CONTENT_TYPE, EventStream, Opening, RenderError, comment
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.wire.messages import GenerateCall, ModelStatus, Work

MANY_TOKENS = 2048
"""Log probabilities of more tokens are written by a thread."""
Render = Callable[[Outcome], msgspec.Struct]
"""The body of an outcome."""
LONGEST_S = 86400.0
"""Bound of a request whose stream goes on and on."""


def new_id(prefix: str) -> str:
    """An id that no other process gives: `prefix` and 32 hexadecimal digits."""
    return f"{prefix}{random.getrandbits(128):032x}"


async def gathered(generation: Generation, choices: int, render: Render) -> Outcome:
    """All that a generation gives. The error of a model that fails has the answer so far as its `partial_response`."""
    outcome = Outcome(choices)
    try:
        await outcome.gather(generation)
    except PenstockError as error:
        if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR and not outcome.is_empty:
            error.detail["partial_response"] = render(outcome)
        raise
    return outcome


async def send_json(resp: Response, render: Render, outcome: Outcome) -> None:
    """Answer with the body of an outcome."""
    long = sum(len(each.logprobs) + len(each.prompt_tokens) for each in outcome.choices) > MANY_TOKENS
    resp.content_type = falcon.MEDIA_JSON
    resp.data = await off_loop_if(long, _written, render, outcome)


def _written(render: Render, outcome: Outcome) -> bytes:
    return msgspec.json.encode(render(outcome))


async def send_stream(
    services: Services,
    req: Request,
    resp: Response,
    events: AsyncGenerator[bytes, None],
    protocol: str,
    last_events: RenderError,
    *,
    opening: Opening = comment,
    idle: bytes = COMMENT,
    content_type: str = CONTENT_TYPE,
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that.

    `last_events` end a stream that fails; `idle` is sent at the keep-alive interval while no event comes, and `opening`
    in place of the first.
    """
    idle_s = services.settings.generation.keep_alive_s
    stream = EventStream(
        services, req, events, protocol, last_events, opening=opening, idle=idle, idle_s=idle_s
    )
    await stream.begin()
    stream.answer(resp, content_type)


def _bound_times(scope: RequestScope, services: Services) -> None:
    """Replace the deadline of all requests by those of generated text, unless the caller named a deadline."""
    if not scope.start_by_ns and not scope.names_deadline:
        scope.start_by_ns = deadline.after(services.settings.generation.first_token_timeout_s)
        scope.deadline_ns = deadline.after(LONGEST_S)


def running(
    services: Services,
    scope: RequestScope,
    entry: ModelEntry,
    call: GenerateCall,
    past: Past | None = None,
) -> AbstractAsyncContextManager[Generation]:
    """The generation of a call on a model, which is loaded first; leaving the context ends the work.

    With `past` another process has begun the text.

    Raises why the model cannot be loaded in time, and what is wrong with pictures. From the load on the times of
    generated text bound the request.
    """
    # PERF: most requests have no pictures, and their messages are sent as they were read.
    runs = _looked_at if have_parts(call.messages or ()) else _Plain
    return runs(services, scope, entry, call, past)


class _Plain(AbstractAsyncContextManager[Generation]):
    """The generation of a call without pictures.

    PERF: nearly each request has one, and a generator as a context costs three times as much.
    """

    def __init__(
        self,
        services: Services,
        scope: RequestScope,
        entry: ModelEntry,
        call: GenerateCall,
        past: Past | None,
    ) -> None:
        self._services, self._scope, self._entry, self._call, self._past = services, scope, entry, call, past

    async def __aenter__(self) -> Generation:
        services, scope, entry = self._services, self._scope, self._entry
        status = await _loaded(services, scope, entry)
        self._text = _text_of(services, scope, entry, status, self._call, self._past)
        return await self._text.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._text.__aexit__(kind, error, trace)


@asynccontextmanager
async def _looked_at(
    services: Services, scope: RequestScope, entry: ModelEntry, call: GenerateCall, past: Past | None
) -> AsyncIterator[Generation]:
    """The generation of a call with pictures, which are held until the end."""
    status = await _loaded(services, scope, entry)
    with services.bodies.holding(0) as held:
        messages = await looked_at(services, scope, entry, status, call.messages or [], held)
        call = laid_out(msgspec.structs.replace(call, messages=messages))
        with of_field(messages):
            async with _text_of(services, scope, entry, status, call, past) as generation:
                yield generation


async def _loaded(services: Services, scope: RequestScope, entry: ModelEntry) -> ModelStatus:
    """Load the model. From then on the times of generated text bound the request."""
    status = await services.directory.ensure_loaded(entry.id, scope.waits_until_ns)
    scope.loaded_ns = time.perf_counter_ns()
    _bound_times(scope, services)
    return status


def _text_of(
    services: Services,
    scope: RequestScope,
    entry: ModelEntry,
    status: ModelStatus,
    call: GenerateCall,
    past: Past | None,
) -> AbstractAsyncContextManager[Generation]:
    """The engine's context of a call on a loaded model."""
    work = _work_of(services, scope, entry, status, call)
    pace = pace_of(scope, services.settings, services.recorder, entry.id)
    return services.engine.generate(scope, work, pace, past)


def _work_of(
    services: Services, scope: RequestScope, entry: ModelEntry, status: ModelStatus, call: GenerateCall
) -> Work:
    """The work of a call on a loaded model."""
    space = _space_of("" if services.settings.generation.share_prefixes else scope.grant.caller, call.salt)
    lora = lora_of(entry)
    if (space, lora) != (call.space, call.lora):
        call = msgspec.structs.replace(call, space=space, lora=lora)
    cost = cost_of(call, status, services.settings.limits)
    return plan(scope, services.settings, entry.id, call, cost, lane="interactive")


def _space_of(owner: str, salt: str) -> str:
    """The name of what one key keeps under one salt; empty, the space of all, without either."""
    if not owner and not salt:
        return ""
    return hashlib.blake2b(f"{len(owner)}:{owner}{salt}".encode(), digest_size=16).hexdigest()
