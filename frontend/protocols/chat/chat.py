"""POST /v1/chat/completions: the request and the resource; `output` makes the answer.

1. `parse` reads the body, and checks everything before a model is looked up.
2. `ChatResource` finds the model, runs the call, and sends the answer, whole or as a stream that `DONE` ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.agent.runner import offer_of, running
from frontend.agent.tools import with_own
from frontend.generation.conversation import (
    BeginsAnswer,
    ChatMessage,
    ContinuesMessage,
    Function,
    choice_of,
    end_variables,
    functions_of,
    is_continued,
    messages_of,
    tool_use,
)
from frontend.generation.errors import InvalidField, status_of, stream_error
from frontend.generation.fields import (
    ChoiceFields,
    Effort,
    alternatives_of,
    choices_of,
    ending_of,
    salt_of,
    sampling_of,
    template_variables,
)
from frontend.generation.hosted import NOTHING, AgentPlan, Hosted, Offer
from frontend.generation.nested import grammar_of
from frontend.generation.outcome import Outcome
from frontend.generation.requests import decode, named_model, receive
from frontend.generation.running import gathered, send_json, send_stream
from frontend.http.fields import one_of
from frontend.protocols.chat.output import CHUNK, OBJECT, ChatAnswer, ChatChunks, Envelope, answer_of
from frontend.scope import RequestScope
from frontend.sending import DONE, InferenceRoute, data
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall

PROTOCOL = "chat"
_ALIASES = (("max_tokens", "max_completion_tokens"),)
_MODALITIES = ("text",)
_INSTEAD = "is no tool of chat completions: use POST /v1/responses"
_HINTS = dict.fromkeys(("web_search", "web_search_preview", "shell", "namespace"), _INSTEAD)


async def send_events(
    services: Services, req: Request, resp: Response, events: AsyncGenerator[bytes, None]
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that."""
    await send_stream(services, req, resp, events, PROTOCOL, last_events)


def last_events(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, events) of an error that ends a stream."""
    return status_of(error), data(orjson.dumps(stream_error(error))) + DONE


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: Annotated[bool | None, Meta(description="Add a last event with the counts of tokens.")] = (
        None
    )


class ChatRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, str]] = {
        **ChoiceFields.unserved,
        "audio": "speech is not offered by this server",
        "functions": "this older form of functions is not offered: use tools",
        "function_call": "this older form of a choice is not offered: use tool_choice",
    }
    messages: Annotated[
        list[ChatMessage] | str, Meta(description="The conversation so far, the oldest message first.")
    ]
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream.")] = None
    modalities: Annotated[
        list[Annotated[str, one_of(_MODALITIES, required=True)]] | None,
        Meta(description="Kinds of answers: `text` only, as no model here speaks."),
    ] = None
    audio: Annotated[Any, Meta(description="Refused: no model here speaks.")] = None
    functions: Annotated[Any, Meta(description="Refused: `tools` takes its place.")] = None
    function_call: Annotated[Any, Meta(description="Refused: `tool_choice` takes its place.")] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="Whether the model thinks first; absent: as its template does.")
    ] = None
    reasoning_effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Values for the template of the conversation.")
    ] = None
    add_generation_prompt: BeginsAnswer = None
    continue_final_message: ContinuesMessage = None
    truncate_sequence: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What to generate, on which model (None: the default), and in which form the answer goes out."""

    model: str | None
    call: GenerateCall
    streams: bool
    include_usage: bool
    agent: AgentPlan | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.call.sampling.logprobs is not None


def parse(body: bytes, limits: Limits, offer: Offer = NOTHING) -> ChatPlan:
    """The plan of a body; `offer` is what this server runs. Raises `MalformedBody` and `InvalidField`.

    The body has the fields of OpenAI, and those that the contract adds. Unknown fields are ignored, null equals absent.
    Messages become a `Conversation`; a bare string is one message of a user.
    """
    request = decode(body, ChatRequest, limits.max_items, _ALIASES)
    request.refuse_unserved()
    streams = bool(request.stream)
    if any(kind not in _MODALITIES for kind in request.modalities or ()):
        raise InvalidField("modalities", "the models of this server answer with text only")
    options = request.stream_options
    usage = streams and options is not None and bool(options.include_usage)
    hosted = Hosted(offer, takes_urls=False)
    functions = functions_of(request.tools, _HINTS, hosted)
    messages = messages_of(request.messages, limits, hosted)
    agent = request.plan(hosted, streams, functions)
    call = _call(request, with_own(functions, agent), [function.name for function in functions], messages)
    return ChatPlan(request.model, call, streams, usage, agent)


def _call(
    request: ChatRequest, functions: list[Function], names: list[str], messages: list[dict[str, Any]]
) -> GenerateCall:
    """The call; `names` are those of the client's functions, which come first."""
    own = [function.name for function in functions[len(names) :]]
    choice = choice_of(request.tool_choice, names, own)
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    limit_name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    end = end_variables(request.add_generation_prompt, request.continue_final_message)
    if request.continue_final_message and not is_continued(messages[-1]):
        where = f"messages[{len(messages) - 1}]"
        raise InvalidField(where, "continue_final_message needs a text of the assistant here, without calls")
    return GenerateCall(
        messages=messages,
        tools=tool_use(functions, choice, request.parallel_tool_calls),
        variables=template_variables(
            request.enable_thinking, request.reasoning_effort, request.chat_template_kwargs
        )
        | end,
        sampling=sampling_of(request, alternatives_of(request.logprobs, request.top_logprobs)),
        ending=ending_of(limit, request.stop, request.ignore_eos, names=(limit_name, "stop")),
        grammar=grammar_of(request.response_format, request.grammar),
        n=choices_of(request.n),
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
    )


async def answered(
    services: Services, scope: RequestScope, plan: ChatPlan
) -> tuple[Callable[[Outcome], ChatAnswer], Outcome]:
    """Run a plan to its end: how the outcome becomes the answer, and the outcome. Raises as `running` does."""
    entry = named_model(services, scope, plan.model)
    envelope = Envelope.new("chatcmpl", OBJECT, entry.id)
    render = partial(answer_of, envelope, logprobs=plan.has_logprobs)
    async with running(services, scope, entry, plan.call, plan.agent) as generation:
        return render, await gathered(generation, plan.call.n, render)


class ChatResource(InferenceRoute):
    """One conversation, answered whole or as a stream of chunks."""

    operation = "chat"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        read = partial(parse, limits=services.settings.limits, offer=offer_of(services))
        plan = await receive(services, req, read)
        if plan.streams:
            entry = named_model(services, scope, plan.model)
            await send_events(services, req, resp, self._chunks(scope, entry, plan))
            return
        render, outcome = await answered(services, scope, plan)
        await send_json(resp, render, outcome)

    async def _chunks(
        self, scope: RequestScope, entry: ModelEntry, plan: ChatPlan
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompt has been accepted."""
        envelope = Envelope.new("chatcmpl", CHUNK, entry.id)
        chunks = ChatChunks(
            envelope,
            plan.call.n,
            logprobs=plan.has_logprobs,
            include_usage=plan.include_usage,
            stream_arguments=self.services.settings.generation.stream_arguments,
        )
        async with running(self.services, scope, entry, plan.call, plan.agent) as generation:
            yield b""
            async for events in generation:
                body = chunks.frame(events) if plan.agent else b"".join(map(data, chunks.feed(events)))
                if body:
                    yield body
        yield DONE
