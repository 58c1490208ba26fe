"""The fields that requests for generated text share, and what they mean for the call.

`SamplingFields` say how the next token is chosen and what ends a choice. All protocols of generated text have these:

1. A temperature that is absent or not above 0 is greedy. Values out of range switch their filter off, without an error.
2. What a model cannot compute with (an infinite penalty) is brought to a finite number of the same effect.
3. What costs time or memory is bounded: stop texts, biases, breakers, choices.

`variables_of` says whether and how hard a model thinks first: `enable_thinking` and the reasoning effort become
variables of templates.

1. Thinking has three states: on, off, and None for the template's own default.
2. An effort is a level, or off; it also switches thinking. Both together must agree.

`TalkFields` are those of chat, Responses and Messages; `ChoiceFields` those of OpenAI's two only.

1. The struct of a route adds what only its contract has. A field stands here under the name that all its contracts use.
2. `HostedFields` ask for tools that run on the server (`frontend.generation.hosted`). A field that would change the
   answer, and has no effect here, is refused with the reason (`unserved`). What matters only while such tools run
   (`session_id`, permissions, `max_tool_rounds: 0`) has no effect without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from frontend.generation.conversation import Function
from frontend.generation.errors import InvalidField, shown
from frontend.generation.hosted import CODE, PERMISSIONS, SHELL, AgentPlan, Hosted
from frontend.http.fields import one_of
from ipc.wire.codec import LARGEST, SMALLEST, LongInteger
from ipc.wire.messages import Ending, Sampling

MAX_STOPS = 64
MAX_STOP_NBYTES = 1024
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BREAKERS = 64
MAX_ALTERNATIVES = 20
MAX_CHOICES = 128
DEFAULT_ALTERNATIVES = 1
MAX_SALT = 1024
_MOST_TOKENS = (1 << 31) - 1
_MOST_PENALTY = 1e5
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-4, 1e4
_DEFAULTS = Sampling()
LEVELS = ("low", "medium", "high", "xhigh", "max")
_ALIASES = {"none": "off", "minimal": "low"}
EFFORTS = ("off", *_ALIASES, *LEVELS)
"""What requests may say, in letters of either case."""
Effort = Annotated[str | None, one_of(EFFORTS)]
Permission = Annotated[str | None, one_of(PERMISSIONS)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of sampling that every protocol has under these names."""

    temperature: Annotated[
        float | None,
        Meta(description="Spread of the choice of tokens; 0 or absent: the likeliest token each time."),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(description="Keep the likeliest tokens up to this probability together; out of range: off."),
    ] = None
    min_p: Annotated[
        float | None,
        Meta(
            description="Keep tokens of at least this part of the likeliest token's probability; out of range: off."
        ),
    ] = None
    top_k: Annotated[
        int | None, Meta(description="Keep so many of the likeliest tokens; out of range: off.")
    ] = None
    presence_penalty: Annotated[
        float | None, Meta(description="Taken from the logit of each token that has occurred.")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Meta(description="Taken from the logit of a token for each time that the token has occurred."),
    ] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="Divides the logits of tokens that have occurred; 1: off.")
    ] = None
    dry_multiplier: Annotated[
        float | None, Meta(description="Strength of the penalty for repeated sequences (DRY); absent: off.")
    ] = None
    dry_base: Annotated[
        float | None, Meta(description="Growth of the DRY penalty with each token of a repetition.")
    ] = None
    dry_allowed_length: Annotated[int | None, Meta(description="Length of a repetition that DRY allows.")] = (
        None
    )
    dry_sequence_breakers: Annotated[
        list[str] | None, Meta(description="Texts that end a repetition for DRY, at most 64.")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        Meta(description="Numbers from -100 to 100, by token id, that are added to logits; at most 1024."),
    ] = None
    seed: Annotated[int | None, Meta(description="The same seed gives the same text.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on behind the model's own end of the text.")] = (
        None
    )
    cache_salt: Annotated[
        str | None,
        Meta(description="Only requests with the same text here share what is kept of a prompt; not empty."),
    ] = None


def sampling_of(fields: SamplingFields, alternatives: int | None = None) -> Sampling:
    """The sampling of a request; `alternatives` beside each chosen token, None for no log probabilities.

    Raises `InvalidField`.
    """
    if alternatives is not None and not 0 <= alternatives <= MAX_ALTERNATIVES:
        raise InvalidField("top_logprobs", f"{shown(alternatives)} is not in 0 to {MAX_ALTERNATIVES}")
    multiplier = fields.dry_multiplier
    return Sampling(
        temperature=_temperature(fields.temperature),
        top_k=min(max(fields.top_k or 0, 0), _MOST_TOKENS),
        top_p=_inside(fields.top_p, 1.0),
        min_p=_inside(fields.min_p, 0.0),
        presence_penalty=_bounded(fields.presence_penalty),
        frequency_penalty=_bounded(fields.frequency_penalty),
        repetition_penalty=_repetition(fields.repetition_penalty),
        dry_multiplier=None if multiplier is None or multiplier <= 0 else _bounded(multiplier),
        dry_base=_dry_base(fields.dry_base),
        dry_allowed_length=_dry_length(fields.dry_allowed_length),
        dry_sequence_breakers=_breakers(fields.dry_sequence_breakers),
        logit_bias=_biases(fields.logit_bias),
        logprobs=alternatives,
        seed=_seed(fields.seed),
    )


