"""Fields of requests that talk to a model: those of chat, Responses and Messages, and those of OpenAI's two only.

1. The struct of a route adds what only its contract has. A field stands here under the name that all its contracts use.
2. `HostedFields` ask for more than generated text: tools that run on the server, speech, stored state. A field that
   would change the answer, and has no effect here, is refused with the reason (`unserved`). What matters only while
   such tools run (`session_id`, permissions, `max_tool_rounds: 0`) has no effect here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from frontend.generation.errors import InvalidField
from frontend.generation.sampling import SamplingFields
from frontend.http.fields import one_of

PERMISSIONS = ("auto", "ask", "deny")
Permission = Annotated[str | None, one_of(PERMISSIONS)]


class HostedFields(SamplingFields, kw_only=True):
    """The fields, as chat, Responses and Messages name them, on top of those of sampling."""

    unserved: ClassVar[Mapping[str, str]] = {
        "web_search_options": "web search is not offered by this server",
        "enable_shell": "a shell is not offered by this server",
        "enable_code_execution": "code execution is not offered by this server",
        "files": "no tool that could write files is on in this server",
    }
    """Refused fields and the reasons. The request of a route adds the fields of its contract."""

    web_search_options: Annotated[
        Any, Meta(description="Refused, as no tool runs on the server; `/v1/responses` ignores the field.")
    ] = None
    enable_shell: Annotated[Any, Meta(description="Refused when true: no tool runs on the server.")] = None
    enable_code_execution: Annotated[
        Any, Meta(description="Refused when true: no tool runs on the server.")
    ] = None
    agent_permission: Annotated[
        Permission, Meta(description="Permission for tools that run on the server; checked, without effect.")
    ] = None
    code_execution_permission: Annotated[
        Permission, Meta(description="Permission for tools that run on the server; checked, without effect.")
    ] = None
    session_id: Annotated[
        str | None,
        Meta(
            description="Session of tools that run on the server; no effect. `/v1/responses` repeats the session."
        ),
    ] = None
    files: Annotated[
        list[Any] | None, Meta(description="Refused unless empty: no tool runs on the server.")
    ] = None
    max_tool_rounds: Annotated[
        int | None, Meta(description="Rounds of tools that run on the server: 0 only.")
    ] = None

    def refuse_hosted(self, streams: bool) -> None:
        """Raise `InvalidField` for a feature that this server does not offer, and for a permission that cannot hold."""
        for name, reason in self.unserved.items():
            value = getattr(self, name)
            if not (value is None or value is False or value == []):
                raise InvalidField(name, reason)
        if self.max_tool_rounds is not None and self.max_tool_rounds != 0:
            raise InvalidField(
                "max_tool_rounds", "this server runs no tools: use 0, and run the calls in the client"
            )
        self._check_permission(streams)

    def _check_permission(self, streams: bool) -> None:
        for name in ("agent_permission", "code_execution_permission"):
            value = getattr(self, name)
            if value is not None and value not in PERMISSIONS:
                raise InvalidField(name, f"{value[:64]!a} is not one of {', '.join(PERMISSIONS)}")
        # `agent_permission` wins over its old alias.
        if (self.agent_permission or self.code_execution_permission) == "ask" and not streams:
            raise InvalidField("agent_permission", "'ask' needs stream: true")


class TalkFields(HostedFields, kw_only=True):
    """The fields of chat, Responses and Messages, on top of those of sampling and of tools that run on the server."""

    model: Annotated[str | None, Meta(description="Name of the model.")] = None
    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate, at least 1.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with events as the text comes.")] = None
    tools: Annotated[
        list[Any] | None, Meta(description="Functions that the model may call, at most 128.")
    ] = None
    tool_choice: Annotated[Any, Meta(description="Whether the model calls functions, and which.")] = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of alternatives beside each token, 0 to 20.")
    ] = None
    response_format: Annotated[
        Any, Meta(description="The form of the answer: text, any JSON, or JSON of a schema.")
    ] = None
    grammar: Annotated[
        Any, Meta(description="A grammar that the answer keeps to; not beside a form of the answer.")
    ] = None


class ChoiceFields(TalkFields, kw_only=True):
    """The fields of chat and Responses besides."""

    max_completion_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate, at least 1; not beside `max_tokens`.")
    ] = None
    n: Annotated[int | None, Meta(description="Number of choices, 1 to 128.")] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts that end the answer and are not part of the answer, at most 64."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether the model may call several functions at once.")
    ] = None
