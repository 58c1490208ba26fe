"""POST /v1/agent/approvals/{approval_id}: a decision about a call of a tool, at whichever frontend the run waits."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation.parameters import owner_of
from frontend.generation.running import decode, receive
from frontend.sending import answer_json
from frontend.services import Services
from frontend.state.approvals import Decision, Told


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
        told = await self._services.state.approvals.decide(
            None if req.context.penstock.grant.operates else owner_of(req),
            approval_id,
            Decision(approves, None if approves else body.message),
            remember=body.remember_for_session,
        )
        if told == "not_found":
            resp.status = 404
        answer_json(resp, ApprovalAnswer(told))
