"""Answers that continue the last message: the tokens and texts of transformers, and content from the joint on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ipc.wire.messages import Ending, GenerateCall, Grammar, ToolUse
from ipc.wire.streams import CALL_ENDED, CALLED, REASONING, TEXT
from tests.tiny import chat_models, chat_tokenizers
from tests.unit.workers.adapters.test_causal_adapter import context, prepare
from tests.unit.workers.generation.test_generation_formats import FORMATS, TOOLS, _parsed
from tests.unit.workers.generation.test_generation_grammars import FUNCTIONS, Model
from tests.unit.workers.generation.test_generation_text import run, text_of
from workers.adapters.causal import CausalAdapter
from workers.generation.request import GenerationRequest
from workers.generation.text import ChoiceOutput, Vocabulary

CONTINUING = {"add_generation_prompt": False, "continue_final_message": True}
ASKED = {"role": "user", "content": "a"}


def _continued(said: str, **fields: Any) -> GenerateCall:
    messages = [ASKED, {"role": "assistant", "content": said}]
    return GenerateCall(messages=messages, variables=CONTINUING, **fields)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", chat_models.ARCHITECTURES)
def test_an_answer_goes_on_as_transformers_does(tmp_path: Path, kind: str) -> None:
    loaded = dataclasses.replace(context(chat_models.save(kind, tmp_path)), max_sequence_length=512)
    adapter = CausalAdapter.load(loaded)
    call = _continued("The answer is", ending=Ending(max_tokens=6))
    request = prepare(adapter, call)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(call.messages, tokenize=False, continue_final_message=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert request.prompt == ids
    assert prepare(adapter, _continued("The answer is", counts_only=True)).prompt == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=6,
            do_sample=False,
        )
    adapter.engine.add(request)
    emissions = []
    while adapter.engine.has_work:
        emissions += adapter.engine.step()
    whole = tokenizer.decode(wanted[0], skip_special_tokens=True)
    begun = tokenizer.decode(ids, skip_special_tokens=True)
    told = "".join(each.text for each in emissions if each.kind in (TEXT, REASONING))
    assert begun + told == whole or any(each.kind == CALLED for each in emissions)


def test_the_space_between_a_message_and_what_follows_is_kept() -> None:
    """Decoders of some tokenizers drop the space before the first token of a text."""
    words = {"[UNK]": 0, "It": 1, "is": 2, "Paris": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    vocabulary = Vocabulary(tokenizer)
    vocabulary.is_exact = False
    begun = GenerationRequest("key", [1, 2], GenerateCall(messages=[ASKED]), 10, frozenset())
    assert text_of(run(ChoiceOutput(vocabulary, begun, 0), [3, 2])) == "Paris is"
    for call in (_continued("It is"), GenerateCall(text="It is")):
        continuing = GenerationRequest("key", [1, 2], call, 10, frozenset())
        assert text_of(run(ChoiceOutput(vocabulary, continuing, 0), [3, 2])) == " Paris is"


@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_a_begun_answer_is_content(name: str) -> None:
    for text in (" Paris. ", "to=5 is short.", "assistant", '{"name": "add", "arg'):
        for pieces in ([text], list(text)):
            prompt = "user: a\nassistant: It is"
            parsed = _parsed(FORMATS[name].parser(prompt, TOOLS, said="It is"), pieces)
            if name != "template" or "{" not in text:
                assert parsed == [(TEXT, text)], name


@pytest.mark.parametrize(
    ("said", "answer", "parsed"),
    [
        ("<think>\nIt", " is.</think>\n\nYes", [(REASONING, " is."), (TEXT, "Yes")]),
        ("<think>", "\nIt is.</think>Yes", [(REASONING, "\nIt is."), (TEXT, "Yes")]),
        ("<think>a</think> It", " is", [(TEXT, " is")]),
        ("It is ", "so.<think>a</think>b", [(TEXT, "so."), (REASONING, "a"), (TEXT, "b")]),
    ],
)
def test_reasoning_goes_on_where_the_begun_answer_left_reasoning_open(
    said: str, answer: str, parsed: list[tuple[int, str]]
) -> None:
    form = chat_tokenizers.build("qwen3")
    model = Model("qwen3", tokenizer=form)
    prompt = f"<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n{said}"
    assert _parsed(model.form.parser(prompt, TOOLS, said=said), list(answer)) == parsed
    model.grammars.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["chatml", "qwen3", "harmony", "mistral", "llama3"])
def test_grammars_hold_from_the_joint_on(kind: str) -> None:
    model = Model(kind)
    prompt = model._template.prompt(_continued("It is").messages or [], None, CONTINUING)
    call = GenerateCall(grammar=Grammar("regex", "[a-c]{3}"))
    for seed in range(4):
        answer = model.answer(call, seed, prompt.text, said=prompt.said)
        assert answer.ended and answer.said(TEXT) == answer.text and len(answer.text) == 3
        forced = ToolUse(FUNCTIONS, "required")
        called = model.answer(GenerateCall(tools=forced), seed, prompt.text, most=3000, said=prompt.said)
        assert called.ended and called.segments[-1].kind == CALL_ENDED, called.text
        assert not called.said(REASONING)
        both = GenerateCall(grammar=Grammar("regex", "[a-c]{3}"), tools=ToolUse(FUNCTIONS, strict=["add"]))
        either = model.answer(both, seed, prompt.text, most=3000, said=prompt.said)
        assert either.calls or len(either.said(TEXT)) == 3
        free = GenerateCall(tools=ToolUse(FUNCTIONS, strict=["add", "get_weather"]))
        for name, arguments in model.answer(free, seed, prompt.text, most=3000, said=prompt.said).calls:
            assert name and json.dumps(arguments)
    model.grammars.close()
