"""A text that another worker carries on, from every message after which the first worker may die.

The second worker gets the ids that the messages brought. Both parts together have the entries of a text without a
death: no token twice, none missing, each with its log probability.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from ipc.wire.messages import Ending, GenerateCall, Grammar, Sampling, ToolUse, Written
from ipc.wire.streams import CALLED, FINISHED, HELD, PROMPT, REASONING, TEXT
from tests.fakes.scripted_engine import Heard, ScriptedEngine, steps
from tests.harness.guided_model import MESSAGES, Model
from workers.generation.request import Emission, GenerationRequest

pytestmark = pytest.mark.usefixtures("both_modes_at_length")

SEED = 77
"""The hidden seed of a request without one."""
CALLED_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TOOLS = ToolUse([{"type": "function", "function": {"name": "f", "parameters": {}}}])
SCHEMA = (
    '{"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}, '
    '"name": {"enum": ["Paris", "Rome"]}}, "required": ["numbers", "name"], "additionalProperties": false}'
)


@cache
def model() -> Model:
    """A model that reasons and calls."""
    return Model("qwen3")


class Case:
    """One request, and what the model prefers to write in each choice."""

    def __init__(self, *texts: str, most: int = 60, says_end: bool = True, **fields: Any) -> None:
        self.texts, self.most = texts, most
        self._says_end = says_end
        self.call = GenerateCall(messages=MESSAGES, n=max(1, len(texts)), **fields)

    def script(self, choice: int) -> Sequence[int]:
        """The tokens of a text."""
        if not self.texts:
            return ()
        ids = model().tokenizer.encode(self.texts[choice], add_special_tokens=False)
        return [*ids, *(model().end_ids[:1] if self._says_end else ())]

    def request(self, written: Written) -> GenerationRequest:
        """The request as an adapter makes it."""
        its, call = model(), self.call
        prompt = its.prompt(call.tools)
        ids = its.tokenizer.encode(prompt, add_special_tokens=False)
        held = call.grammar is not None
        request = GenerationRequest("key", ids, call, self.most, frozenset(its.end_ids))
        request.make_parser = lambda: its.form.parser(prompt, call.tools, call.splits, None, held=held)
        request.make_matcher = its.grammars.factory(call, prompt, self.most, None)
        if call.tells_prompt:
            request.prompt_text = its.vocabulary.prompt_text(ids, None)
        request.written = written
        return request

    def run(self, written: Written) -> list[list[Emission]]:
        """All messages of one worker."""
        return list(steps(ScriptedEngine(model(), self.script), self.request(written)))


LIKELY = Sampling(temperature=1.3, seed=5, logprobs=3)
CASES = {
    "likeliest": Case("The weather in Paris is fine. It is 20 degrees."),
    "sampled": Case(most=40, sampling=Sampling(temperature=1.0, top_p=0.9, seed=3)),
    "sampled with a hidden seed": Case(most=40, sampling=Sampling(temperature=1.0, min_p=0.01)),
    "penalties": Case(
        most=40,
        sampling=Sampling(
            temperature=0.8, seed=9, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2
        ),
    ),
    "passages": Case(
        "add add add add add add", most=30, sampling=Sampling(temperature=0.5, seed=1, dry_multiplier=20.0)
    ),
    "log probabilities": Case(most=30, sampling=LIKELY),
    "log probabilities of a call": Case(f"So. {CALLED_TEXT}", tools=TOOLS, sampling=LIKELY),
    "reasoning": Case("<think>\nThe city is Paris, so I add.\n</think>\n\nParis is fine."),
    "a call": Case(f"<think>\nHm.\n</think>\n\nSo: {CALLED_TEXT}\n{CALLED_TEXT}", tools=TOOLS),
    "text like a call": Case('It is <tool_call> {"name": no call', tools=TOOLS),
    "cut within a call": Case(f"So: {CALLED_TEXT}", tools=TOOLS, most=12),
    "a stop text held back": Case("one two three STO and STOP behind", ending=Ending(stop=["STOP"])),
    "characters of several tokens": Case("Ünï 你好 🙂🙂 größer"),
    "the last token allowed": Case("one two three four five six", most=7, says_end=False),
    "three choices": Case("one two three", "yes", "<think>\nno\n</think>\n\nmany more words than the others"),
    "three sampled choices": Case("", "yes", "", most=25, sampling=Sampling(temperature=1.1, seed=4)),
    "a grammar": Case(
        most=80,
        grammar=Grammar("json_schema", SCHEMA),
        sampling=Sampling(temperature=1.0, seed=2),
    ),
    "a grammar with log probabilities": Case(
        most=80, grammar=Grammar("json_schema", SCHEMA), sampling=Sampling(temperature=1.0, logprobs=1)
    ),
    "a prompt that is told": Case(
        "one two", most=10, tells_prompt=True, prompt_logprobs=1, sampling=Sampling(logprobs=0)
    ),
}


def heard(case: Case, messages: Sequence[list[Emission]], before: Heard | None = None) -> Heard:
    """What a frontend has after these messages."""
    one = Heard(case.call.n, SEED) if before is None else before.copy()
    for each in messages:
        one.take(each)
    return one


def unprompted(one: Heard) -> list[list[Emission]]:
    """The entries of the choices. A later run tells a prompt again if no choice has begun."""
    return [[entry for entry in entries if entry.kind != PROMPT] for entries in one.entries]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_a_text_goes_on_behind_every_message_as_if_its_worker_lived(name: str) -> None:
    case = CASES[name]
    messages = case.run(Written(SEED))
    whole = heard(case, messages)
    assert whole.has_ended
    # NOTE: sampled texts have no stages; each place of theirs is like the others.
    for died in range(0, len(messages), 1 if case.texts else 3):
        first = heard(case, messages[:died])
        rest = case.run(first.written())
        assert unprompted(heard(case, rest, first)) == unprompted(whole), died


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_a_text_goes_on_behind_two_deaths(name: str) -> None:
    case, draw = CASES[name], random.Random(name)
    messages = case.run(Written(SEED))
    whole = heard(case, messages)
    for _ in range(4):
        first = heard(case, messages[: draw.randrange(len(messages))])
        again = case.run(first.written())
        second = heard(case, again[: draw.randrange(len(again))], first)
        assert unprompted(heard(case, case.run(second.written()), second)) == unprompted(whole)


def test_the_cases_reach_what_they_name() -> None:
    kinds = {
        name: {entry.kind for message in case.run(Written(SEED)) for entry in message}
        for name, case in CASES.items()
    }
    assert CALLED in kinds["a call"] and CALLED in kinds["log probabilities of a call"]
    assert REASONING in kinds["reasoning"]
    assert HELD in kinds["a call"]
    assert CALLED not in kinds["text like a call"]
    assert all(FINISHED in each for each in kinds.values())


def test_ids_are_told_with_the_text_they_stand_for_and_no_token_is_told_twice() -> None:
    case = CASES["a call"]
    one = heard(case, case.run(Written(SEED)))
    assert one.number == len(case.script(0))


def test_a_request_that_nobody_carries_on_tells_no_ids() -> None:
    case = CASES["likeliest"]
    request = case.request(Written(SEED))
    request.written = None
    told = [entry for each in steps(ScriptedEngine(model(), case.script), request) for entry in each]
    assert any(entry.kind == TEXT for entry in told) and not any(entry.written for entry in told)


def test_a_text_carried_on_computes_prompt_and_written_tokens_as_one_prompt() -> None:
    case = CASES["likeliest"]
    messages = case.run(Written(SEED))
    first = heard(case, messages[: len(messages) // 2])
    engine, request = ScriptedEngine(model(), case.script), case.request(first.written())
    engine.add(request)
    chunk, lines = engine.prefill_tokens, 0
    while not engine.has_chosen("key"):
        engine.step(ahead=False)
        lines += 1
    assert lines == -(-(len(request.prompt) + first.number) // chunk)
    assert engine.statistics().output_tokens == 1


def test_a_text_carried_on_goes_before_those_that_wait() -> None:
    case = CASES["likeliest"]
    messages = case.run(Written(SEED))
    first = heard(case, messages[: len(messages) // 2])
    engine = ScriptedEngine(model(), case.script)
    engine._scheduler._max_sequences = 1
    for key in ("first", "second"):
        waiting = case.request(Written(SEED))
        waiting.key = key
        engine.add(waiting)
    engine.add(case.request(first.written()))
    order = [entry.key for _ in range(200) for entry in engine.step() if entry.start is not None]
    assert order == ["key", "first", "second"]


def test_a_smaller_cache_ends_a_text_that_has_filled_it() -> None:
    case = Case("one two three four five six seven eight", says_end=False, most=60)
    messages = case.run(Written(SEED))
    first = heard(case, messages[:30])
    engine, request = ScriptedEngine(model(), case.script), case.request(first.written())
    request.max_tokens = first.number
    told = [entry for each in steps(engine, request) for entry in each]
    ends = [entry.finish for entry in told if entry.finish is not None]
    assert [(end.reason, end.tokens) for end in ends] == [("length", first.number)]
