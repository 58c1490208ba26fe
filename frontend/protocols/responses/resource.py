"""The response as an object: what is known when its request arrives, and how the object ends.

1. The beginning has the id, the instant and the fields of the request. All events of a stream and the stored response
   repeat the beginning.
2. The end adds the status, the output, and usage, error or reason. Fields without a value are left out.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from frontend.engine.events import Ended
from frontend.generation.errors import error_info, status_of
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.requests import ResponsePlan
from ipc.errors import Draining, ModelError, Overloaded, PenstockError, WorkerFault

QUEUED, IN_PROGRESS, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
INCOMPLETE, CANCELLED = "incomplete", "cancelled"
UNFINISHED = (QUEUED, IN_PROGRESS)
"""Statuses of a response that goes on."""

Resource = dict[str, Any]


def beginning(plan: ResponsePlan) -> Resource:
    """The response of a request before anything has run."""
    return {
        "id": plan.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": QUEUED,
        "output": [],
        **plan.fields,
    }


def at(begun: Resource, status: str) -> Resource:
    """The response that began so, with another status."""
    return {**begun, "status": status}


def ended(begun: Resource, output: Output) -> Resource:
    """The response whose generation has ended by itself."""
    reason = output.reason
    if reason == "length":
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        return {**at(begun, INCOMPLETE), **cut, **_told(output)}
    status = CANCELLED if reason == "canceled" else COMPLETED
    done = {"completed_at": int(time.time())} if status == COMPLETED else {}
    return {**at(begun, status), **done, **_told(output)}


def cancelled(begun: Resource, output: Output) -> Resource:
    """The response that somebody cancelled, or whose client went away, with the output so far."""
    return {**at(begun, CANCELLED), **_told(output)}


def failed(begun: Resource, output: Output, error: PenstockError) -> Resource:
    """The response that failed, with the output so far."""
    told = {"type": kind_of(error), "code": _code_of(error), "message": error.message}
    return {**at(begun, FAILED), "error": told, **_told(output)}


def kind_of(error: PenstockError) -> str:
    """The type of an error: of the request, of the model or its worker, or of this server."""
    if status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "validation_error"
    of_model = isinstance(error, ModelError | WorkerFault | Overloaded) and not isinstance(error, Draining)
    return "model_error" if of_model else "internal_error"


def _code_of(error: PenstockError) -> str:
    default = "invalid_prompt" if kind_of(error) == "validation_error" else "server_error"
    return error_info(error).code or default


def _told(output: Output) -> dict[str, Any]:
    """Output, texts and usage; reasoning and usage are left out where there is none."""
    told: dict[str, Any] = {"output": output.items(), "output_text": output.text}
    if reasoning := output.reasoning:
        told["reasoning"] = reasoning
    if output.counts is not None:
        told["usage"] = usage_of(output.counts)
    return told


def usage_of(counts: Ended) -> dict[str, Any]:
    """Token counts in the form of this contract."""
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
