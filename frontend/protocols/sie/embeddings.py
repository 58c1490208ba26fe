"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

import base64
import time
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.disconnect import until_disconnect
from frontend.protocols.sie import render
from frontend.protocols.sie.convert import check_dimensions
from frontend.protocols.sie.flow import time_headers
from frontend.protocols.sie.items import check_count, check_texts
from frontend.protocols.sie.machine_profile import check_machine_profile
from frontend.protocols.sie.options import resolve
from frontend.protocols.sie.outputs import dense_of
from frontend.protocols.sie.schemas import EmbeddingsRequest, read
from frontend.responding import send_parts
from frontend.sending import Part
from frontend.services import Services
from ipc.client import Reply
from ipc.errors import InvalidInput, from_code
from ipc.messages import EncodeCall, InputItem


def inputs_of(request: EmbeddingsRequest, limits: Any) -> list[InputItem]:
    """One input per text or token list. Raises `InvalidInput` for an empty, mixed or over-long input."""
    given = request.input
    if isinstance(given, str):
        given = [given]
    if all(isinstance(entry, int) for entry in given):
        return [_token_input(given, "input", limits)]
    check_count(len(given), "input", limits)
    if all(isinstance(entry, str) for entry in given):
        check_texts(given, "input[{}]", limits)  # type: ignore[arg-type]
        return [InputItem(text) for text in given]  # type: ignore[arg-type]
    if all(isinstance(entry, list) for entry in given):
        return [_token_input(entry, f"input[{index}]", limits) for index, entry in enumerate(given)]
    raise InvalidInput("input: expected one kind of entry (str, int, or array of int), got a mix")


def _token_input(ids: Any, where: str, limits: Any) -> InputItem:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
    return InputItem(None, list(ids))


class EmbeddingsResource:
    """Dense vectors in the OpenAI form; always JSON."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """One embeddings request."""
        services, context = self._services, req.context.penstock
        context.operation = "embeddings"
        check_machine_profile(req, services.settings.server.machine_profile)
        async with services.bodies.hold(req, context.deadline_ns) as body:
            request = read(body, "application/json", EmbeddingsRequest, services.settings.limits)
            del body
            context.started = time.perf_counter()
            context.model = request.model
            reply, inputs = await until_disconnect(self._run(req, request), req.scope)
            with reply:
                if reply.errors:
                    raise from_code(reply.errors[0].code, reply.errors[0].message)
                began = time.perf_counter()
                parts = await _render(reply, request, _usage(inputs, reply.tokens))
                reply.check()
            context.phases["encode"] = (time.perf_counter() - began) * 1e3
            resp.content_type = falcon.MEDIA_JSON
            time_headers(resp, context)
            send_parts(resp, parts, reply, services)

    async def _run(self, req: Request, request: EmbeddingsRequest) -> tuple[Reply, list[InputItem]]:
        """The result and the inputs that it belongs to."""
        context, engine = req.context.penstock, self._services.engine
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidInput(
                f"encoding_format: {request.encoding_format[:64]!r} is not one of float, base64"
            )
        inputs = inputs_of(request, self._services.settings.limits)
        entry = engine.find(request.model)
        status = await engine.ensure_loaded(entry.id, context.deadline_ns)
        if "dense" not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no dense output")
        check_dimensions(request.dimensions, entry, status.dims.get("dense", 0), "dimensions")
        lengths = [len(item.text) if item.text is not None else 4 * len(item.ids or ()) for item in inputs]
        cost = engine.cost_of(lengths, status)
        found = resolve(
            entry, None, None, self._services.catalog, len(inputs), self._services.settings.limits
        )
        is_query = bool(found.options.get("is_query"))
        call = EncodeCall(
            inputs, ["dense"], found.instruction, is_query, found.options, found.overflow, found.lora
        )
        return await engine.run(context, entry.id, call, cost, req.scope), inputs


def _usage(inputs: list[InputItem], tokens: list[int]) -> int:
    """True number of tokens: of ids the number sent, of texts what the tokenizer made, special tokens included."""
    return sum(
        len(item.ids) if item.ids is not None else used for item, used in zip(inputs, tokens, strict=True)
    )


async def _render(reply: Reply, request: EmbeddingsRequest, used: int) -> list[Part]:
    rows = (await dense_of(reply, "float32", request.dimensions)).quantized.values

    def entry_at(index: int) -> dict[str, Any]:
        vector = rows[index]
        if request.encoding_format == "base64":
            vector = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": vector}

    data = await render.json_array(len(rows), rows.shape[1] * rows.itemsize, entry_at)
    usage = {"prompt_tokens": used, "total_tokens": used}
    return [
        b'{"object":"list","data":',
        *data,
        b',"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(usage) + b"}",
    ]
