"""The form of a message's content that a chat template understands: a text, or a list of parts.

A template that iterates parts makes nothing of a text, and one that takes texts writes parts as Python does. Which form
a template reads is found out once, at the load:

1. Each role says a probe in both forms, in several conversations, since templates have rules about turns and tools.
2. A role is told things in the first form in which the probe stands in the prompt as it is; a text comes first.
3. A role whose messages are rendered without the probe is left out by the template. Requests with such a message are
   refused, and a template that leaves out the user is refused at the load.
4. Whether an answer can continue the last message (below), and what a template shows of tools
   (`workers.generation.tool_texts`), is tried in the same way.

A prompt may end within the last message, whose text an answer continues. transformers cuts such prompts in this way:

1. A mark stands behind the text of the last message while the template renders (`marked`).
2. The prompt ends before the mark (`cut`): what the template writes behind a message is gone.
3. The load has tried whether a template lets an answer go on (`obstacle`): some write the text in another form, and
   some write other messages behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipc.errors import InvalidInput
from workers.generation import tool_texts

HERE = "\ufdd1\ufdd1 "
"""The mark. The space shows whether a template strips messages."""
LEAVES_OUT = "leaves that message out"
_ASKED, _SAID = "Penstock0asks1", 'Penstock2says3: "it\'s"\n<b>'
ROLES = ("user", "system", "assistant", "tool")
TEXT, PARTS, LEFT_OUT, REFUSED = "text", "parts", "left out", "refused"
"""What a template does with the messages of a role; a refusal has the words of the template."""
PROBE = "Penstock0probe1says2"
"""The text that templates are tried with."""
_REPRESENTED = ("'type'", '"type"', "&#39;type&#39;")
"""Parts that were written as Python or JSON writes them."""
_ID = "abcdefghi"
_CALL = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_USER, _SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "a"}
_BEFORE: Mapping[str, Sequence[list[dict[str, Any]]]] = {
    "user": ([], [_SYSTEM]),
    "system": ([],),
    "assistant": ([_USER], [_SYSTEM, _USER]),
    "tool": ([_USER, _CALLED],),
}
"""What may stand before the message of a role."""
_BEHIND: Mapping[str, Sequence[list[dict[str, Any]]]] = {
    "system": ([_USER], []),
    "assistant": ([_USER], []),
    "tool": ([], [_USER]),
}
Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]
"""The text of a conversation under variables; raises what a template raises."""
_UNFINISHED = {"add_generation_prompt": False}


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
        return LEAVES_OUT
    if not prompt.endswith(_SAID):
        return "writes the text of that message in another form"
    return "" if _ASKED in prompt else "writes other messages behind that one"


def refusal(why: str) -> InvalidInput:
    """The error of a conversation whose last message no answer can continue.

    Clients of Anthropic look for the words in brackets, and ask without such a message then.
    """
    text = f"messages: the answer cannot continue the last message (assistant message prefill): {why}"
    return InvalidInput(text, param="messages")


class TemplateForms:
    """What one template does with the messages of each role."""

    def __init__(self, render: Render, errors: tuple[type[Exception], ...]) -> None:
        """`errors` are those that a template may end with."""
        self._render, self._errors = render, errors
        self._words = ""
        self._by_role: dict[str, str] = {}
        for role in ROLES:
            self._by_role[role] = self._found(role)
        self.obstacle = obstacle(lambda messages: self._probed(self.told(messages), _UNFINISHED))
        """Why no answer can continue the last message; empty where an answer can."""
        self.shows = tool_texts.shown(
            lambda messages, variables: self._probed(self.told(messages), variables), self._has("tool")
        )

    def check(self) -> None:
        """Raise ValueError if the template shows no message of a user in any form."""
        if not self._has("user"):
            why = f" ({self._words})" if self._words else ""
            raise ValueError(
                f"the chat template shows no message of a user, neither as a text nor as a list of parts{why}: "
                "correct the template of the model, or name another one with the option chat_template"
            )

    @property
    def has_system(self) -> bool:
        """Whether the template takes system messages."""
        return self._has("system")

    def _has(self, role: str) -> bool:
        return self.of(role) not in (LEFT_OUT, REFUSED)

    def of(self, role: str) -> str:
        """What the template does with messages of a role; a role of another name is told texts."""
        return self._by_role.get(role, TEXT)

    def shaped(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their texts in the form that the template reads.

        Raises `InvalidInput` for a text that the template would leave out.
        """
        return [self._shaped(message) for message in messages]

    def told(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a probe, each in the form that the template reads."""
        return [
            {**message, "content": _content(message["content"], PARTS)}
            if self.of(str(message["role"])) == PARTS and isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def refused_role(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The first role among messages that the template has refused in every form."""
        roles = [str(message.get("role")) for message in messages]
        return next((role for role in roles if self.of(role) == REFUSED), None)

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        text, form = message.get("content"), self.of(str(message.get("role")))
        if not isinstance(text, str) or form in (TEXT, REFUSED):
            return message
        if form == LEFT_OUT:
            role = message["role"]
            if role == "user" or not text.strip():
                return message
            raise InvalidInput(f"the chat template of the model leaves out what the role {role!a} says")
        return {**message, "content": _content(text, form)}

    def _found(self, role: str) -> str:
        is_rendered = False
        for form in (TEXT, PARTS):
            for before in _BEFORE[role]:
                for behind in _BEHIND.get(role, ([],)):
                    prompt = self._probed([*self.told(before), _said(role, form), *self.told(behind)])
                    is_rendered = is_rendered or prompt is not None
                    if prompt is not None and shows(prompt):
                        return form
        return LEFT_OUT if is_rendered else REFUSED

    def _probed(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] = {}) -> str | None:
        """The prompt of a conversation, None if the template refuses the conversation."""
        try:
            return self._render(messages, variables)
        except self._errors as error:
            self._words = self._words or str(error)[:200]
            return None


def _said(role: str, form: str) -> dict[str, Any]:
    """The probe as a message of a role."""
    message: dict[str, Any] = {"role": role, "content": _content(PROBE, form)}
    return message | {"tool_call_id": _ID, "name": "probe"} if role == "tool" else message


def _content(text: str, form: str) -> Any:
    return text if form == TEXT else [{"type": "text", "text": text}]


def shows(prompt: str) -> bool:
    """Whether the probe stands in a prompt, and not as the value of a written part."""
    before, found, _ = prompt.partition(PROBE)
    return bool(found) and not any(mark in before[-48:] for mark in _REPRESENTED)