def _seed(value: int | None) -> int | None:
    """The seed as it is: two seeds that became one would give one text. Raises `InvalidField` for over 64 bits."""
    if value is not None and not SMALLEST <= value <= LARGEST:
        raise InvalidField("seed", str(LongInteger("", value)))
    return value


def alternatives_of(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Alternatives beside each token, one if a request does not say how many; None without log probabilities."""
    if not logprobs:
        return None
    return DEFAULT_ALTERNATIVES if top_logprobs is None else top_logprobs


def ending_of(
    max_tokens: int | None,
    stop: str | Sequence[str] | None,
    ignore_eos: bool | None = None,
    *,
    names: tuple[str, str] = ("max_tokens", "stop"),
    least: int = 1,
) -> Ending:
    """What ends a choice; `names` are those of the two fields in the request. Raises `InvalidField`.

    `least` is the smallest number of tokens that may be asked for.
    """
    if max_tokens is not None and max_tokens < least:
        raise InvalidField(names[0], f"{shown(max_tokens)} given, at least {least} is needed")
    limit = None if max_tokens is None else min(max_tokens, _MOST_TOKENS)
    return Ending(limit, _stops(stop, names[1]), [], bool(ignore_eos))


def salt_of(salt: str | None) -> str:
    """What `cache_salt` adds to the space of a request. Raises `InvalidField` for an empty or a long text."""
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT:
        raise InvalidField("cache_salt", f"{len(salt)} characters given, 1 to {MAX_SALT} are needed")
    return salt


def choices_of(n: int | None, field: str = "n") -> int:
    """Number of choices; None is 1. Raises `InvalidField` for none or too many."""
    count = 1 if n is None else n
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidField(field, f"{shown(count)} is not in 1 to {MAX_CHOICES}")
    return count


def _temperature(value: float | None) -> float | None:
    return None if value is None or value < _LEAST_TEMPERATURE else min(value, _MOST_TEMPERATURE)


def _inside(value: float | None, off: float) -> float:
    """`value` if it is inside the open interval (0, 1), else the value that switches the filter off."""
    return value if value is not None and 0 < value < 1 else off


def _bounded(value: float | None) -> float:
    return min(max(value or 0.0, -_MOST_PENALTY), _MOST_PENALTY)


def _repetition(value: float | None) -> float:
    if value is None or value <= 0:
        return _DEFAULTS.repetition_penalty
    return min(max(value, 1 / _MOST_PENALTY), _MOST_PENALTY)


def _dry_base(value: float | None) -> float:
    return _DEFAULTS.dry_base if value is None or value <= 0 else _bounded(value)


def _dry_length(value: int | None) -> int:
    return _DEFAULTS.dry_allowed_length if value is None else min(max(value, 1), _MOST_TOKENS)


def _breakers(given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return _DEFAULTS.dry_sequence_breakers
    check_texts(given, "dry_sequence_breakers", MAX_BREAKERS)
    return tuple(given)


def _stops(given: str | Sequence[str] | None, field: str) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        check_texts([given], field, 1)
        return [given]
    check_texts(given, field, MAX_STOPS)
    return list(dict.fromkeys(given))


def check_texts(given: Sequence[str], field: str, most: int) -> None:
    """Raise `InvalidField` for more than `most` texts, and for a text that is empty or too long to look for."""
    if len(given) > most:
        raise InvalidField(field, f"{len(given)} given, the limit is {most}")
    for index, text in enumerate(given):
        place = field if most == 1 else f"{field}[{index}]"
        if not text:
            raise InvalidField(place, "may not be empty")
        if len(text.encode()) > MAX_STOP_NBYTES:
            raise InvalidField(place, f"{len(text.encode())} bytes, the limit is {MAX_STOP_NBYTES}")


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    if len(given) > MAX_BIASES:
        raise InvalidField("logit_bias", f"{len(given)} given, the limit is {MAX_BIASES}")
    return {_token(key): _bias(key, value) for key, value in given.items()}


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= _MOST_TOKENS):
        raise InvalidField("logit_bias", f"key {key[:64]!a} is no token id")
    return int(key)


def _bias(key: str, value: float) -> float:
    if not -MAX_BIAS <= value <= MAX_BIAS:
        raise InvalidField(f"logit_bias.{key[:64]}", f"{value:g} is not in {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return value


def variables_of(
    thinking: bool | None,
    effort: str | None,
    *,
    names: tuple[str, str] = ("enable_thinking", "reasoning_effort"),
) -> dict[str, Any]:
    """Variables of the chat template; `names` are those of the two fields in the request. Raises `InvalidField`."""
    level = None if effort is None else _level(effort, names[1])
    if level is None:
        return {} if thinking is None else {"enable_thinking": thinking}
    on = level != "off"
    if thinking is not None and thinking is not on:
        raise InvalidField(names[1], f"{level!a} contradicts {names[0]}: {str(thinking).lower()}")
    # NOTE: templates that know an effort of nothing call it "none".
    strength = level if on else "none"
    return {"enable_thinking": on, "reasoning_effort": strength, "reasoning_strength": strength}


def _level(effort: str, field: str) -> str:
    level = effort.strip().lower()
    if level not in EFFORTS:
        raise InvalidField(field, f"{effort[:64]!a} is not one of {', '.join(EFFORTS)}")
    return _ALIASES.get(level, level)


def template_variables(
    thinking: bool | None, effort: str | None, kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """As `variables_of`; `chat_template_kwargs` counts where a field itself is absent. Raises `InvalidField`."""
    given, names = kwargs or {}, ["enable_thinking", "reasoning_effort"]
    if thinking is None and given.get("enable_thinking") is not None:
        thinking, names[0] = given["enable_thinking"], "chat_template_kwargs.enable_thinking"
        if not isinstance(thinking, bool):
            raise InvalidField(names[0], "expected true or false")
    if effort is None and given.get("reasoning_effort") is not None:
        effort, names[1] = given["reasoning_effort"], "chat_template_kwargs.reasoning_effort"
        if not isinstance(effort, str):
            raise InvalidField(names[1], "expected a string")
    return variables_of(thinking, effort, names=(names[0], names[1]))


class HostedFields(SamplingFields, kw_only=True):
    """The fields, as chat, Responses and Messages name them, on top of those of sampling."""

    unserved: ClassVar[Mapping[str, str]] = {}
    """Refused fields and the reasons. The request of a route adds the fields of its contract."""
    searches_by_field: ClassVar[bool] = True
    """Whether `web_search_options` counts in the contract."""

    web_search_options: Annotated[
        Any,
        Meta(description="Offer the model the web search of this server; `/v1/responses` ignores the field."),
    ] = None
    enable_shell: Annotated[Any, Meta(description="Offer the model the shell of this server.")] = None
    enable_code_execution: Annotated[
        Any, Meta(description="Offer the model the Python interpreter of this server.")
    ] = None
    agent_permission: Annotated[
        Permission, Meta(description="Permission for tools that run on the server; `ask` needs a stream.")
    ] = None
    code_execution_permission: Annotated[
        Permission, Meta(description="Older name of `agent_permission`, which wins.")
    ] = None
    session_id: Annotated[
        str | None,
        Meta(description="Session of tools that run on the server: messages, files, interpreter."),
    ] = None
    files: Annotated[
        list[Any] | None,
        Meta(description="Files that tools should make: `name`, and if wanted `format` and `description`."),
    ] = None
    max_tool_rounds: Annotated[
        int | None,
        Meta(description="Most turns of the model whose calls run on the server; 0: none."),
    ] = None

    def refuse_unserved(self) -> None:
        """Raise `InvalidField` for a field of which the protocol offers nothing."""
        for name, reason in self.unserved.items():
            value = getattr(self, name)
            if not (value is None or value is False or value == []):
                raise InvalidField(name, reason)

    def plan(self, hosted: Hosted, streams: bool, functions: Sequence[Function]) -> AgentPlan | None:
        """How tools of this server run for the request; None where none do.

        `hosted` has what messages and tools ask for, `functions` are those of the client. Raises `InvalidField` for a
        feature that this server does not offer, and for a permission that cannot hold.
        """
        # PERF: most requests say nothing of tools of the server.
        if not (functions or hosted.features or hosted.inputs) and _asked_of_server(self) == _NOTHING_ASKED:
            return None
        for name, feature in (("enable_shell", SHELL), ("enable_code_execution", CODE)):
            if getattr(self, name) not in (None, False):
                hosted.use(feature, name, name)
        if self.searches_by_field and self.web_search_options not in (None, False, []):
            name = "web_search_options"
            hosted.use_search(self.web_search_options, name, name, name)
        for name in ("agent_permission", "code_execution_permission"):
            value = getattr(self, name)
            if value is not None and value not in PERMISSIONS:
                raise InvalidField(name, f"{value[:64]!a} is not one of {', '.join(PERMISSIONS)}")
        return hosted.plan(
            permission=self.agent_permission or self.code_execution_permission,
            max_rounds=self.max_tool_rounds,
            session_id=self.session_id,
            requested=self.files,
            streams=streams,
            functions=[function.name for function in functions],
        )


_ASKED = (
    *("web_search_options", "enable_shell", "enable_code_execution", "agent_permission"),
    *("code_execution_permission", "session_id", "files", "max_tool_rounds"),
)
_asked_of_server, _NOTHING_ASKED = attrgetter(*_ASKED), (None,) * len(_ASKED)


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
