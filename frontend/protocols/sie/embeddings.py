"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

import base64
from typing import Any

import falcon
import numpy as np
import orjson
from falcon.asgi import Request, Response

from frontend.protocols.sie.convert import check_count, check_dimensions, check_texts
from frontend.protocols.sie.encode import time_headers
from frontend.protocols.sie.schemas import EmbeddingsRequest, read
from frontend.quantize import shorten
from frontend.services import Services
from ipc.errors import InferenceFailed, InvalidInput
from ipc.messages import EncodeCall, TextInput


def inputs_of(request: EmbeddingsRequest, limits: Any) -> list[TextInput]:
    """One input per text or token list. Raises `InvalidInput` for an empty, mixed or over-long input."""
    given = request.input
    if isinstance(given, str):
        given = [given]
    check_count(len(given), "input", limits)
    if all(isinstance(entry, int) for entry in given):
        return [_token_input(given, "input", limits)]
    if all(isinstance(entry, str) for entry in given):
        check_texts(given, "input[{}]", limits)  # type: ignore[arg-type]
        return [TextInput(text) for text in given]  # type: ignore[arg-type]
    if all(isinstance(entry, list) for entry in given):
        return [_token_input(entry, f"input[{index}]", limits) for index, entry in enumerate(given)]
    raise InvalidInput("input: expected one kind of entry (str, int, or array of int), got a mix")


def _token_input(ids: Any, where: str, limits: Any) -> TextInput:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
    return TextInput(None, list(ids))


class EmbeddingsResource:
    """Dense vectors in the OpenAI form; always JSON."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """One embeddings request."""
        services, context, engine = self._services, req.context.penstock, self._services.engine
        context.operation = "embeddings"
        limits = services.settings.limits
        request = read(await services.bodies.read(req), "application/json", EmbeddingsRequest, limits)
        context.model = request.model
        encoding = "float" if request.encoding_format is None else request.encoding_format
        if encoding not in ("float", "base64"):
            raise InvalidInput(f"encoding_format: {encoding[:64]!r} is not one of float, base64")
        inputs = inputs_of(request, limits)
        entry = engine.find(request.model)
        status = await engine.ensure_loaded(entry.id, context.deadline_ns)
        if "dense" not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no dense output")
        dimensions = check_dimensions(request.dimensions, entry, status.dims.get("dense", 0), "dimensions")
        lengths = [len(item.text) if item.text is not None else 4 * len(item.ids or ()) for item in inputs]
        call = EncodeCall(inputs, ["dense"])
        with await engine.run(context, entry.id, call, engine.cost_of(lengths, status), req.scope) as reply:
            if reply.errors:
                raise InferenceFailed(reply.errors[0].message)
            rows = reply.tensors()["dense"]
            body = _render(
                rows if dimensions is None else shorten(rows, dimensions),
                encoding,
                request.model,
                _usage(inputs, reply.tokens),
            )
            reply.check()
        resp.content_type = falcon.MEDIA_JSON
        time_headers(resp, context)
        resp.data = body


def _usage(inputs: list[TextInput], tokens: list[int]) -> int:
    """True number of tokens: of ids the number sent, of texts what the tokenizer made, special tokens included."""
    return sum(
        len(item.ids) if item.ids is not None else used for item, used in zip(inputs, tokens, strict=True)
    )


def _render(rows: np.ndarray, encoding: str, model: str, used: int) -> bytes:
    vectors: list[Any] = (
        [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
        if encoding == "base64"
        else list(rows)
    )
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": used, "total_tokens": used}
    return orjson.dumps(
        {"object": "list", "data": data, "model": model, "usage": usage}, option=orjson.OPT_SERIALIZE_NUMPY
    )
