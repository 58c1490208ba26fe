"""The pages of chat, Responses and Messages have every field of their requests, each with what happens to it.

Parameters of the SDKs of OpenAI and Anthropic stand there as well: none of them is ignored without a word.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import orjson
import pytest

from frontend.generation.errors import InvalidField
from frontend.protocols.chat import chat, completions
from frontend.protocols.messages import requests as message_requests
from frontend.protocols.responses import requests
from ipc.settings import Limits
from tools.source_tree import ROOT

_ROW = re.compile(r"^\| (`[^|]+`) \| (supported|checked|refused|ignored) \|", re.MULTILINE)
_HI = [{"role": "user", "content": "hi"}]
_PAGES = [
    ("chat.md", "Fields of chat", chat.ChatRequest, chat.parse, {"messages": _HI}),
    (
        "chat.md",
        "Fields of completions",
        completions.CompletionRequest,
        completions.parse,
        {"prompt": "hi"},
    ),
    (
        "messages.md",
        "Fields",
        message_requests.MessagesRequest,
        message_requests.parse,
        {"messages": _HI},
    ),
    ("responses.md", "Fields", requests.ResponseRequest, requests.parse, {"input": "hi"}),
]


def _fates(page: str, section: str) -> dict[str, str]:
    """What happens to each field, by the first table of a section of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [table] = re.findall(rf"^## {section}$.*?^\| field (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    told: dict[str, str] = {}
    for names, fate in _ROW.findall(table):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in told, f"{page}: {name} has two rows"
            told[name] = fate
    return told


@pytest.mark.parametrize(("page", "section", "kind", "parse", "least"), _PAGES)
def test_a_page_has_each_field_of_its_request(
    page: str,
    section: str,
    kind: type[msgspec.Struct],
    parse: Callable[[bytes, Limits], Any],
    least: dict[str, Any],
) -> None:
    fates = _fates(page, section)
    read = {field.name for field in msgspec.structs.fields(kind)}
    assert read - set(fates) == set()
    for name, fate in fates.items():
        if fate == "ignored":
            value: Any = "x" if name in read else {"any": [1]}
            parse(orjson.dumps(least | {name: value}), Limits())
        else:
            assert name in read, "a field that is not read is ignored"
        if fate == "refused":
            with pytest.raises(InvalidField, match=rf"^{name}: "):
                parse(orjson.dumps(least | {name: [{"type": "function", "name": "f"}]}), Limits())


@pytest.mark.parametrize(
    ("page", "section", "parameters"),
    [
        (
            "chat.md",
            "Fields of chat",
            "openai.types.chat.completion_create_params.CompletionCreateParamsBase",
        ),
        (
            "chat.md",
            "Fields of completions",
            "openai.types.completion_create_params.CompletionCreateParamsBase",
        ),
        ("messages.md", "Fields", "anthropic.types.beta.message_create_params.MessageCreateParamsBase"),
        ("responses.md", "Fields", "openai.types.responses.response_create_params.ResponseCreateParamsBase"),
    ],
)
def test_a_page_has_each_parameter_of_the_sdk(page: str, section: str, parameters: str) -> None:
    assert set(get_type_hints(pkgutil.resolve_name(parameters))) - set(_fates(page, section)) == set()
