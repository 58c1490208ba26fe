"""Parsing that all protocols of generated text share: sampling, endings, grammars, tools, reasoning, conversations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.generation import conversation, errors, requests
from frontend.generation import nested as grammars
from frontend.generation.contents import text_of
from frontend.generation.conversation import Conversation, calls_of
from frontend.generation.fields import (
    HostedFields,
    SamplingFields,
    choices_of,
    ending_of,
    sampling_of,
    template_variables,
    variables_of,
)
from frontend.generation.hosted import Hosted
from frontend.generation.requests import find_generator
from ipc.catalog.entries import AdapterSource, Catalog, ModelEntry, OutputSpec
from ipc.errors import BodyTooLarge, InvalidInput, ModelNotFound, QueueFull
from ipc.settings import Limits, Settings
from ipc.wire.messages import Grammar, Sampling


class Example(SamplingFields, kw_only=True):
    """A body with an alias."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: list[dict[str, Any]]


_ALIASES = (("max_tokens", "max_completion_tokens"),)


def _decoded(body: bytes) -> Example:
    return requests.decode(body, Example, 100, _ALIASES)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"messages": "\\ud800"}', b'{"messages": [{"a": ' + b"[" * 100_000, b'{"messages": [}'],
)
def test_a_body_that_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(errors.MalformedBody) as caught:
        _decoded(body)
    assert errors.status_of(caught.value) == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"[]", "body"),
        (b"{}", "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [], "temperature": "warm"}', "temperature"),
        (b'{"messages": [], "top_k": 1.5}', "top_k"),
        (b'{"messages": [], "logit_bias": {"1": "x"}}', "logit_bias[...]"),
        (b'{"messages": [], "temperature": 1e999}', "temperature"),
        (b'{"messages": [], "max_tokens": 1, "max_completion_tokens": 1}', "max_completion_tokens"),
    ],
)
def test_a_body_of_the_wrong_shape_names_its_field(body: bytes, field: str) -> None:
    with pytest.raises(errors.InvalidField) as caught:
        _decoded(body)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
    assert errors.status_of(caught.value) == 422


def test_unknown_fields_are_ignored_and_null_equals_absent() -> None:
    request = _decoded(b'{"messages": [], "user": {"x": 1}, "max_tokens": null, "max_completion_tokens": 3}')
    assert (request.max_tokens, request.max_completion_tokens) == (None, 3)


@pytest.mark.parametrize(
    "given", [None, "", "text/plain", "application/xml", "multipart/form-data; boundary=x"]
)
def test_another_content_type_is_refused(given: str | None) -> None:
    with pytest.raises(errors.WrongContentType):
        requests.check_content_type(given)


def test_json_has_parameters_and_suffixes() -> None:
    requests.check_content_type("Application/JSON; charset=utf-8")
    requests.check_content_type("application/vnd.api+json")


def test_absent_sampling_is_greedy_with_everything_off() -> None:
    assert sampling_of(SamplingFields()) == Sampling()


def test_values_out_of_range_switch_their_filter_off() -> None:
    odd = SamplingFields(
        temperature=-1, top_p=2, min_p=-0.5, top_k=-7, repetition_penalty=0, dry_multiplier=-1, dry_base=-2
    )
    assert sampling_of(odd) == Sampling()


def test_values_at_the_borders_of_the_open_interval_are_off() -> None:
    for value in (0.0, 1.0):
        found = sampling_of(SamplingFields(top_p=value, min_p=value))
        assert (found.top_p, found.min_p) == (1.0, 0.0)


def test_values_that_a_model_cannot_compute_with_are_bounded() -> None:
    found = sampling_of(
        SamplingFields(
            temperature=1e300,
            presence_penalty=-1e300,
            repetition_penalty=1e-300,
            top_k=10**30,
        )
    )
    assert found.temperature == 1e4
    assert found.presence_penalty == -1e5
    assert found.repetition_penalty == 1e-5
    assert found.top_k == 2**31 - 1
    assert sampling_of(SamplingFields(temperature=1e-300)).temperature is None


def test_a_bias_is_by_token_id() -> None:
    assert sampling_of(SamplingFields(logit_bias={"12": -100, "0": 1.5})).logit_bias == {12: -100.0, 0: 1.5}


@pytest.mark.parametrize(
    "bias",
    [{"a": 1}, {"-1": 1}, {"1.5": 1}, {"9" * 11: 1}, {str(2**31): 1}, {"\u0663": 1}, {"1": 101}, {"1": -1e9}],
)
def test_a_bias_for_no_token_or_out_of_range_is_refused(bias: dict[str, float]) -> None:
    with pytest.raises(errors.InvalidField, match="logit_bias"):
        sampling_of(SamplingFields(logit_bias=bias))


def test_a_thousand_biases_and_more_are_refused() -> None:
    with pytest.raises(errors.InvalidField, match="1025 given, the limit is 1024"):
        sampling_of(SamplingFields(logit_bias={str(k): 1.0 for k in range(1025)}))


def test_an_ending_has_texts_once_and_a_bounded_number_of_tokens() -> None:
    found = ending_of(10**20, ["b", "a", "b"])
    assert found.stop == ["b", "a"]
    assert found.max_tokens == 2**31 - 1
    assert ending_of(None, "x").stop == ["x"]


@pytest.mark.parametrize(
    ("limit", "stop", "field"),
    [
        (0, None, "max_tokens"),
        (-1, None, "max_tokens"),
        (1, "", "stop"),
        (1, ["a", ""], r"stop\[1\]"),
        (1, ["x"] * 10_000, "stop: 10000 given, the limit is 64"),
        (1, "é" * 600, "stop: 1200 bytes"),
    ],
)
def test_an_ending_that_cannot_be_is_refused(limit: int, stop: Any, field: str) -> None:
    with pytest.raises(errors.InvalidField, match=field):
        ending_of(limit, stop)


def test_choices_are_bounded() -> None:
    assert choices_of(None) == 1
    for count in (0, -1, 129):
        with pytest.raises(errors.InvalidField, match="n:"):
            choices_of(count)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, ("json_object", "")),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, ("json_object", "")),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
            ("json_schema", '{"type":"null"}'),
        ),
        ({"type": "json_schema", "name": "x", "schema": {}}, ("json_schema", "{}")),
    ],
)
def test_a_response_format_becomes_a_grammar_that_names_its_field(
    given: Any, grammar: tuple[str, str] | None
) -> None:
    for field in ("response_format", "text.format"):
        expected = None if grammar is None else Grammar(*grammar, field)
        assert grammars.grammar_of(given, None, field) == expected


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "regex", "value": "a+"}, Grammar("regex", "a+")),
        ({"type": "lark", "value": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"type": "json_schema", "value": '{"type": "null"}'}, Grammar("json_schema", '{"type":"null"}')),
        ({"type": "json_schema", "value": {"type": "null"}}, Grammar("json_schema", '{"type":"null"}')),
        ({"type": "llguidance", "value": {"grammars": []}}, Grammar("llguidance", '{"grammars":[]}')),
    ],
)
def test_a_grammar_of_each_kind_is_taken(given: Any, grammar: Grammar) -> None:
    assert grammars.grammar_of(None, given) == grammar


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("regex", "grammar"),
        ({}, "grammar.type"),
        ({"type": "gbnf", "value": "x"}, "grammar.type"),
        ({"type": "regex", "value": 1}, "grammar.value"),
        ({"type": "regex"}, "grammar.value"),
        ({"type": "json_schema", "value": "{"}, "grammar.value"),
        ({"type": "json_schema", "value": [1]}, "grammar.value"),
        ({"type": "llguidance", "value": "[]"}, "grammar.value"),
        ({"type": "regex", "value": "a" * (256 << 10) + "b"}, "grammar.value"),
    ],
)
def test_a_bad_grammar_names_its_field(given: Any, field: str) -> None:
    with pytest.raises(errors.InvalidField) as caught:
        grammars.grammar_of(None, given)
    assert caught.value.field == field


