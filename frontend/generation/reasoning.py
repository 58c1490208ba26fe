"""Whether and how hard a model thinks first: `enable_thinking` and the reasoning effort, as variables of templates.

1. Thinking has three states: on, off, and None for the template's own default.
2. An effort is a level, or off; it also switches thinking. Both together must agree.
"""

from __future__ import annotations

from typing import Annotated, Any

from frontend.generation.errors import InvalidField
from frontend.http.fields import one_of

LEVELS = ("low", "medium", "high", "xhigh", "max")
_ALIASES = {"none": "off", "minimal": "low"}
EFFORTS = ("off", *_ALIASES, *LEVELS)
"""What requests may say, in letters of either case."""
Effort = Annotated[str | None, one_of(EFFORTS)]


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
    told = level if on else "none"
    return {"enable_thinking": on, "reasoning_effort": told, "reasoning_strength": told}


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
