"""No message vanishes: a template gets texts in the form that it reads, and one that reads none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ipc.errors import InvalidInput
from tests.tiny import chat_models, chat_tokenizers
from tests.unit.workers.adapters.test_causal_adapter import context
from workers.adapters.causal import CausalAdapter
from workers.generation.templates import ChatTemplate

_ROLE = "{{ m['role'] }}: "
_PARTS = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}\n"
_END = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
PARTS_ONLY = "{% for m in messages %}" + _ROLE + _PARTS + _END
TEXT_ONLY = "{% for m in messages %}" + _ROLE + "{{ m['content'] | trim }}\n" + _END
BOTH = (
    "{% for m in messages %}"
    + _ROLE
    + "{% if m['content'] is string %}{{ m['content'] }}\n{% else %}"
    + _PARTS
) + ("{% endif %}" + _END)
"""As templates of models that see pictures are."""
TOOLS_IN_PARTS = ("{% for m in messages %}" + _ROLE + "{% if m['role'] == 'tool' %}" + _PARTS) + (
    "{% else %}{{ m['content'] }}\n{% endif %}" + _END
)
WRITTEN = "{% for m in messages %}" + _ROLE + "{{ m['content'] | tojson }}\n" + _END
NO_SYSTEM = "{% for m in messages if m['role'] != 'system' %}" + _ROLE + "{{ m['content'] }}\n" + _END
RAISES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
) + (_ROLE + "{{ m['content'] }}\n" + _END)
SPOKEN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many wheels does a tram have?"},
    {"role": "assistant", "content": " Let me look. "},
    {"role": "user", "content": "Please\ndo <b>'so'</b>"},
    {"role": "assistant", "content": ""},
    {"role": "tool", "content": '{"wheels": 16}', "tool_call_id": "abcdefghi", "name": "count"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Any tokenizer."""
    return chat_tokenizers.build("chatml")


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize(
    ("source", "in_parts"),
    [
        (PARTS_ONLY, {"system", "user", "assistant", "tool"}),
        (TEXT_ONLY, set()),
        (BOTH, set()),
        (TOOLS_IN_PARTS, {"tool"}),
        (WRITTEN, set()),
    ],
)
def test_prompts_are_those_of_transformers_with_messages_in_the_form_of_the_template(
    tokenizer: Any, source: str, in_parts: set[str]
) -> None:
    template = ChatTemplate(tokenizer, source)
    for count in range(1, len(SPOKEN) + 1):
        given = [_in_parts(one) if one["role"] in in_parts else one for one in SPOKEN[:count]]
        theirs = {"chat_template": source, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(given, tokenize=False, **theirs)
        prompt = template.prompt(SPOKEN[:count])
        assert prompt.text == text
        assert prompt.ids == list(tokenizer.apply_chat_template(given, return_dict=False, **theirs))
        assert "wheels" in text or count == 1


def test_the_last_message_can_be_continued_in_parts(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, PARTS_ONLY)
    variables = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = template.prompt([SPOKEN[1], {"role": "assistant", "content": "A tram"}], None, variables)
    assert prompt.text.endswith("assistant: A tram")


def test_control_tokens_in_parts_stay_text(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, PARTS_ONLY)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = template.prompt([{"role": "user", "content": "a <|im_end|> b"}])
    assert "a <|im_end|> b" in prompt.text and end not in prompt.ids


def test_each_template_of_a_model_has_its_own_form(tokenizer: Any) -> None:
    both = chat_tokenizers.build("chatml", {"default": PARTS_ONLY, "tool_use": TEXT_ONLY, "rag": "{{ 1 }}"})
    template, tool = ChatTemplate(both), {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in (None, [tool]):
        assert SPOKEN[1]["content"] in template.prompt(SPOKEN[1:2], tools).text


@pytest.mark.parametrize("kind", chat_tokenizers.KINDS)
def test_templates_of_published_models_are_told_texts(kind: str) -> None:
    template = ChatTemplate(chat_tokenizers.build(kind))
    assert SPOKEN[1]["content"] in template.prompt([SPOKEN[1]]).text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("You are a helpful assistant.", "shows no message of a user"),
        ("{% for m in messages %}{{ m['text'] }}{% endfor %}", "shows no message of a user"),
        ("{{ raise_exception('ask for more') }}", "ask for more"),
        (
            "{% for m in messages %}{% for p in m['content'] %}{{ p['value'] }}{% endfor %}{% endfor %}",
            "neither as",
        ),
    ],
)
def test_a_template_that_shows_no_user_is_refused_when_it_is_read(
    tokenizer: Any, source: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(tokenizer, source).check()


def test_such_a_model_is_not_loaded(tmp_path: Path) -> None:
    directory = chat_models.save("chatml", tmp_path / "model")
    (directory / "chat_template.jinja").write_text("Hello!")
    with pytest.raises(ValueError, match="correct the template of the model, or name another one"):
        CausalAdapter.load(context(directory))


def test_a_role_that_a_template_leaves_out_is_refused_by_name(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, NO_SYSTEM)
    with pytest.raises(InvalidInput, match="leaves out what the role 'system' says"):
        template.prompt(SPOKEN[:2])
    assert template.prompt([{"role": "system", "content": " "}, SPOKEN[1]]).text.count("tram") == 1


def test_a_role_that_a_template_refuses_is_named_with_its_words(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, RAISES)
    with pytest.raises(InvalidInput, match="refuses messages of the role 'system': no system here"):
        template.prompt(SPOKEN[:2])
    assert "tram" in template.prompt(SPOKEN[1:2]).text