def test_a_grammar_excludes_a_response_format() -> None:
    with pytest.raises(errors.InvalidField, match="together"):
        grammars.grammar_of({"type": "text"}, {"type": "regex", "value": "a"})


_FLAT = {"type": "function", "name": "flat", "parameters": {"type": "object"}, "strict": True}
_NESTED = {"type": "function", "function": {"name": "nested", "description": "d"}}


def test_functions_become_nested() -> None:
    flat, nested = conversation.functions_of([_FLAT, _NESTED])
    assert flat.definition == {
        "type": "function",
        "function": {"name": "flat", "parameters": {"type": "object"}},
    }
    assert nested.definition["function"]["parameters"] == {"type": "object", "properties": {}}
    used = conversation.tool_use([flat, nested], conversation.Choice(), None)
    assert used is not None
    assert (used.strict, used.parallel, used.choice) == (["flat"], True, "auto")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ("f", "tools[0]"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "function": []}, "tools[0].function"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a" * 129}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a", "parameters": "x"}}, "tools[0].function.parameters"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "tools[0].type"),
        ({"type": "teleport"}, "tools[0].type"),
        ({"name": "a"}, "tools[0].type"),
    ],
)
def test_a_bad_tool_names_its_field(tool: Any, field: str) -> None:
    with pytest.raises(errors.InvalidField) as caught:
        conversation.functions_of([tool])
    assert caught.value.field == field


