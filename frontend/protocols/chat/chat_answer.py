"""The answer of /v1/chat/completions that is sent whole."""

from __future__ import annotations

from typing import Any

from frontend.generation.logprobs import entries_of
from frontend.generation.outcome import ChoiceOutcome, Outcome
from frontend.protocols.chat.envelope import Envelope, call_of, usage_of

OBJECT = "chat.completion"


def answer_of(envelope: Envelope, outcome: Outcome, logprobs: bool) -> dict[str, Any]:
    """The body; with `logprobs` each choice has those of its tokens."""
    return {
        **envelope.fields(),
        "choices": [_choice(index, choice, logprobs) for index, choice in enumerate(outcome.choices)],
        "usage": usage_of(outcome.counts),
    }


def _choice(index: int, choice: ChoiceOutcome, logprobs: bool) -> dict[str, Any]:
    text, reasoning = choice.text, choice.reasoning_text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not choice.calls else None,
        "tool_calls": [call_of(call, indexed=False) for call in choice.calls] or None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    told: dict[str, Any] = {
        "index": index,
        "finish_reason": choice.reason,
        "message": message,
        "logprobs": {"content": entries_of(choice.logprobs)} if logprobs else None,
    }
    if choice.finished is not None and choice.finished.stop is not None:
        told["stop_sequence"] = choice.finished.stop
    return told
