"""Sessions of runs with tools, and decisions about calls of tools, in the form of mistral.rs.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from falcon.asgi import Request

from frontend.generation.errors import ErrorAnswer
from frontend.generation.protocol import Rendered, TextProtocol
from frontend.protocols.agent.resources import ApprovalAnswer, ApprovalBody, ApprovalResource, SessionResource
from frontend.protocols.agent.serialized import SerializedSession
from frontend.route_rows import TEXT, Route, asking
from ipc.errors import PenstockError

PROTOCOL = "agent"
_SESSION = "/v1/sessions/{session_id:path}"
_REFUSALS = dict.fromkeys((401, 403, 429), ErrorAnswer)
_TOLD = dict.fromkeys((413, 503, 507), None)
_TAG = "agent"

ROUTES = (
    Route(
        "get",
        _SESSION,
        SessionResource,
        "A session with its messages and files, to keep or to import elsewhere.",
        _TAG,
        answer=SerializedSession,
        errors={**_REFUSALS, 404: None, 422: None, 503: None},
        error_code_header=False,
    ),
    Route(
        "put",
        _SESSION,
        SessionResource,
        "Import a session in place of the one with this id.",
        _TAG,
        body=SerializedSession,
        request_media=("application/json",),
        media=(TEXT,),
        answer_text="The session is stored.",
        errors={**_REFUSALS, 400: None, 408: None, 504: None, **_TOLD},
        error_code_header=False,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    ),
    Route(
        "delete",
        _SESSION,
        SessionResource,
        "Forget a session and the approvals that are remembered for it; also of an unknown id.",
        _TAG,
        media=(TEXT,),
        answer_text="The session is not stored.",
        errors={**_REFUSALS, 422: None, 503: None},
        error_code_header=False,
    ),
    asking(
        "/v1/agent/approvals/{approval_id}",
        ApprovalResource,
        "Decide whether a call of a tool may run.",
        ApprovalBody,
        ApprovalAnswer,
        {"decision": "approve"},
        tag=_TAG,
        errors=dict.fromkeys((400, 401, 403, 408, 413, 415, 422, 429, 503, 504), ErrorAnswer)
        | {404: ApprovalAnswer},
        error_code_header=False,
    ),
)


class AgentProtocol(TextProtocol):
    """Routes of sessions and approvals. Errors of sessions are plain text, which their resource writes.

    What is refused before the resource, such as an id that no path may have, has the form of all routes.
    """

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES)

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """The form of an error on `path`; an import that is wrong is 400, whatever is wrong."""
        status, body, headers = super().render_error(error, path, req)
        return 400 if status == 422 and req is not None and req.method == "PUT" else status, body, headers