def test_a_thousand_functions_and_repeated_names_are_refused() -> None:
    many = [{"type": "function", "name": f"f{k}"} for k in range(1000)]
    with pytest.raises(errors.InvalidField, match="1000 given, the limit is 128"):
        conversation.functions_of(many)
    with pytest.raises(errors.InvalidField, match="declared twice"):
        conversation.tool_use(conversation.functions_of([_FLAT, _FLAT]), conversation.Choice(), None)


def test_the_choice_of_none_shows_the_model_no_functions_after_they_were_checked() -> None:
    functions = conversation.functions_of([_FLAT])
    assert conversation.tool_use(functions, conversation.Choice("none"), None) is None
    assert conversation.tool_use(functions, conversation.Choice("auto"), None) is not None
    with pytest.raises(errors.InvalidField, match="declared twice"):
        conversation.tool_use([*functions, *functions], conversation.Choice("none"), None)


def test_functions_of_many_bytes_are_refused() -> None:
    large = {"type": "function", "name": "f", "parameters": {"enum": ["x" * 1000] * 1100}}
    with pytest.raises(errors.InvalidField, match=r"tools: .* bytes of functions"):
        conversation.tool_use(conversation.functions_of([large]), conversation.Choice(), None)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, conversation.Choice()),
        ("none", conversation.Choice("none")),
        ("auto", conversation.Choice("auto")),
        ("required", conversation.Choice("required")),
        ({"type": "function", "function": {"name": "a"}}, conversation.Choice("named", "a")),
        ({"type": "function", "name": "b"}, conversation.Choice("named", "b")),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "a"}]},
            },
            conversation.Choice("auto", "", ("a",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "b"}}],
            },
            conversation.Choice("required", "", ("b",)),
        ),
    ],
)
def test_a_tool_choice_of_each_form_is_taken(given: Any, choice: conversation.Choice) -> None:
    assert conversation.choice_of(given, ["a", "b"]) == choice


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("any", ["a"]),
        (1, ["a"]),
        ("required", []),
        ({"type": "function", "name": "c"}, ["a"]),
        ({"type": "function"}, ["a"]),
        ({"type": "web_search"}, ["a"]),
        ({}, ["a"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, ["a"]),
        ({"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "a"}]}, ["a"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "c"}]}, ["a"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}]}, ["a"]),
    ],
)
def test_a_bad_tool_choice_is_refused(given: Any, names: list[str]) -> None:
    with pytest.raises(errors.InvalidField, match="tool_choice"):
        conversation.choice_of(given, names)


def test_an_effort_switches_thinking() -> None:
    assert variables_of(None, None) == {}
    assert variables_of(True, None) == {"enable_thinking": True}
    assert variables_of(None, " High ")["reasoning_effort"] == "high"
    assert variables_of(None, "off")["enable_thinking"] is False
    assert variables_of(False, "none") == variables_of(None, "off")
    assert template_variables(None, None, {"enable_thinking": False, "x": 1}) == {"enable_thinking": False}


@pytest.mark.parametrize(("thinking", "effort"), [(True, "off"), (False, "low"), (None, "huge"), (None, "")])
def test_an_effort_that_contradicts_or_is_unknown_is_refused(thinking: bool | None, effort: str) -> None:
    with pytest.raises(errors.InvalidField, match="reasoning_effort"):
        variables_of(thinking, effort)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"web_search_options": {}}, "web_search_options"),
        ({"enable_shell": True}, "enable_shell"),
        ({"files": [{"name": "a"}]}, "files"),
        ({"max_tool_rounds": 2}, "max_tool_rounds"),
        ({"agent_permission": "maybe"}, "agent_permission"),
        ({"agent_permission": "ask"}, "agent_permission"),
        ({"code_execution_permission": "ask"}, "agent_permission"),
    ],
)
def test_what_needs_tools_on_the_server_is_refused(fields: dict[str, Any], refused: str) -> None:
    with pytest.raises(errors.InvalidField) as caught:
        request = msgspec.convert(fields, HostedFields)
        request.refuse_unserved()
        request.plan(Hosted(), streams=False, functions=())
    assert caught.value.field == refused


