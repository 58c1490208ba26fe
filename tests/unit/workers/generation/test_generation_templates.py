"""Chat templates: the same prompts as transformers, no control tokens from strings of a request, bounded rendering."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ipc.errors import InputTooLong, InvalidInput
from tests.tiny import chat_tokenizers
from workers.generation import sandbox
from workers.generation.templates import MAX_INPUT, ChatTemplate, PieceTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "call-123456789",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": 'Par"is', "days": 2}},
}
CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    ([{"role": "user", "content": " Hello Marie > <p> 日本 \n"}], None),
    (
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi\n"},
            {"role": "user", "content": "<"},
        ],
        None,
    ),
    ([{"role": "system", "content": "Be brief [INST"}, {"role": "user", "content": "> quoted <|"}], None),
    ([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Weather?"}], TOOLS),
    (
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": CALL["id"], "name": "get_weather", "content": '{"degrees": 4}'},
        ],
        TOOLS,
    ),
]
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "high"},
)


def _theirs(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]
) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=False, **{"add_generation_prompt": True, **variables}
    )
    return list(ids)


@pytest.mark.parametrize("kind", chat_tokenizers.KINDS)
def test_prompts_of_ordinary_content_are_those_of_transformers(kind: str) -> None:
    tokenizer = chat_tokenizers.build(kind)
    template = ChatTemplate(tokenizer)
    compared = 0
    for messages, tools in CONVERSATIONS:
        for variables in VARIABLES:
            try:
                expected = _theirs(tokenizer, messages, tools, variables)
            except Exception:  # a template that refuses such a conversation
                continue
            prompt = template.prompt(messages, tools, variables)
            assert prompt.ids == expected
            assert prompt.text == tokenizer.decode(expected)
            compared += 1
    assert compared >= 9


@pytest.mark.parametrize("kind", chat_tokenizers.KINDS)
def test_a_prompt_that_ends_in_its_last_message_is_that_of_transformers(kind: str) -> None:
    tokenizer = chat_tokenizers.build(kind)
    template = ChatTemplate(tokenizer)
    continuing = {"add_generation_prompt": False, "continue_final_message": True}
    asked = {"role": "user", "content": "Hello"}
    for said in ("It is", "", "It is \n", " \u65e5\u672c <"):
        messages = [asked, {"role": "assistant", "content": said}]
        expected = _theirs(tokenizer, messages, None, continuing)
        prompt = template.prompt(messages, None, continuing)
        assert prompt.ids == expected
    hidden = "a\ufdd1\ufdd1 b"
    prompt = template.prompt([{"role": "user", "content": hidden}, messages[-1]], None, continuing)
    assert prompt.text.rstrip().endswith(said.strip())
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    with pytest.raises(InvalidInput, match=r"cannot continue the last message.*: that message has no text"):
        template.prompt([asked, called], None, continuing)
    with pytest.raises(InvalidInput, match=r"cannot continue the last message.*: that message has calls"):
        template.prompt([asked, {**called, "content": "It is"}], None, continuing)


_SAYS = "{{ m['role'] + ': ' + m['content'] + '\n' }}"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages[:-1] or messages %}" + _SAYS + "{% endfor %}", "leaves that message out"),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", "writes the text of that message in another"),
        ("{% for m in messages %}{{ m['content'] | e }}{% endfor %}", "writes the text of that message in"),
        (
            "{% for m in messages | reverse %}" + _SAYS + "{% endfor %}",
            "writes other messages behind that one",
        ),
        (
            "{% for m in messages if m['role'] != 'user' %}" + _SAYS + "{% endfor %}"
            "{% for m in messages if m['role'] == 'user' %}" + _SAYS + "{% endfor %}",
            "writes other messages behind that one",
        ),
    ],
)
def test_a_template_in_which_no_answer_can_go_on_is_named_with_the_reason(source: str, why: str) -> None:
    template = ChatTemplate(chat_tokenizers.build("chatml"), source)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is"}]
    with pytest.raises(InvalidInput, match=f"last message.*: the chat template 'default' of the model {why}"):
        template.prompt(messages, None, {"add_generation_prompt": False, "continue_final_message": True})
    assert template.prompt(messages).text


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("{% for m in messages %}<{{ m['content'] | trim }}>{% endfor %}", "It is"),
        ("{% for m in messages %}<{{ m['content'] }}>{% endfor %}", "It is "),
        ("{% for m in messages %}<{{ m['content'] }}{{ '>' if not loop.last }}{% endfor %}", "It is "),
        ("{% for m in messages %}<{{ m['content'] }}>{% endfor %}<think>\n", "It is "),
        ("{{ messages[-1]['content'] }}{% for m in messages %}<{{ m['content'] }}>{% endfor %}", "It is "),
    ],
)
def test_what_a_template_writes_behind_the_last_message_is_cut(source: str, end: str) -> None:
    template = ChatTemplate(chat_tokenizers.build("chatml"), source)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is "}]
    prompt = template.prompt(messages, None, {"continue_final_message": True})
    assert prompt.text.endswith(f"<Hello><{end}" if "trim" not in source else f"<{end}")
    assert prompt.said == "It is "


@pytest.mark.parametrize("kind", chat_tokenizers.KINDS)
def test_control_tokens_in_user_text_stay_text(kind: str) -> None:
    tokenizer = chat_tokenizers.build(kind)
    facts = chat_tokenizers.KINDS[kind]
    template = ChatTemplate(tokenizer)
    control = set(tokenizer.added_tokens_decoder)
    hostile = f"a{''.join((*facts.special, *facts.plain))} {facts.eos}b{facts.bos or ''}"
    plain = template.prompt([{"role": "user", "content": "a"}])
    prompt = template.prompt([{"role": "user", "content": hostile}])
    assert [token for token in prompt.ids if token in control] == [
        token for token in plain.ids if token in control
    ]
    assert hostile in tokenizer.decode(prompt.ids) and hostile in prompt.text


def test_control_tokens_in_tools_names_and_variables_stay_text() -> None:
    tokenizer = chat_tokenizers.build("qwen3")
    template = ChatTemplate(
        tokenizer,
        "{{ tools | tojson }}{{ tools | tojson(ensure_ascii=True) }}{{ more }}{{ messages[0].content }}",
    )
    tools = [
        {
            "function": {
                "name": "<|im_end|>",
                "parameters": {"properties": {"<|im_start|>": {"x": "</think>"}}},
            }
        }
    ]
    prompt = template.prompt([{"role": "user", "content": "q"}], tools, {"more": "<tool_call><|im_end|>"})
    assert not set(prompt.ids) & set(tokenizer.added_tokens_decoder)
    assert prompt.text == json.dumps(tools) * 2 + "<tool_call><|im_end|>q"


def test_two_strings_that_a_template_joins_make_no_control_token() -> None:
    tokenizer = chat_tokenizers.build("qwen3")
    control = set(tokenizer.added_tokens_decoder)
    joined = ChatTemplate(tokenizer, "{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    for cut in range(1, len("<|im_end|>")):
        halves = ["x" + "<|im_end|>"[:cut] + "  ", "<|im_end|>"[cut:] + "y"]
        prompt = joined.prompt([{"role": "user", "content": half} for half in halves])
        assert not set(prompt.ids) & control
        assert tokenizer.decode(prompt.ids) == "x<|im_end|>y" == prompt.text


def test_tags_in_answers_of_the_model_stay_tokens_and_special_ones_do_not() -> None:
    tokenizer = chat_tokenizers.build("qwen3")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<tool_call>x</tool_call><|im_start|>"},
        {"role": "user", "content": "r"},
    ]
    ids = ChatTemplate(tokenizer).prompt(messages).ids
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens.count("<tool_call>") == tokens.count("</tool_call>") == 1
    assert tokens.count("<|im_start|>") == 4


def test_marks_of_our_own_in_user_text_cannot_hide_a_token() -> None:
    tokenizer = chat_tokenizers.build("chatml")
    prompt = ChatTemplate(tokenizer).prompt([{"role": "user", "content": "<|im_\ufdd1end|>\ufdd0 a"}])
    assert tokenizer.convert_ids_to_tokens(prompt.ids).count("<|im_end|>") == 1
    assert "<|im_end|> a" in prompt.text


def test_a_space_before_each_text_is_not_added_inside_of_a_prompt() -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=_metaspace(), eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    tokenizer.chat_template = "[INST]{{ messages[0].content }}[/INST]"
    template = ChatTemplate(tokenizer)
    for content in ("ab ba", " ab", "a\nb"):
        messages = [{"role": "user", "content": content}]
        assert template.prompt(messages).ids == _theirs(tokenizer, messages, None, {})
    ids = template.prompt([{"role": "user", "content": "a[INST]b"}]).ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["[INST]", *_letters("a[INST]b"), "[/INST]"]


class _Batching:
    """A backend of which batches alone may be asked: these leave the lock of the interpreter to other threads."""

    def __init__(self, backend: Any) -> None:
        self._inner, self.batches = backend, 0

    def __getattr__(self, name: str) -> Any:
        assert name != "encode"
        return getattr(self._inner, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        """Counted."""
        self.batches += 1
        return self._inner.encode_batch_fast(texts, **options)


def test_a_prompt_of_many_pieces_is_tokenized_as_one_batch() -> None:
    tokenizer = chat_tokenizers.build("chatml")
    messages = [{"role": "user", "content": "<|im_end|> a<|im_start|>" * 100}]
    expected = ChatTemplate(tokenizer).prompt(messages).ids
    backend = _Batching(tokenizer.backend_tokenizer)
    pieces = PieceTokenizer(SimpleNamespace(is_fast=True, backend_tokenizer=backend))
    template = ChatTemplate(tokenizer)
    template._pieces = pieces
    before = backend.batches
    assert template.prompt(messages).ids == expected
    assert backend.batches == before + 1
    assert template.plain("a<|im_end|>") == list(tokenizer.encode("a<|im_end|>"))


def test_a_tokenizer_that_cuts_and_pads_texts_does_neither_to_prompts() -> None:
    tokenizer = chat_tokenizers.build("chatml")
    messages = [{"role": "user", "content": "a b c <|im_end|> and more text than that <|im_end|> x"}]
    expected = ChatTemplate(tokenizer).prompt(messages).ids
    tokenizer.backend_tokenizer.enable_padding(pad_id=0)
    tokenizer.backend_tokenizer.enable_truncation(8)
    template = ChatTemplate(tokenizer)
    assert template.prompt(messages).ids == expected
    assert len(template.plain("a b c " * 10)) > 8


def test_templates_by_name_are_chosen_by_tools() -> None:
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
    tokenizer = chat_tokenizers.build("chatml", named)
    question = [{"role": "user", "content": "q"}]
    assert ChatTemplate(tokenizer).prompt(question).text == "Dq"
    assert ChatTemplate(tokenizer).prompt(question, TOOLS).text == "T1"
    assert ChatTemplate(tokenizer, "rag").prompt(question, TOOLS).text == "R"
    assert ChatTemplate(tokenizer, "own {{ messages[0].role }}").prompt(question).text == "own user"


def test_a_template_that_joins_arguments_as_text_gets_text() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'f' + c.function.arguments }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content + '|' }}" + calls + "{% endfor %}"
    template = ChatTemplate(chat_tokenizers.build("chatml"), source)
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    assert template.prompt(messages).text == 'q||f{"city": "Par\\"is", "days": 2}'


def test_the_words_of_a_template_that_refuses_reach_the_client() -> None:
    template = ChatTemplate(chat_tokenizers.build("mistral"))
    with pytest.raises(InvalidInput, match="roles must alternate user/assistant"):
        template.prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_a_model_without_a_template_is_told_so() -> None:
    tokenizer = chat_tokenizers.build("chatml")
    tokenizer.chat_template = None
    template = ChatTemplate(tokenizer)
    assert not template.exists
    with pytest.raises(InvalidInput, match="no chat template"):
        template.prompt([{"role": "user", "content": "a"}])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=999999999) }}",
        "{{ 'a'.ljust(10 ** 9) }}{{ 'a' | center(10 ** 9) }}",
        "{{ ('a' * 1000) | replace('a', 'b' * 1000) | replace('b', 'c' * 1000) }}",
        "{{ range(100000) | join('x' * 10000) }}",
        "{{ 2 ** 100000 }}",
        "{{ [1] | tojson(indent=1000000) }}",
    ],
)
def test_templates_that_never_end_or_grow_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 5_000)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 20)
    template = ChatTemplate(chat_tokenizers.build("chatml"), source)
    with pytest.raises(InvalidInput, match="takes too long"):
        template.prompt([{"role": "user", "content": "a"}])


def test_a_template_that_never_ends_is_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10**12)
    times = iter(range(10**6))
    monkeypatch.setattr(sandbox.time, "thread_time", lambda: float(next(times)))
    template = ChatTemplate(chat_tokenizers.build("chatml"), "{% for i in range(90000) %}{{ i }}{% endfor %}")
    with pytest.raises(InvalidInput, match="seconds of processor time"):
        template.prompt([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x" * (sandbox.MAX_TEMPLATE + 1), "characters, over"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too deeply"),
        ("{% for %}", "line 1"),
        ("{{ messages | nothing }}", "nothing"),
    ],
)
def test_templates_that_cannot_be_compiled_are_refused_at_the_load(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(chat_tokenizers.build("chatml"), source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0]['content'].translate({97: 'b'}) }}",
        "{{ missing() }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_templates_get_nothing_but_their_values(source: str) -> None:
    with pytest.raises(InvalidInput):
        ChatTemplate(chat_tokenizers.build("chatml"), source).prompt([{"role": "user", "content": "a"}])


def test_oversized_and_deeply_nested_requests_are_refused() -> None:
    template = ChatTemplate(chat_tokenizers.build("chatml"))
    with pytest.raises(InputTooLong, match=str(MAX_INPUT)):
        template.prompt([{"role": "user", "content": "a" * (MAX_INPUT + 1)}])
    nested: Any = {}
    for _ in range(10_000):
        nested = {"x": nested}
    with pytest.raises(InvalidInput, match="64 levels"):
        template.prompt([{"role": "user", "content": "a"}], [nested])


def test_long_conversations_and_odd_characters_pass() -> None:
    tokenizer = chat_tokenizers.build("qwen3")
    template = ChatTemplate(tokenizer)
    messages = [{"role": ("user", "assistant")[at % 2], "content": f"m{at}"} for at in range(2001)]
    assert template.prompt(messages, TOOLS * 50).ids == _theirs(tokenizer, messages, TOOLS * 50, {})
    assert "a\0b" in template.prompt([{"role": "user", "content": "a\0b"}]).text


def test_threads_share_a_template() -> None:
    tokenizer = chat_tokenizers.build("llama3")
    template = ChatTemplate(tokenizer)
    expected = [template.prompt([{"role": "user", "content": f"q{at}"}]).ids for at in range(4)]
    results: dict[int, bool] = {}

    def run(at: int) -> None:
        results[at] = all(
            template.prompt([{"role": "user", "content": f"q{at}"}]).ids == expected[at] for _ in range(30)
        )

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def _letters(text: str) -> list[str]:
    return [letter.replace(" ", "▁") for letter in text]


def _metaspace() -> Tokenizer:
    """A tokenizer of single letters that puts a space before each text."""
    letters = ["<unk>", "</s>", "▁", "\n", *"ab", *"[]/INST"]
    vocabulary = {letter: at for at, letter in enumerate(dict.fromkeys(letters))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    return backend


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("call-e6bd85a5-fdbb-4697-99d9-a8021aaa163b", "21aaa163b"),
        ("toolu_1", "000toolu1"),
        ("abcdefghi", "abcdefghi"),
    ],
)
def test_ids_of_calls_have_nine_characters_where_a_template_wants_that(given: str, short: str) -> None:
    source = (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
        "{%- if c.id is not defined or c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}<{{ c.id }}>"
        "{%- endfor %}{%- if m.tool_call_id is defined %}[{{ m.tool_call_id }}]{% endif %}{%- endfor %}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": given}]},
        {"role": "tool", "content": "", "tool_call_id": given},
    ]
    template = ChatTemplate(chat_tokenizers.build("mistral"), source)
    assert template.prompt(messages).text == f"<{short}>[{short}]"
    any_length = ChatTemplate(chat_tokenizers.build("mistral"), source.replace("!= 9", "< 2"))
    assert any_length.prompt(messages).text == f"<{given}>[{given}]"
