"""POST /mcp on `server.mcp_port`: the server as an MCP server with one tool, `chat`.

1. The body is one message of JSON-RPC 2.0. Notifications, and answers of the client, are accepted with 202.
2. `initialize`, `ping` and `tools/list` are answered at once. No session is kept, so nothing follows from them.
3. `tools/call` of `chat` takes the fields of a request of chat, and runs them as POST /v1/chat/completions does: the
   same planner, runner, tools, keys and counts. The answer is the text of the first choice.

Errors of messages are JSON-RPC errors: -32700 no JSON and -32600 no request with status 400; -32601 an unknown method
or tool, -32603 a request of chat that fails, with its code. Errors before the message is read have the form of chat.
The transport is that of modelcontextprotocol.io, revision 2025-11-25, without streams: GET answers 405.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import UNSET, Meta, Raw, UnsetType

from frontend.agent.runner import offer_of
from frontend.generation.errors import InvalidField, status_of
from frontend.generation.requests import LONG_NBYTES, generators, receive
from frontend.http.bodies import until_disconnect
from frontend.http.fields import stray_byte
from frontend.http.threads import off_loop_if
from frontend.protocols.chat.chat import ChatResource, answered, parse
from frontend.protocols.chat.output import ChatAnswer
from frontend.scope import RequestScope
from frontend.sending import answer_json
from frontend.services import Services
from ipc.errors import Cancelled, PenstockError
from ipc.mcp_servers import REVISIONS
from ipc.version import VERSION

_PARSE, _INVALID, _UNKNOWN, _INTERNAL = -32700, -32600, -32601, -32603
_HEADER = "MCP-Protocol-Version"
_SCHEMA = {
    "type": "object",
    "properties": {
        "messages": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
            "description": "The conversation so far: a text of the user, or messages with role and content.",
        },
        "model": {"type": "string", "description": "Name of the model; absent: the default model."},
        "max_tokens": {"type": "integer", "minimum": 1, "description": "Most tokens of the answer."},
        "temperature": {"type": "number", "minimum": 0, "description": "0: always the likeliest token."},
    },
    "required": ["messages"],
    "additionalProperties": True,
}
_TOOL = {
    "name": "chat",
    "description": "Continue a conversation with a language model. Takes every field of a request of OpenAI's chat.",
    "inputSchema": _SCHEMA,
}


class _Message(msgspec.Struct):
    """One message. Without `id` a notification, without `method` an answer of the client."""

    jsonrpc: Literal["2.0"]
    method: str | UnsetType = UNSET
    id: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


class _Initialize(msgspec.Struct, rename="camel"):
    protocol_version: str = ""


class _Call(msgspec.Struct):
    name: str
    arguments: Raw = Raw(b"{}")


class _Refusal(Exception):
    """A message that is answered with an error of JSON-RPC; `data` goes with the error."""

    def __init__(self, code: int, text: str, data: Any = None) -> None:
        super().__init__(text)
        self.error = {"code": code, "message": text, **({"data": data} if data else {})}


class _Read(NamedTuple):
    """A body: the message, or why the body is none."""

    message: _Message | None
    refusal: _Refusal | None = None


def _read(body: bytes) -> _Read:
    try:
        message = msgspec.json.decode(body, type=_Message)
    except msgspec.ValidationError as error:
        return _Read(None, _Refusal(_INVALID, f"no request of JSON-RPC 2.0: {_plain(error)}"))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Read(None, _Refusal(_PARSE, "the body is no JSON"))
    # A mistake in the parameters is told with the id of the message.
    given = _params_of(message)
    if fault := stray_byte(body.replace(given, b"0", 1) if given else body, binary=False):
        return _Read(None, _Refusal(_PARSE, fault))
    return _Read(message)


def _plain(error: msgspec.ValidationError) -> str:
    return str(error).replace("`", "")[:300]


def _params(message: _Message, kind: type[Any]) -> Any:
    """The parameters of a method. Raises `_Refusal`."""
    given = _params_of(message) or b"{}"
    # NOTE: `Raw` keeps bytes that are no UTF-8.
    if fault := stray_byte(given, binary=False):
        raise _Refusal(_PARSE, f"params.{fault}")
    try:
        return msgspec.json.decode(given, type=kind)
    except msgspec.ValidationError as error:
        raise _Refusal(_INVALID, f"params: {_plain(error)}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _Refusal(_PARSE, "params: no JSON") from None


def _params_of(message: _Message) -> bytes:
    return b"" if message.params is UNSET else bytes(message.params)


class McpResource:
    """Messages of clients."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """One message. Raises what reading the body raises."""
        await until_disconnect(self._respond(req, resp), req.scope)

    async def _respond(self, req: Request, resp: Response) -> None:
        message, refusal = await receive(self._services, req, _read)
        revision = req.get_header(_HEADER)
        if refusal is None and revision is not None and revision not in REVISIONS:
            refusal = _Refusal(_INVALID, f"{_HEADER}: {revision[:64]!a} is none of {', '.join(REVISIONS)}")
        if refusal is not None or message is None:
            assert refusal is not None
            resp.status = HTTPStatus.BAD_REQUEST
            answer_json(resp, {"jsonrpc": "2.0", "id": None, "error": refusal.error})
            return
        if message.method is UNSET or message.id is UNSET:
            resp.status = HTTPStatus.ACCEPTED
            return
        try:
            outcome: dict[str, Any] = {"result": await self._result(req, message)}
        except _Refusal as error:
            outcome = {"error": error.error}
        answer_json(resp, {"jsonrpc": "2.0", "id": message.id, **outcome})

    async def _result(self, req: Request, message: _Message) -> dict[str, Any]:
        """The result of a request. Raises `_Refusal`."""
        if message.method == "initialize":
            asked = _params(message, _Initialize).protocol_version
            return {
                "protocolVersion": asked if asked in REVISIONS else REVISIONS[0],
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": {"name": "penstock", "version": VERSION},
            }
        if message.method == "ping":
            return {}
        if message.method == "tools/list":
            return {"tools": [_TOOL] if generators(self._services.catalog) else []}
        if message.method != "tools/call":
            raise _Refusal(_UNKNOWN, f"unknown method {message.method[:64]!a}")  # type: ignore[index]
        call: _Call = _params(message, _Call)
        if call.name != _TOOL["name"]:
            raise _Refusal(_UNKNOWN, f"unknown tool {call.name[:64]!a}, expected 'chat'")
        return {"content": [{"type": "text", "text": await self._chat(req, bytes(call.arguments))}]}

    async def _chat(self, req: Request, body: bytes) -> str:
        """The answer to a request of chat. Raises `_Refusal`."""
        services, scope = self._services, req.context.penstock
        scope.operation = ChatResource.operation
        try:
            read = partial(parse, limits=services.settings.limits, offer=offer_of(services))
            plan = await off_loop_if(len(body) > LONG_NBYTES, read, body)
            if plan.streams:
                raise InvalidField("stream", "a tool answers once: leave the field out")
            render, outcome = await answered(services, scope, plan)
            return _text_of(render(outcome))
        except Cancelled:
            raise
        except PenstockError as error:
            raise _failed(scope, error) from None


def _failed(scope: RequestScope, error: PenstockError) -> _Refusal:
    """The refusal of a request of chat, which is counted with the status that chat would answer."""
    status = status_of(error)
    scope.failed(error, status)
    data: dict[str, Any] = {"code": error.code, "status": status}
    if error.retry_after_s:
        data["retry_after_s"] = error.retry_after_s
    return _Refusal(_INTERNAL, error.message, data)


def _text_of(answer: ChatAnswer) -> str:
    """The text of the first choice; calls that the client has to run as JSON."""
    message = answer.choices[0].message
    if message.content or not message.tool_calls:
        return message.content or ""
    return orjson.dumps({"tool_calls": msgspec.to_builtins(message.tool_calls)}).decode()