def test_what_matters_only_with_tools_on_the_server_is_accepted() -> None:
    fields = {"max_tool_rounds": 0, "session_id": "s", "enable_shell": False, "files": []}
    assert msgspec.convert(fields, HostedFields).plan(Hosted(), streams=False, functions=()) is None
    assert (
        msgspec.convert({"agent_permission": "ask"}, HostedFields).plan(Hosted(), streams=True, functions=())
        is None
    )
    both = {"agent_permission": "auto", "code_execution_permission": "ask"}
    assert msgspec.convert(both, HostedFields).plan(Hosted(), streams=False, functions=()) is None


def test_parts_of_text_are_joined_with_a_space() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"text": "c"}]
    assert text_of(parts, "messages[0].content") == "a b c"
    assert text_of(None, "x") is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "images are not taken here"),
        ({"type": "image", "image": "https://x/y.png"}, "expected 'image_url' or 'input_image'"),
        ({"type": "audio_url", "audio_url": "data:audio/wav;base64,"}, "no model here takes audio"),
        ({"type": "video_url", "video_url": {}}, "no model here takes video"),
        ({"type": "file", "file": {"file_id": "f"}}, "files are not taken here"),
        ({"type": "file_url", "file_url": {}}, "not accepted"),
        ({"type": "smell"}, "no known kind"),
        ({"type": 1}, "expected a string"),
        ({"type": "text"}, "expected a string"),
        (1, "expected an object"),
    ],
)
def test_a_part_that_is_no_text_is_refused(part: Any, message: str) -> None:
    with pytest.raises(errors.InvalidField, match=message) as caught:
        text_of([part], "messages[3].content")
    assert caught.value.field.startswith("messages[3].content[0]")


def test_a_conversation_has_arguments_as_objects() -> None:
    talk = Conversation(Limits())
    talk.add("developer", "be brief", "messages[0]")
    given = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    talk.add("assistant", None, "messages[1]", calls=calls_of(talk, given, "messages[1].tool_calls"))
    talk.add("tool", "2", "messages[2]", call_id="1")
    assert talk.finished() == [
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
    ]


