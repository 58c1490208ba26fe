"""Requests of the form of Anthropic: what they ask for, and what is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from frontend.generation import protocol
from frontend.generation.errors import InvalidField
from frontend.protocols.messages.requests import MessagesPlan, parse, parse_count
from ipc.errors import BodyTooLarge, Forbidden, InputTooLong, ModelNotFound, QueueFull, Unauthenticated
from ipc.settings import Limits
from ipc.wire.messages import Grammar

_HI = [{"role": "user", "content": "hi"}]
_TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object", "properties": {"a": {}}}}


def plan_of(**fields: Any) -> MessagesPlan:
    """The plan of a small conversation with further fields."""
    return parse(orjson.dumps({"messages": _HI} | fields), Limits())


def messages_of(*messages: Any, **fields: Any) -> Any:
    """The messages for templates."""
    return plan_of(messages=list(messages), **fields).call.messages


def refused(**fields: Any) -> str:
    """The field that is refused."""
    with pytest.raises(InvalidField) as caught:
        plan_of(**fields)
    assert caught.value.message.startswith(caught.value.field)
    assert protocol.status_of(caught.value) == 400
    return caught.value.field


_CALLED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def _user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}, "citations": None}


def test_plain_fields_reach_the_call() -> None:
    plan = plan_of(
        model="m",
        max_tokens=7,
        stop_sequences=["x", "y"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        logit_bias={"5": 1},
        stream=True,
        truncate_sequence=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        unknown=[1],
    )
    call = plan.call
    assert (plan.model, plan.streams, plan.has_logprobs) == ("m", True, False)
    assert (call.ending.max_tokens, call.ending.stop) == (7, ["x", "y"])
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.logit_bias, call.truncate, call.counts_only, call.n) == ({5: 1.0}, True, False, 1)


def test_the_system_prompt_is_the_first_message() -> None:
    blocks = [_text("Be brief."), _text("Be kind.")]
    told = {"role": "system", "content": "Be brief. Be kind."}
    assert messages_of(*_HI, system=blocks) == [told, *_HI]
    assert messages_of(*_HI, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(*_HI, system="") == _HI


def test_blocks_become_messages_and_calls() -> None:
    told = messages_of(
        _user(_text("a"), _text("b")),
        _assistant(
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            _text("I call."),
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ),
        _user(
            _text("and now?"),
            {"type": "tool_result", "tool_use_id": "c1", "content": "one", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c2"},
        ),
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert told == [
        {"role": "user", "content": "a b"},
        {
            "role": "assistant",
            "content": "I call.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "", "tool_call_id": "c2", "name": "g"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_message_of_calls_alone_has_no_text_and_one_of_thoughts_alone_stays() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    [said, thought, _] = messages_of(
        _assistant(call), _assistant({"type": "thinking", "thinking": "hm"}), *_HI
    )
    assert said["content"] is None
    assert thought == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([_text("a"), _text("b")], "a b"),
        ([{"type": "document", "x": 1}], '{"type":"document","x":1}'),
        (["plain", 5], "plain 5"),
        ({"rows": [1, 2]}, '{"rows":[1,2]}'),
        (17, "17"),
    ],
)
def test_what_a_tool_gives_becomes_text(content: Any, text: str) -> None:
    [told] = messages_of(_user({"type": "tool_result", "tool_use_id": "c", "content": content}))
    assert told == {"role": "tool", "content": text, "tool_call_id": "c"}


_PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "system", "content": [{"type": "image"}]}, "messages[0].content[0].type"),
        (_user("bare"), "messages[0].content[0].type"),
        (_user({"text": "x"}), "messages[0].content[0].type"),
        (_user({"type": "text"}), "messages[0].content[0].text"),
        (_user({"type": "image", "source": {**_PNG, "data": "?"}}), "messages[0].content[0].source.data"),
        (
            _user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}),
            "messages[0].content[0].content[0].source.type",
        ),
        (_user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (_user({"type": "search_result"}), "messages[0].content[0].type"),
        (
            _user({"type": "tool_use", "id": "c", "name": "f", "input": {}}),
            "messages[0].content[0].type",
        ),
        (_user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (_user({"type": "text", "text": "a\0"}), "messages[0].content"),
        (_assistant({"type": "image", "source": _PNG}), "messages[0].content[0].type"),
        (
            _assistant({"type": "tool_result", "tool_use_id": "c", "content": "x"}),
            "messages[0].content[0].type",
        ),
        (_assistant({"type": "tool_use", "name": "f", "input": {}}), "messages[0].content[0].id"),
        (_assistant({"type": "tool_use", "id": "c", "input": {}}), "messages[0].content[0].name"),
        (
            _assistant({"type": "tool_use", "id": "c", "name": "f", "input": "{}"}),
            "messages[0].content[0].input",
        ),
        (
            _assistant(*({"type": "tool_use", "id": "c", "name": "f", "input": {}} for _ in range(129))),
            "messages[0].content",
        ),
    ],
)
def test_a_bad_message_names_its_place(message: Any, field: str) -> None:
    assert refused(messages=[message]) == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 10_000}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking.type"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"response_format": {"type": "text"}, "grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"container": {"skills": [{"type": "custom", "skill_id": "s"}]}}, "container.skills"),
        ({"enable_code_execution": True}, "enable_code_execution"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"mcp_servers": [{"type": "url", "url": "https://x.example"}]}, "mcp_servers"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"thread": {"type": "continue"}}, "thread"),
        ({"agent_permission": "ask"}, "agent_permission"),
        ({"files": [{"name": "a"}]}, "files"),
        ({"max_tool_rounds": 2}, "max_tool_rounds"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


def test_tools_keep_their_schema_and_strictness() -> None:
    used = plan_of(tools=[_TOOL, {"type": "custom", "name": "g", "strict": True}]).call.tools
    assert used is not None
    nested = {"name": "f", "description": "does", "parameters": _TOOL["input_schema"]}
    assert used.functions[0] == {"type": "function", "function": nested}
    assert (used.choice, used.strict, used.parallel) == ("auto", ["g"], True)


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, "auto", ""),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", ""),
        ({"type": "any"}, "required", ""),
        ({"type": "tool", "name": "f"}, "named", "f"),
    ],
)
def test_a_choice_of_tools_is_followed(choice: Any, mode: str, name: str) -> None:
    used = plan_of(tools=[_TOOL], tool_choice=choice).call.tools
    assert used is not None
    assert (used.choice, used.name) == (mode, name)


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_parallel_calls_are_switched_off_beside_every_choice(kind: str) -> None:
    for given, parallel in ((True, False), (False, True), (None, True)):
        choice = {"type": kind, "name": "f", "disable_parallel_tool_use": given}
        used = plan_of(tools=[_TOOL], tool_choice=choice).call.tools
        assert used is not None
        assert used.parallel is parallel
    with pytest.raises(InvalidField, match=r"tool_choice\.disable_parallel_tool_use: expected true or false"):
        plan_of(tools=[_TOOL], tool_choice={"type": kind, "name": "f", "disable_parallel_tool_use": 1})


def test_the_choice_of_no_tool_removes_all_of_them() -> None:
    tools = [_TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    assert plan_of(tools=tools, tool_choice={"type": "none"}).call.tools is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "description": 1}]}, "tools[0].description"),
        ({"tools": [{"type": 5, "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]}, "tools[0].type"),
        ({"tools": [{"name": "web_search"}]}, "tools[0].name"),
        ({"tools": [_TOOL, _TOOL]}, "tools[1]"),
        ({"tools": [{"name": f"f{k}"} for k in range(1000)]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "force"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    ],
)
def test_a_bad_tool_is_named(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields) == field


def _system(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **fields}


def _added(**tool: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def _defined(name: Any) -> dict[str, Any]:
    return _added(type="tool_definition", definition={"name": name, "input_schema": {"type": "object"}})


def _again(name: Any) -> dict[str, Any]:
    return _added(type="tool_reference", name=name)


def _removed(name: Any) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ([], ["f"]),
        ([_defined("g")], ["f", "g"]),
        ([_removed("f")], []),
        ([_defined("g"), _removed("f")], ["g"]),
        ([_removed("f"), _removed("f"), _again("f")], ["f"]),
        ([_defined("g"), _removed("g"), _again("g")], ["f", "g"]),
    ],
)
def test_system_messages_change_the_tools(changes: list[Any], offered: list[str]) -> None:
    messages = [*_HI, *(_system(change) for change in changes), *_HI]
    call = plan_of(tools=[_TOOL | {"name": "f"}], messages=messages).call
    assert call.messages == [*_HI, *_HI], "a change of tools says nothing"
    names = [] if call.tools is None else [tool["function"]["name"] for tool in call.tools.functions]
    assert names == offered


def test_a_tool_that_is_defined_again_is_the_newer_one() -> None:
    call = plan_of(
        tools=[_TOOL | {"name": "f"}], messages=[_system(_text("Mind f."), _defined("f")), *_HI]
    ).call
    assert call.tools is not None and len(call.tools.functions) == 1
    assert call.tools.functions[0]["function"] == {"name": "f", "parameters": {"type": "object"}}
    assert (call.messages or [])[0] == {"role": "system", "content": "Mind f."}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (_system(_removed("g")), "messages[0].content[0].tool.name"),
        (_system(_again("g")), "messages[0].content[0].tool.name"),
        (_system(_text("a"), _again(3)), "messages[0].content[1].tool.name"),
        (_system(_defined("no name")), "messages[0].content[0].tool.definition.name"),
        (_system(_added(type="tool_definition")), "messages[0].content[0].tool.definition"),
        (_system(_added(type="mcp_toolset_reference")), "messages[0].content[0].tool.type"),
        (_system({"type": "tool_addition"}), "messages[0].content[0].tool"),
        (
            _system({"type": "tool_removal", "tool": {"type": "tool_definition", "definition": _TOOL}}),
            "messages[0].content[0].tool.type",
        ),
        (_user(_removed("f")), "messages[0].content[0].type"),
        (_system(_text("a"), output_config={"effort": "low"}), "messages[0].output_config"),
        (_system(_text("a"), clear_at="soon"), "messages[0].clear_at"),
        (_user(_text("a")) | {"clear_at": "never"}, "messages[0].clear_at"),
    ],
)
def test_a_bad_change_is_named(message: Any, field: str) -> None:
    assert refused(tools=[_TOOL | {"name": "f"}], messages=[message, *_HI]) == field


def test_more_tools_than_the_limit_cannot_be_added() -> None:
    added = _system(*(_defined(f"f{index}") for index in range(128)))
    assert len(plan_of(messages=[added, *_HI]).call.tools.functions) == 128  # type: ignore[union-attr]
    assert refused(messages=[added, _system(_defined("more")), *_HI]) == "messages[1].content[0]"


def test_a_system_message_may_be_shown_for_one_turn_only() -> None:
    once = _system(_text("Be brief."), clear_at="next_user_message")
    always = _system(_text("Be kind."), clear_at="never")
    shown, kept = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    assert messages_of(once) == [shown]
    assert messages_of(*_HI, once, always) == [*_HI, shown, kept]
    assert messages_of(*_HI, once, always, *_HI) == [*_HI, kept, *_HI]


def test_a_function_may_have_the_name_of_a_tool_of_the_server_if_it_has_a_schema() -> None:
    tool = {"name": "web_search", "input_schema": {"type": "object"}}
    assert plan_of(tools=[tool]).call.tools is not None


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"output_config": {"effort": "low"}},
            {"enable_thinking": True, "reasoning_effort": "low", "reasoning_strength": "low"},
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"enable_thinking": False},
        ),
    ],
)
def test_thinking_becomes_variables_of_the_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert plan_of(**fields).call.variables == variables


def test_the_form_of_an_answer_is_a_grammar() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = Grammar("json_schema", '{"type":"object"}', "output_config.format")
    assert plan_of(output_config={"format": form}).call.grammar == expected
    older = {"type": "json_schema", "schema": {"type": "array"}}
    assert plan_of(output_config={"format": form}, output_format=older).call.grammar == expected
    assert plan_of(output_format=form).call.grammar == Grammar(
        "json_schema", '{"type":"object"}', "output_format"
    )
    plan = plan_of(response_format={"type": "json_schema", "json_schema": form})
    assert plan.call.grammar == Grammar("json_schema", '{"type":"object"}', "response_format")
    assert plan_of(grammar={"type": "regex", "value": "a+"}).call.grammar == Grammar("regex", "a+")


_CONTINUING = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    "content",
    ["{", "It is\n  so", [_text("It is")], [{"type": "thinking", "thinking": "hm"}, _text("It is")]],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [_TOOL]},
        {"tools": [_TOOL], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "disabled"}},
        {"grammar": {"type": "regex", "value": "a"}},
        {"output_config": {"format": {"type": "text"}, "effort": "low"}},
        {"stream": True},
    ],
)
def test_a_last_message_of_the_assistant_is_continued(content: Any, fields: dict[str, Any]) -> None:
    asked = {"messages": [*_HI, {"role": "assistant", "content": content}], **fields}
    call = plan_of(**asked).call
    assert call.variables.items() >= _CONTINUING.items()
    assert [message["role"] for message in call.messages or ()] == ["user", "assistant"]
    assert parse_count(orjson.dumps(asked), Limits()).call.variables == call.variables


@pytest.mark.parametrize("content", ["", [], [_text("")], [{"type": "thinking", "thinking": "hm"}]])
def test_an_empty_last_message_of_the_assistant_is_as_if_absent(content: Any) -> None:
    messages = [*_HI, {"role": "assistant", "content": content}]
    call = plan_of(messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}).call
    assert call.messages == _HI and "continue_final_message" not in call.variables
    inner = plan_of(messages=[*messages, *_HI]).call
    assert [message["role"] for message in inner.messages or ()] == ["user", "assistant", "user"]


_SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("content", "fields", "field", "words"),
    [
        ("It is ", {}, "messages", "final assistant content cannot end with trailing whitespace"),
        ("\n", {}, "messages", "trailing whitespace"),
        ([_text("It is"), _text(" ")], {}, "messages", "trailing whitespace"),
        ([_CALLED], {}, "messages[1].content", "send its tool_result next"),
        ([_text("It is"), _CALLED], {}, "messages[1].content", "send its tool_result next"),
        ("It is", {"thinking": {"type": "enabled"}}, "messages[1].content", "with thinking"),
        ("It is", {"thinking": {"type": "adaptive"}}, "messages[1].content", "with thinking"),
        ("It is", {"enable_thinking": True}, "messages[1].content", "with thinking"),
        ("{", {"output_config": {"format": _SCHEMA}}, "output_config.format", "not offered where the answer"),
        ("{", {"output_format": _SCHEMA}, "output_format", "not offered where the answer"),
        (
            "{",
            {"response_format": {"type": "json_object"}},
            "response_format",
            "not offered where the answer",
        ),
    ],
)
def test_a_last_message_that_anthropic_would_not_continue_is_refused(
    content: Any, fields: dict[str, Any], field: str, words: str
) -> None:
    messages = [*_HI, {"role": "assistant", "content": content}]
    with pytest.raises(InvalidField, match=words) as caught:
        plan_of(messages=messages, **fields)
    assert caught.value.field == field and protocol.status_of(caught.value) == 400
    assert plan_of(messages=[*messages, *_HI], **fields)


def test_a_count_asks_for_the_same_prompt_and_generates_nothing() -> None:
    body = orjson.dumps({"messages": _HI, "tools": [_TOOL], "stream": True})
    asked, counted = parse(body, Limits()).call, parse_count(body, Limits())
    assert (counted.call.messages, counted.call.tools) == (asked.messages, asked.tools)
    assert (counted.call.counts_only, counted.streams) == (True, False)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidField("f", "no"), 400, "invalid_request_error"),
        (InputTooLong("no"), 400, "invalid_request_error"),
        (Unauthenticated("no"), 401, "authentication_error"),
        (Forbidden("no"), 403, "permission_error"),
        (ModelNotFound("no"), 404, "not_found_error"),
        (BodyTooLarge("no"), 413, "request_too_large"),
        (QueueFull("no"), 503, "overloaded_error"),
    ],
)
def test_errors_have_the_form_of_anthropic(error: Any, status: int, kind: str) -> None:
    code, body, headers = protocol.render_anthropic(error)
    told = "request body too large" if status == 413 else error.message
    assert (code, body) == (status, {"type": "error", "error": {"type": kind, "message": told}})
    assert ("Retry-After" in headers) == (status == 503)
