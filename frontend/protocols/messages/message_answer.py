"""The answer of /v1/messages that is sent whole, and what streams share with it."""

from __future__ import annotations

from typing import Any

import orjson

from frontend.engine.events import Called, Ended, Finished
from frontend.generation.logprobs import entries_of
from frontend.generation.outcome import Outcome, finish_reason

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def answer_of(identity: str, model: str, outcome: Outcome, logprobs: bool) -> dict[str, Any]:
    """The body; with `logprobs` it has those of all tokens."""
    [choice] = outcome.choices
    content: list[dict[str, Any]] = []
    if reasoning := choice.reasoning_text:
        content.append(thinking_block(reasoning))
    if text := choice.text:
        content.append({"type": "text", "text": text})
    # NOTE: arguments are JSON text already, with numbers that orjson could neither read nor write.
    content += [{**call_block(call), "input": orjson.Fragment(call.arguments)} for call in choice.calls]
    finished = choice.finished or Finished(0, "canceled")
    answer = {
        **envelope(identity, model),
        "content": content,
        **stop_of(finished, bool(choice.calls)),
        "usage": usage_of(outcome.counts),
    }
    return answer | {"logprobs": {"content": entries_of(choice.logprobs)}} if logprobs else answer


def envelope(identity: str, model: str) -> dict[str, Any]:
    """What a message begins with."""
    return {"id": identity, "type": "message", "role": "assistant", "content": [], "model": model}


def thinking_block(text: str) -> dict[str, Any]:
    """A block of reasoning, whose signature is empty."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def call_block(call: Called) -> dict[str, Any]:
    """A block of a call, with no input yet."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def stop_of(finished: Finished, has_calls: bool) -> dict[str, Any]:
    """Why the message ended, and the text that ended it."""
    reason = finish_reason(finished, has_calls)
    if reason == "stop" and finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}


def usage_of(counts: Ended) -> dict[str, int]:
    """Tokens of the prompt and of the answer."""
    return {"input_tokens": counts.prompt_tokens, "output_tokens": counts.completion_tokens}
