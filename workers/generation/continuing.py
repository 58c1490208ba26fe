"""Prompts that end within the last message, whose text an answer continues, as transformers cuts such prompts.

1. A mark stands behind the text of the last message while the template renders (`marked`).
2. The prompt ends before the mark (`cut`): what the template writes behind a message is gone.
3. The load has tried whether a template lets an answer go on (`obstacle`): some write the text in another form, and
   some write other messages behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipc.errors import InvalidInput

HERE = "\ufdd1\ufdd1 "
"""The mark. The space shows whether a template strips messages."""
LEFT_OUT = "leaves that message out"
_ASKED, _SAID = "Penstock0asks1", 'Penstock2says3: "it\'s"\n<b>'


def marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark behind its text. Raises `InvalidInput` for a message without text, or with calls."""
    text = message.get("content")
    if not isinstance(text, str) or message.get("tool_calls"):
        raise refusal(f"that message has {'no text' if text is None else 'calls'}")
    return {**message, "content": f"{text}{HERE}"}


def cut(text: str) -> str | None:
    """The prompt up to the mark, by transformers' rule (chat_template_utils.py); None without a mark."""
    before, found, behind = text.rpartition(HERE.rstrip())
    if not found:
        return None
    return before if behind.startswith(" ") else before.rstrip()


def obstacle(render: Callable[[Sequence[dict[str, Any]]], str | None]) -> str:
    """What a template does that lets no answer continue the last message; empty where an answer can continue.

    `render` gives the text of a conversation, None if the template refuses the conversation, as it will every request.
    """
    asked = {"role": "user", "content": _ASKED}
    text = render([asked, {"role": "assistant", "content": f"{_SAID}{HERE}"}])
    if text is None:
        return ""
    prompt = cut(text)
    if prompt is None:
        return LEFT_OUT
    if not prompt.endswith(_SAID):
        return "writes the text of that message in another form"
    return "" if _ASKED in prompt else "writes other messages behind that one"


def refusal(why: str) -> InvalidInput:
    """The error of a conversation whose last message no answer can continue.

    Clients of Anthropic look for the words in brackets, and ask without such a message then.
    """
    text = f"messages: the answer cannot continue the last message (assistant message prefill): {why}"
    return InvalidInput(text, param="messages")
