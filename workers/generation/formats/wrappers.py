"""How each family of models writes tool calls: what stands around name and arguments, for grammars that force calls.

Arguments are JSON in every wrapper, since a grammar can hold JSON alone to a schema. The parsers of formats with a
notation of their own for arguments take JSON in the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.generation.formats.tags import Tags


class Wrapper(NamedTuple):
    """The texts around calls; marks in them are tokens where the tokenizer has such tokens.

    The calls of an answer are `opened`, calls with `joined` between two of them, and `closed`. A call is `begins`, the
    name, `between`, the arguments, and `ends`. All calls begin with `mark`; an answer is a call from its first
    character where `mark` is empty.
    """

    mark: str
    begins: str
    between: str
    ends: str
    joined: str = ""
    opened: str = ""
    closed: str = ""


_REASONING = ("reasoning_content", "thinking", "reasoning")
_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '
HARMONY = Wrapper("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")
_WRAPPERS = {
    "json": Wrapper("", _NAME, _ARGUMENTS, "}", "\n"),
    "qwen": Wrapper("<tool_call>", f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>", "\n"),
    "qwen_xml": Wrapper("<tool_call>", "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n"),
    "llama": Wrapper("", _NAME, _PARAMETERS, "}", "; "),
    "mistral": Wrapper("[TOOL_CALLS]", _NAME, _ARGUMENTS, "}", ", ", "[TOOL_CALLS] [", "]"),
    "deepseek": Wrapper(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "gemma4": Wrapper("<|tool_call>", "<|tool_call>call:", "", "<tool_call|>"),
    "gemma": Wrapper("", _NAME, _PARAMETERS, "}", "\n"),
    "phi4": Wrapper("<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "granite": Wrapper("<|tool_call|>", _NAME, _ARGUMENTS, "}", ", ", "<|tool_call|>[", "]"),
    "python": Wrapper(
        "<function_calls>", _NAME, _ARGUMENTS, "}", ", ", "<function_calls>[", "]</function_calls>"
    ),
    "harmony": HARMONY,
}
_VARIANTS = {
    "mistral": ("[ARGS]", Wrapper("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "")),
    "deepseek": (
        "```json",
        _WRAPPERS["deepseek"]._replace(
            begins="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            between="\n```json\n",
            ends="\n```<｜tool▁call▁end｜>",
            joined="\n",
        ),
    ),
}
"""Other wrappers of a format, each with the text that tells it in a chat template."""


def wrapper_of(name: str, template: str) -> Wrapper | None:
    """The wrapper of a format by name and by the text of the chat template; None where the format has no calls."""
    told, variant = _VARIANTS.get(name, ("", None))
    return variant if variant is not None and told in template else _WRAPPERS.get(name)


def templated_wrapper(template: Any) -> Wrapper | None:
    """The wrapper that a response template describes; None for a template whose calls are no JSON between marks."""
    field = _field(template, "tool_calls")
    tags = _tags(field)
    if tags is None or field.get("content") != "json":
        return None
    if field.get("transform") != {"type": "function", "function": "{content}"}:
        return None
    return Wrapper(tags.opened, f"{tags.opened}\n{_NAME}", _ARGUMENTS, f"}}\n{tags.closed}", "\n")


def templated_tags(template: Any) -> Tags | None:
    """The marks around reasoning that a response template describes."""
    return next((tags for name in _REASONING if (tags := _tags(_field(template, name)))), None)


def _field(template: Any, name: str) -> Mapping[str, Any]:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else {}


def _tags(field: Mapping[str, Any]) -> Tags | None:
    opened, closed = field.get("open"), field.get("close")
    if not isinstance(opened, str) or not isinstance(closed, str):
        return None
    return Tags(opened, closed) if opened and closed else None