def test_an_answer_of_a_tool_has_the_name_of_its_function() -> None:
    talk = Conversation(Limits())
    given = [{"id": "1", "function": {"name": "f"}}, {"id": "2", "function": {"name": "g"}}]
    talk.add("assistant", None, "messages[0]", calls=calls_of(talk, given, "messages[0].tool_calls"))
    for call_id, name in (("2", None), ("1", "own"), ("3", None), (None, None)):
        talk.add("tool", "x", "messages[1]", call_id=call_id, name=name)
    assert [message.get("name") for message in talk.finished()[1:]] == ["g", "own", None, None]


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", [1], '"\\ud800"'])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    given = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(errors.InvalidField, match=r"tool_calls\[0\].function.arguments"):
        calls_of(Conversation(Limits()), given, "messages[0].tool_calls")


def test_a_conversation_refuses_what_no_template_can_take() -> None:
    talk = Conversation(Limits(max_text_bytes=8, max_items=2))
    with pytest.raises(errors.InvalidField, match="may not be empty"):
        talk.finished()
    for role, text, message in (
        ("king", "x", "not one of"),
        ("user", None, "absent"),
        ("user", "a\0b", "NUL"),
    ):
        with pytest.raises(errors.InvalidField, match=message):
            talk.add(role, text, "messages[0]")
    talk.add("user", "1234", "messages[0]")
    with pytest.raises(errors.InvalidField, match=r"messages\[1\].content: more than 8 bytes"):
        talk.add("user", "ééé", "messages[1]")
    crowded = Conversation(Limits(max_items=1))
    crowded.add("user", "", "messages[0]")
    with pytest.raises(errors.InvalidField, match="more than 1 messages"):
        crowded.add("user", "", "messages[1]")


def _entry(name: str, *outputs: str) -> ModelEntry:
    return ModelEntry(name, AdapterSource(), outputs={each: OutputSpec() for each in outputs})


def _known(*entries: ModelEntry) -> Any:
    """A directory of models that are known at once."""
    catalog = Catalog(entries)
    return SimpleNamespace(catalog=catalog, find=catalog.find)


def test_a_request_without_a_model_means_the_only_one_that_generates() -> None:
    known = _known(_entry("e5", "dense"), _entry("tiny", "chat"))
    for name in (None, "", "default", "tiny"):
        assert find_generator(name, known, Settings()).id == "tiny"
    with pytest.raises(InvalidInput, match="generates no text"):
        find_generator("e5", known, Settings())
    with pytest.raises(ModelNotFound, match=r"tiny.*or 'default'"):
        find_generator("other", known, Settings())


def test_a_default_among_several_has_to_be_chosen() -> None:
    known = _known(_entry("a", "chat"), _entry("b", "chat"))
    with pytest.raises(ModelNotFound, match="several could be meant"):
        find_generator(None, known, Settings())
    chosen = msgspec.convert({"generation": {"default_model": "b"}}, Settings)
    assert find_generator("default", known, chosen).id == "b"


def test_errors_have_the_openai_form() -> None:
    status, body, headers = errors.render(errors.InvalidField("top_logprobs", "21 is not in 0 to 20"))
    inner = {
        "message": "top_logprobs: 21 is not in 0 to 20",
        "type": "invalid_request_error",
        "param": "top_logprobs",
        "code": None,
    }
    assert (status, body, headers) == (422, {"message": inner["message"], "error": inner}, {})
    assert errors.render(InvalidInput("grammar: line 1"))[0] == 422
    assert errors.render(errors.MalformedBody("x"))[0] == 400
    assert errors.render(ModelNotFound("x"))[1]["error"]["code"] == "model_not_found"


def test_errors_that_pass_have_a_retry_after() -> None:
    status, body, headers = errors.render(QueueFull("full", retry_after_s=3))
    assert (status, headers["Retry-After"], body["error"]["type"]) == (503, "3", "server_error")
    status, body, _ = errors.render(BodyTooLarge("body: 9 bytes"))
    assert (status, body["message"]) == (413, "request body too large")
