"""Sessions of the caller are exported, imported and forgotten; decisions about calls of tools are taken.

GET, PUT and DELETE /v1/sessions/{session_id}:

1. Ids come from clients: any text of 1 to 256 characters, also with slashes. No id is ever part of a file's path.
2. Errors are plain text. An import that is refused for its body is 400 and changes nothing.
3. DELETE is 200 for unknown sessions too. DELETE and PUT forget remembered approvals at all frontends, end waits as
   refused, and end the sandbox of the session.

POST /v1/agent/approvals/{approval_id} decides about a call, at whichever frontend the run waits.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.agent.workplace import sandbox_of
from frontend.generation.errors import InvalidField, headers_of, status_of, text_of
from frontend.generation.multipart import FRAMING_NBYTES
from frontend.generation.requests import decode, owner_of, receive
from frontend.http.threads import off_loop
from frontend.protocols.agent.serialized import (
    MAX_BODIES_NBYTES,
    ImportedFile,
    SerializedSession,
    exported,
    files_in,
    messages_in,
)
from frontend.route_rows import TEXT
from frontend.sending import answer_json
from frontend.services import Services
from frontend.state.approvals import Decision, Told
from frontend.state.file_objects import file_object
from ipc.errors import BodyTooLarge, Cancelled, FileNotFound, InvalidInput, PenstockError

MAX_ID = 256
"""Characters of an id."""
_BAD_BODIES = (400, 415, 422)


class SessionNotFound(InvalidInput):
    """No session of that id is stored for the caller."""

    status = 404


class SessionResource:
    """One session of the caller."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, session_id: str) -> None:
        """The session as JSON."""
        await _in_text(req, resp, self._export(req, resp, session_id))

    async def on_put(self, req: Request, resp: Response, session_id: str) -> None:
        """Replace the session."""
        await _in_text(req, resp, self._import(req, resp, session_id), bad=400)

    async def on_delete(self, req: Request, resp: Response, session_id: str) -> None:
        """Forget the session."""
        await _in_text(req, resp, self._forget(req, resp, session_id))

    async def _export(self, req: Request, resp: Response, id_: str) -> None:
        _check_id(id_)
        owner, state = owner_of(req), self._services.state
        session = await state.sessions.get(owner, id_)
        if session is None:
            raise SessionNotFound(f"no session with the id {id_[:100]!a} is stored")
        files, left = list[dict[str, Any]](), MAX_BODIES_NBYTES
        for file_id in session.files:
            with suppress(FileNotFound):
                file = await state.files.get(owner, file_id)
                files.append(await file_object(state.files, file, with_body=file.nbytes <= left))
                left -= min(file.nbytes, left)
        answer_json(resp, exported(session.messages, files))

    async def _import(self, req: Request, resp: Response, id_: str) -> None:
        _check_id(id_)
        owner, state = owner_of(req), self._services.state
        messages, files = await self._received(req)
        for file in files:
            await state.files.add(
                owner,
                file.content,
                id=file.id,
                name=file.name,
                purpose=file.purpose,
                format=file.format,
                origin=file.origin,
                placeholder=file.placeholder,
                nbytes=file.nbytes,
            )
        await self._end_tools(owner, id_)
        await state.sessions.save(owner, id_, messages, [file.id for file in files])
        resp.content_type, resp.data = TEXT, b""

    async def _received(self, req: Request) -> tuple[list[dict[str, Any]], list[ImportedFile]]:
        """The messages and files of the body."""
        services, settings = self._services, self._services.settings
        limit = settings.state.max_file_bytes + FRAMING_NBYTES
        if (req.content_length or 0) > limit:
            raise BodyTooLarge(f"body: {req.content_length} bytes, the limit is {limit}")

        def read(body: bytes) -> tuple[list[dict[str, Any]], list[ImportedFile]]:
            if len(body) > limit:
                raise BodyTooLarge(f"body: {len(body)} bytes, the limit is {limit}")
            session = decode(body, SerializedSession, settings.limits.max_items)
            return messages_in(session, settings.limits, settings.state), files_in(session, settings.state)

        async with services.bodies.receive(req, req.context.penstock.deadline_ns) as body:
            return await off_loop(read, body)

    async def _forget(self, req: Request, resp: Response, id_: str) -> None:
        _check_id(id_)
        owner, state = owner_of(req), self._services.state
        await state.sessions.delete(owner, id_)
        await self._end_tools(owner, id_)
        resp.content_type, resp.data = TEXT, b""

    async def _end_tools(self, owner: str, id_: str) -> None:
        """Forget what is remembered for a session, and end its waits and its sandbox."""
        await self._services.state.approvals.forget(owner, id_)
        if self._services.agent is not None:
            await self._services.agent.host.end(sandbox_of(owner, id_))


def _check_id(id_: str) -> None:
    if not 0 < len(id_) <= MAX_ID:
        raise InvalidField("session_id", f"{len(id_)} characters, expected 1 to {MAX_ID}")


async def _in_text(req: Request, resp: Response, work: Coroutine[Any, Any, None], bad: int = 422) -> None:
    """Do the work of a responder, and tell its errors as plain text; `bad` is the status of wrong meanings."""
    try:
        await work
    except Cancelled:
        raise
    except PenstockError as error:
        status = status_of(error)
        status = bad if status in _BAD_BODIES else status
        req.context.penstock.failed(error)
        resp.status, resp.content_type, resp.text = status, TEXT, text_of(error)
        resp.set_headers(headers_of(error, status))


class ApprovalBody(msgspec.Struct):
    """A decision."""

    decision: Annotated[Literal["approve", "deny"], Meta(description="Whether the call may run.")]
    remember_for_session: Annotated[
        bool, Meta(description="Whether an approval holds for later calls of the session.")
    ] = False
    message: Annotated[
        str | None, Meta(description="Why the call may not run, for the model; ignored on an approval.")
    ] = None


class ApprovalAnswer(msgspec.Struct):
    """What became of a decision."""

    status: Annotated[
        Told,
        Meta(
            description="`resolved`: a waiting call was released; `queued`: the call will find the decision; "
            "`not_found`: nobody waits for it."
        ),
    ]


class ApprovalResource:
    """Decides about a call of the caller's runs; a key with the scope `admin` about calls of all runs."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, approval_id: str) -> None:
        """200, and 404 where nobody waits or somebody has decided."""
        parse = partial(decode, kind=ApprovalBody, max_items=self._services.settings.limits.max_items)
        body: ApprovalBody = await receive(self._services, req, parse)
        approves = body.decision == "approve"
        outcome = await self._services.state.approvals.decide(
            None if req.context.penstock.grant.operates else owner_of(req),
            approval_id,
            Decision(approves, None if approves else body.message),
            remember=body.remember_for_session,
        )
        if outcome == "not_found":
            resp.status = 404
        answer_json(resp, ApprovalAnswer(outcome))
