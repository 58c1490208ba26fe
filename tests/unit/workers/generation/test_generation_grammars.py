"""Grammars: whatever a model prefers, answers have the form that the request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.wire.messages import GenerateCall, Grammar, ToolUse
from ipc.wire.streams import CALL_ENDED, TEXT
from tests.harness.guided_model import Answer, Model
from tests.tiny import chat_tokenizers
from workers.generation import grammar_trial
from workers.generation.formats.table import NAMES, Format, detect
from workers.generation.grammar import GrammarFailed, Grammars, Guide, MaskFiller
from workers.generation.request import GenerationRequest
from workers.generation.scheduler import Sequence as Choice
from workers.generation.text import Vocabulary

_CITY = {"enum": ["Paris", "Rome", 'Q"\n']}
_DAYS = {"type": "integer", "minimum": 1, "maximum": 99}


def _function(name: str, properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = _function("get_weather", {"city": _CITY, "days": _DAYS}, ["city"])
ADD = _function("add", {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, ["a"])
NOTE = _function("ns.note-1", {"text": {"type": "string", "maxLength": 6}}, ["text"])
FUNCTIONS = [WEATHER, ADD, NOTE]
SCHEMA = {
    "type": "object",
    "properties": {"city": _CITY, "days": _DAYS, "tags": ADD["function"]["parameters"]["properties"]["a"]},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value matches a schema of this file, by rules written apart from those of llguidance."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        known = schema.get("properties", {})
        return (
            isinstance(value, dict)
            and set(schema.get("required", ())) <= set(value)
            and all(name in known and _fits(value[name], known[name]) for name in value)
        )
    if schema["type"] == "array":
        return len(value) <= schema["maxItems"] and all(_fits(item, schema["items"]) for item in value)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    kinds: dict[str, type] = {"boolean": bool, "string": str}
    return isinstance(value, kinds[schema["type"]]) and len(str(value)) <= schema.get("maxLength", 9)


@pytest.fixture(scope="module")
def known() -> Any:
    """Models by kind, each made once."""
    made: dict[tuple[str, str], Model] = {}

    def model(kind: str, tool_format: str = "") -> Model:
        if (kind, tool_format) not in made:
            made[kind, tool_format] = Model(kind, tool_format)
        return made[kind, tool_format]

    yield model
    for one in made.values():
        one.grammars.close()


GRAMMARS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "json_object": Grammar("json_object"),
    "regex": Grammar("regex", r"[a-c]{2,5}/[0-9]{3}|é+x"),
    "lark": Grammar("lark", 'start: "(" (start | N) ")"\nN: /[0-9]{1,2}/'),
    "llguidance": Grammar(
        "llguidance",
        json.dumps(
            {
                "grammars": [
                    {"lark_grammar": 'start: "<" @inner ">"'},
                    {"name": "inner", "json_schema": SCHEMA},
                ]
            }
        ),
    ),
}


def _check_text(kind: str, text: str) -> None:
    if kind == "json_schema":
        assert _fits(json.loads(text), SCHEMA)
        assert not re.search(r"\s", text)
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(GRAMMARS["regex"].value, text)
    elif kind == "lark":
        assert re.fullmatch(r"\(+\d{1,2}\)+", text) and text.count("(") == text.count(")")
    else:
        assert _fits(json.loads(text.removeprefix("<").removesuffix(">")), SCHEMA)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_text_has_the_form_of_every_kind_of_grammar(known: Any, kind: str) -> None:
    for seed in range(12):
        answer = known("chatml").answer(GenerateCall(grammar=GRAMMARS[kind]), seed)
        if kind != "json_object" or answer.ended:
            assert answer.ended
            _check_text(kind, answer.said(TEXT))
    for seed in range(8):
        answer = known("qwen3").answer(GenerateCall(grammar=GRAMMARS[kind]), seed)
        if kind != "json_object" or answer.ended:
            assert answer.ended
            _check_text(kind, answer.said(TEXT).lstrip("\n"))
    plain = known("qwen3").answer(GenerateCall(grammar=GRAMMARS[kind], splits=False), 3)
    if plain.ended:
        _check_text(kind, plain.text)


def _strict(choice: str, **fields: Any) -> ToolUse:
    return ToolUse(FUNCTIONS, choice, strict=["get_weather", "add", "ns.note-1"], **fields)


USES = {
    "required": ToolUse(FUNCTIONS, "required"),
    "required once": ToolUse(FUNCTIONS, "required", parallel=False),
    "named": ToolUse(FUNCTIONS, "named", name="ns.note-1"),
    "allowed": ToolUse(FUNCTIONS, "required", allowed=["add", "get_weather"]),
    "strict": _strict("auto"),
    "strict once": _strict("auto", parallel=False),
    "allowed auto": ToolUse(FUNCTIONS, "auto", allowed=["add"]),
}
FORMATS = [
    *((kind, "") for kind in chat_tokenizers.KINDS),
    *(("chatml", name) for name in NAMES if name not in ("none", "template", "json")),
]
"""All kinds of tokenizers with the format of each, and all formats over a tokenizer without their tokens."""


def _check_calls(answer: Answer, use: ToolUse) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in FUNCTIONS}
    names = [use.name] if use.choice == "named" else use.allowed or list(schemas)
    for name, arguments in answer.calls:
        assert name in names
        assert _fits(arguments, schemas[name])
    if use.choice in ("required", "named"):
        assert answer.ended and answer.calls
        assert answer.segments[-1].kind == CALL_ENDED
    if use.is_single:
        assert len(answer.calls) <= 1
    said = answer.said(TEXT)
    assert '"name": "' not in said and "<tool_call>" not in said


@pytest.mark.sample
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("kind", "tool_format"), FORMATS)
def test_calls_are_right_in_every_format(known: Any, kind: str, tool_format: str, use: str) -> None:
    model = known(kind, tool_format)
    for seed in range(3):
        _check_calls(model.answer(GenerateCall(tools=USES[use]), seed, most=3000), USES[use])


@pytest.mark.parametrize(("kind", "talks"), [("chatml", False), ("qwen3", True)])
def test_a_model_without_reasoning_is_forced_to_call_from_its_first_token(
    kind: str, talks: bool, known: Any
) -> None:
    model = known(kind, "qwen" if kind == "chatml" else "")
    assert (model.form.reasoning is not None) == talks
    for use in (USES["required"], USES["named"]):
        said = [model.answer(GenerateCall(tools=use), seed) for seed in range(3)]
        assert all(answer.calls for answer in said)
        assert any(answer.said(TEXT).strip() for answer in said) == talks


def test_an_answer_may_have_a_grammar_and_calls(known: Any) -> None:
    said, called = 0, 0
    for kind in ("chatml", "qwen3", "deepseek", "harmony"):
        for seed in range(4):
            call = GenerateCall(grammar=GRAMMARS["json_schema"], tools=ToolUse(FUNCTIONS, strict=["add"]))
            answer = known(kind).answer(call, seed)
            if answer.calls:
                called += 1
                _check_calls(answer, USES["strict"])
            elif answer.ended:
                said += 1
                _check_text("json_schema", answer.said(TEXT).strip())
    assert said and called


@pytest.mark.parametrize("is_unigram", [False, True])
def test_pieces_of_sentencepiece_follow_grammars(is_unigram: bool) -> None:
    words = ["\u2581a", "b", "\u2581", "\u2581\u2581", '"', '{"', '":', "Pa", "ris", "days", "\u00e9"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    ids = {piece: number for number, piece in enumerate(pieces)}
    model = (
        models.Unigram(scores, unk_id=0, byte_fallback=True)
        if is_unigram
        else models.BPE(ids, [("Pa", "ris")][:0], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    grammars = Grammars(tokenizer, len(tokenizer) - 3, [2], detect(tokenizer, ""))
    make = grammars.factory(GenerateCall(grammar=GRAMMARS["json_schema"]), "", 100)
    grammars.close()
    assert make is not None
    vocabulary, chance = Vocabulary(tokenizer), np.random.default_rng(1)
    bits = np.zeros(grammars.words, dtype=np.int32)
    for _ in range(8):
        guide, raw = make(), b""
        while not guide.is_stopped:
            guide.fill_mask(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            token = int(chance.choice(allowed))
            for taken in [token, *Model.consumed(guide, token)]:
                raw += b"" if taken == 2 else vocabulary.raw(taken)
        _check_text("json_schema", raw.decode())


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("lark", 'start: "a'), r"grammar: 1\(10\): lexer error"),
        (Grammar("lark", "start: a"), r'at 1\(8\): unknown name: "a"'),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", r"\bx"), r"look-around, such as a word boundary, is not supported: /\\bx/"),
        (Grammar("lark", 'start: "a"{5'), r"1\(13\): Expected token '\}', found the end of the line\n"),
        (Grammar("lark", 'start: "a" "b" ) x'), r"grammar: 1\(16\): [^()]*\n +1 \| start"),
        (Grammar("lark", "start: <nobody>"), 'the model has no special token "<nobody>"'),
        (Grammar("lark", 'start: %json {"x-guidance": 5}'), "expected an object, got integer 5"),
        (
            Grammar("lark", 'start: %json {"x-guidance": {"odd": 5}}'),
            r"grammar: at 1\(8\): 'x-guidance': 'odd' is not one of item_separator, key_separator, ",
        ),
        (
            Grammar("json_schema", '{"x-guidance": {"odd": 5}}'),
            "grammar: 'x-guidance': 'odd' is not one of .*, whitespace_flexible, [a-z_, ]*$",
        ),
        (Grammar("json_schema", '{"type":"strin"}'), "Invalid type: strin"),
        (
            Grammar("json_schema", '{"type":"string","format":"date","const":"y"}'),
            "no string has the pattern",
        ),
        (Grammar("json_schema", '{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
        (Grammar("json_schema", "false"), "grammar: "),
        (Grammar("llguidance", '{"grammars":[]}'), "empty grammars"),
        (Grammar("llguidance", '{"grammars":[5]}'), "expected an object, got integer 5 at line 1"),
        (
            Grammar("llguidance", '{"max_tokens":"a, b","grammars":[]}'),
            'a whole number, got string "a, b" at',
        ),
        (Grammar("llguidance", '{"grammars":5}'), "expected a list, got integer 5 at line 1"),
        (Grammar("llguidance", "{"), "grammar: "),
        (Grammar("llguidance", "[]"), "grammar: "),
        (Grammar("llguidance", '{"grammars":[{"json_schema":{"x-guidance":5}}]}'), "grammar: .*x-guidance"),
        (Grammar("lark", 'start: A\nA: "\0\ud800"'.replace("\ud800", "\U0010ffff")), "grammar: "),
    ],
)
def test_a_wrong_grammar_is_refused_in_the_words_of_llguidance(
    known: Any, grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        known("qwen3").guide(GenerateCall(grammar=grammar), "")
    assert not _INTERNALS.search(caught.value.message)
    assert caught.value.detail == {"param": "grammar"}
    if grammar.kind == "lark":
        with pytest.raises(InvalidInput, match=re.escape(caught.value.message)):
            known("qwen3").guide(GenerateCall(grammar=grammar, splits=False), "")


_SELF = "a '\\$ref' leads back to itself"
_BAD_SCHEMAS = [
    ({"$ref": "#"}, _SELF),
    ({"$ref": ""}, _SELF),
    ({"allOf": [{"$ref": "#"}]}, _SELF),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, _SELF),
    (
        {"properties": {"a": {"$ref": "#/properties/a", "minimum": 1}}},
        "'#/properties/a' leads back to itself",
    ),
    ({"$ref": "#/nope"}, "'#/nope': the schema has no such part"),
    ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "'#/\\$defs/a': the schema has no such part"),
    ({"$ref": "#nope"}, "'#nope': the schema has no such '\\$anchor'"),
    ({"$ref": "#/%zz"}, "'#/%zz' is not a reference"),
    ({"$ref": "other.json"}, "'other.json' leaves the schema"),
    ({"$ref": "http://127.0.0.1/"}, "'http://127.0.0.1/' leaves the schema"),
    ({"items": {"$ref": "urn:x"}}, "'urn:x' leaves the schema"),
    ({"properties": {"a": {"type": "string", "format": "regex"}}}, "'regex' is not one of date, time"),
    ({"properties": {"a": {"format": "a\n 1 | b"}}}, "'format' 'a.* is not one of date, time"),
    ({"not": {"type": "string"}}, 'no grammar can hold to: "not"'),
    ({"if": {}, "then": {}}, 'no grammar can hold to: "if", "then"'),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, 'hold to: "uniqueItems"'),
    ({"oneOf": [{}, {}]}, "'oneOf' needs schemas"),
    ({"properties": {"a": {"minimum": "x"}}}, "expected a number for 'minimum'"),
    ({"type": "string", "minLength": 99999999999}, "'minLength' or 'maxLength' is too large"),
    ({"allOf": [{"type": "object"}, {"type": "array"}]}, "no value fits the schema: incompatible"),
]
_INTERNALS = re.compile(
    r"Bias|registry|retriev|Resource|Pointer|Unimplemented|json-schema:|f64|\bAnd\b|compile JSON"
    r"|coerce_one_of(?!, lenient)"
    r"|backtrace|struct |usize|u16|panic|\(in regex\)|WordUnicode|invalid type|\(at |available: "
)


@pytest.mark.parametrize(
    ("schema", "words"), _BAD_SCHEMAS, ids=[json.dumps(each) for each, _ in _BAD_SCHEMAS]
)
def test_a_wrong_schema_is_refused_in_words_of_schemas(
    known: Any, schema: dict[str, Any], words: str
) -> None:
    text = json.dumps(schema)
    held = json.dumps({"grammars": [{"json_schema": schema}]})
    for field, grammar in (
        ("response_format", Grammar("json_schema", text, field="response_format")),
        ("text.format", Grammar("json_schema", text, field="text.format")),
        ("output_config.format", Grammar("json_schema", text, field="output_config.format")),
        ("grammar", Grammar("llguidance", held)),
        ("grammar", Grammar("lark", f'start: "<" %json {text} ">"')),
    ):
        with pytest.raises(InvalidInput, match=words) as caught:
            known("qwen3").guide(GenerateCall(grammar=grammar), "")
        assert caught.value.message.startswith(f"{field}: ")
        assert caught.value.detail == {"param": field}
        assert not _INTERNALS.search(caught.value.message)
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidInput) as caught:
        known("qwen3").guide(GenerateCall(tools=ToolUse([function], strict=["f"])), "")
    assert re.match(r"tools: parameters of function 'f': (?!at \d)", caught.value.message)
    assert not _INTERNALS.search(caught.value.message)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_schema_without_an_end_is_refused_in_words_of_schemas(known: Any, schema: dict[str, Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(schema), field="response_format")
    with pytest.raises(InvalidInput, match="leads back to itself") as caught:
        known("qwen3").guide(GenerateCall(grammar=grammar), "")
    assert "items" not in caught.value.message and "lexeme" not in caught.value.message


def test_grammars_that_explode_are_refused_and_harm_nobody(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "MOST_SECONDS", 0)
    model = Model("chatml")
    rules = "".join(f'r{rule}: "a" r{rule + 1} | "b" r{rule + 1}\n' for rule in range(8000))
    hostile = {
        "takes more than": Grammar("json_schema", '{"type":"integer","multipleOf":9999991,"maximum":1e15}'),
        "nested too deeply": Grammar("lark", f'start: r0\n{rules}r8000: "z"'),
        "of a form that cannot be compiled|takes more": Grammar(
            "lark", "start: " + '%json {"type":"object"} ' * 3000
        ),
    }
    for words, grammar in hostile.items():
        for _ in range(2):
            with pytest.raises(InvalidInput, match=words):
                model.guide(GenerateCall(grammar=grammar), "")
        assert model.answer(GenerateCall(grammar=GRAMMARS["regex"]), 1).ended
    model.grammars.close()


def test_a_child_without_time_is_replaced_and_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("chatml")
    call = GenerateCall(grammar=GRAMMARS["regex"])
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "PATIENCE_S", 0.0)
        with pytest.raises(DeadlineExceeded, match="not compiled"):
            model.guide(call, "")
    assert model.answer(call, 1).ended
    model.grammars.close()


def test_no_request_builds_the_tokenizer_of_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    # NOTE: llguidance builds a tokenizer of a large vocabulary for seconds, with the lock of the interpreter.
    model = Model("chatml")
    monkeypatch.setattr("workers.generation.grammar.LLTokenizer", None)
    assert model.answer(GenerateCall(grammar=GRAMMARS["regex"]), 1).ended
    model.grammars.close()


def test_recursive_and_wide_schemas_are_followed(known: Any) -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    function = {"type": "function", "function": {"name": "grow", "parameters": tree}}
    answer = known("qwen3").answer(GenerateCall(tools=ToolUse([function], "required", strict=["grow"])), 2)
    assert answer.calls and all(set(arguments) == {"next"} for _, arguments in answer.calls)


@pytest.mark.long
def test_a_thousand_functions_can_be_forced(known: Any) -> None:
    many = [_function(f"f{number}", {f"a{number}": _DAYS}, [f"a{number}"]) for number in range(1000)]
    for count in (128, 1000):
        use = ToolUse(many[:count], "required", strict=["f7"], parallel=False)
        for seed in range(2):
            ((name, arguments),) = known("llama3").answer(GenerateCall(tools=use), seed).calls
            assert name in {f"f{number}" for number in range(count)}
            assert count > 128 or list(arguments) == [name.replace("f", "a")]
    named = ToolUse(many, "named", name="f7", strict=["f7"])
    assert all(
        "a7" in arguments for _, arguments in known("llama3").answer(GenerateCall(tools=named), 1).calls
    )


def test_a_schema_no_grammar_can_hold_to_matters_only_where_it_is_strict(known: Any) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": 5}}}}}
    text = {"type": "function", "function": {"name": "text", "parameters": {"type": "string"}}}
    number = {"type": "function", "function": {"name": "number", "parameters": {"type": 5}}}
    loose = ToolUse([odd, text, number, ADD], "required", strict=["add"])
    assert known("qwen3").answer(GenerateCall(tools=loose), 1).calls
    for name, words in (
        ("odd", "function 'odd': "),
        ("text", "function 'text': expected the schema"),
        ("number", "function 'number': expected the schema"),
    ):
        with pytest.raises(InvalidInput, match=words) as caught:
            known("qwen3").guide(GenerateCall(tools=ToolUse([odd, text, number, ADD], strict=[name])), "")
        assert caught.value.detail == {"param": "tools"}


def test_requests_without_a_need_have_no_grammar(known: Any) -> None:
    for tools in (None, ToolUse(FUNCTIONS), ToolUse([])):
        assert known("qwen3").grammars.factory(GenerateCall(tools=tools), "", 10) is None
    unsplit = GenerateCall(tools=USES["required"], splits=False)
    assert known("qwen3").grammars.factory(unsplit, "", 10) is None
    with pytest.raises(InvalidInput, match="no format of tool calls"):
        known("chatml", "none").guide(GenerateCall(tools=USES["required"]), "")


def test_a_slow_tokenizer_is_told_apart() -> None:
    class Slow:
        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    grammars = Grammars(Slow(), 2, [1], known_format())
    with pytest.raises(InvalidInput, match="not offered for this model"):
        grammars.factory(GenerateCall(grammar=Grammar("json_object")), "", 10)


def known_format() -> Format:
    return detect(chat_tokenizers.build("chatml"), "")


def _choice(guide: Guide, key: str) -> Choice:
    call = GenerateCall()
    request = GenerationRequest(key, [1], call, 10, frozenset())
    return Choice(request, 0, 0, None, guide)  # type: ignore[arg-type]


def test_the_thread_fills_the_masks_of_all_sequences(known: Any) -> None:
    model = known("qwen3")
    filler = MaskFiller(model.grammars.words, model.size)
    guides = [model.guide(GenerateCall(grammar=GRAMMARS[kind]), "") for kind in GRAMMARS]
    choices = [_choice(guide, str(number)) for number, guide in enumerate(guides)]
    for some in (choices[:1], choices, choices[2:]):
        filler.begin(some)
        filler.wait()
        for choice, guide in zip(choices, guides, strict=True):
            bits = np.zeros(model.grammars.words, dtype=np.int32)
            guide.fill_mask(bits)
            assert choice not in some or (choice.mask.numpy() == bits).all()
    guides[1].matcher.consume_token(model.end_ids[0])
    filler.begin(choices)
    with pytest.raises(GrammarFailed) as caught:
        filler.wait()
    assert [sequence.request.key for sequence in caught.value.sequences] == ["1"]
    for kept in ("done", "paused"):
        setattr(choices[1], kept, True)
        filler.begin(choices)
        filler.wait()
        setattr(choices[1], kept, False)
    assert guides[1].forced() == []
    filler.close()
