"""Rounds of scripted models: which calls run, what the client sees, how a run ends, and what sessions put back."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.agent.loop import Loop, spliced
from frontend.engine.events import CallBegun, Called, Ended, Event, Finished, Reasoning, Started, Text
from ipc.wire.messages import GenerateCall, ToolUse

ASKED = [{"role": "user", "content": "6 times 7?"}]
CODE, SHELL, OWN = "mistralrs_execute_python", "mistralrs_shell", "weather"
_ENDED = Ended(10, 5, 1, 2, 0.25, 0.5)


def _called(at: int, name: str, arguments: str = '{"code":"6*7"}') -> Called:
    return Called(0, at, f"call-{at}", name, arguments)


def _loop(most_rounds: int = 256, note: str = "", messages: Any = ASKED, choice: str = "required") -> Loop:
    call = GenerateCall(tools=ToolUse([{}], choice))
    return Loop(call, messages, note, {CODE, SHELL}, most_rounds)


def _round(loop: Loop, *events: Event | Called, reason: str = "tool_calls") -> list[Event]:
    told = [each for event in events for each in (event.events() if isinstance(event, Called) else [event])]
    return loop.take([Started(10, 2), *told, Finished(0, reason, tokens=5), _ENDED])


def test_an_answer_without_calls_is_told_as_it_came() -> None:
    loop = _loop()
    assert _round(loop, Text(0, "42"), reason="stop") == [Started(10, 2), Text(0, "42")]
    assert loop.turn() == [] and not loop.advance()
    assert loop.end() == [Finished(0, "stop", tokens=5), _ENDED]
    assert loop.messages == [*ASKED, {"role": "assistant", "content": "42"}]


def test_calls_of_a_turn_run_in_order_and_the_model_reads_all_results() -> None:
    loop = _loop()
    calls = [_called(0, CODE), _called(1, SHELL, "{}")]
    assert _round(loop, Reasoning(0, "hm"), Text(0, "Wait"), *calls) == [
        Started(10, 2),
        Reasoning(0, "hm"),
        Text(0, "Wait"),
    ]
    assert loop.turn() == calls
    loop.answer(calls[0], "42")
    loop.answer(calls[1], "ok")
    assert loop.advance() and loop.round == 1
    said = {"role": "assistant", "content": "Wait", "reasoning_content": "hm"}
    entries = [
        {"id": "call-0", "type": "function", "function": {"name": CODE, "arguments": {"code": "6*7"}}},
        {"id": "call-1", "type": "function", "function": {"name": SHELL, "arguments": {}}},
    ]
    assert loop.call.messages == [
        *ASKED,
        {**said, "tool_calls": entries},
        {"role": "tool", "content": "42", "tool_call_id": "call-0", "name": CODE},
        {"role": "tool", "content": "ok", "tool_call_id": "call-1", "name": SHELL},
    ]


def test_a_forced_choice_holds_until_a_call_has_run() -> None:
    loop = _loop()
    assert loop.call.tools == ToolUse([{}], "required")
    _round(loop, _called(0, CODE))
    loop.answer(*loop.turn(), "42")
    loop.advance()
    assert loop.call.tools == ToolUse([{}], "auto")


def test_counts_are_sums_and_the_start_is_told_once() -> None:
    loop = _loop()
    assert _round(loop, _called(0, CODE)) == [Started(10, 2)]
    loop.answer(*loop.turn(), "42")
    assert loop.advance()
    assert _round(loop, Text(0, "42"), reason="stop") == [Text(0, "42")]
    assert loop.turn() == [] and not loop.advance()
    assert loop.end()[-1] == Ended(20, 10, 2, 4, 0.5, 1.0)


@pytest.mark.parametrize("most_rounds", [0, 1])
def test_calls_at_the_cap_go_to_the_client(most_rounds: int) -> None:
    loop = _loop(most_rounds)
    for _ in range(most_rounds):
        _round(loop, _called(0, CODE))
        loop.answer(*loop.turn(), "42")
        assert loop.advance()
    call = _called(0, CODE)
    _round(loop, call)
    assert loop.turn() == [] and not loop.advance()
    assert loop.end()[:-1] == [*call.events(), Finished(0, "tool_calls", tokens=5)]
    assert loop.messages[-1]["tool_calls"][0]["id"] == "call-0"


def test_calls_of_a_text_that_was_cut_do_not_run() -> None:
    loop = _loop()
    _round(loop, _called(0, CODE), reason="length")
    assert loop.turn() == [] and not loop.advance()
    assert loop.end()[:-1] == [*_called(0, CODE).events(), Finished(0, "length", tokens=5)]


def test_the_calls_behind_a_call_of_the_client_are_returned_with_it() -> None:
    loop = _loop()
    calls = [_called(0, CODE), _called(1, OWN, "{}"), _called(2, SHELL, "{}")]
    _round(loop, Text(0, "Wait"), *calls)
    assert loop.turn() == calls[:1]
    loop.answer(calls[0], "42")
    assert not loop.advance()
    returned = loop.end()
    assert [(call.index, call.id) for call in returned if isinstance(call, CallBegun)] == [
        (0, "call-1"),
        (1, "call-2"),
    ]
    ran, result, last = loop.messages[1:]
    assert ran["content"] == "Wait" and [call["id"] for call in ran["tool_calls"]] == ["call-0"]
    assert result["content"] == "42"
    assert last["content"] is None and [call["id"] for call in last["tool_calls"]] == ["call-1", "call-2"]


def test_calls_of_the_server_run_when_the_client_comes_back_with_its_results() -> None:
    first = _loop()
    _round(first, _called(0, OWN, "{}"), _called(1, SHELL, '{"commands":["true"]}'))
    assert first.turn() == []
    first.end()
    back = [*first.messages, {"role": "tool", "content": "sun", "tool_call_id": "call-0"}]
    loop = _loop(messages=back)
    [call] = loop.unanswered()
    assert (call.id, call.name, call.arguments) == ("call-1", SHELL, '{"commands":["true"]}')
    loop.answer(call, "done")
    loop.resume()
    assert loop.round == 1 and loop.call.messages is not None
    assert [message["content"] for message in loop.call.messages[-2:]] == ["sun", "done"]
    assert _loop(0, messages=back).unanswered() == [] and _loop().unanswered() == []


def test_a_note_begins_the_prompt_and_is_not_kept() -> None:
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert _loop(note="Files: none").call.messages == [{"role": "system", "content": "Files: none"}, *ASKED]
    loop = _loop(note="Files: none", messages=system)
    assert loop.call.messages == [{"role": "system", "content": "Files: none\n\nBe brief."}, *ASKED]
    assert loop.messages == system


def test_arguments_that_are_no_object_stay_text() -> None:
    loop = _loop()
    _round(loop, _called(0, CODE, "[1"))
    loop.turn()
    assert loop.messages[-1]["tool_calls"][0]["function"]["arguments"] == "[1"


_RAN = {"role": "assistant", "content": "Wait. ", "tool_calls": [{"id": "a", "function": {"name": CODE}}]}
_RESULT = {"role": "tool", "content": "42", "tool_call_id": "a"}
_REPLY = {"role": "assistant", "content": "It is 42."}
_OTHER = {"role": "assistant", "content": "Other"}
_MORE = {"role": "user", "content": "And 8?"}
_STORED = [*ASKED, _RAN, _RESULT, _REPLY]
_AGAIN = {**_RAN, "tool_calls": [{"id": "c", "function": {"name": CODE}}]}
_CLIENTS = {"role": "assistant", "content": None, "tool_calls": [{"id": "b", "function": {"name": OWN}}]}
_CLIENTS_RESULT = {"role": "tool", "content": "sun", "tool_call_id": "b"}


@pytest.mark.parametrize(
    ("incoming", "joined"),
    [
        ([*ASKED, _REPLY, _MORE], [*_STORED, _MORE]),
        ([*ASKED, {**_REPLY, "content": "Wait. It is 42."}, _MORE], [*_STORED, _MORE]),
        (
            [*ASKED, {**_REPLY, "content": "Other"}, _MORE],
            [*ASKED, _RAN, _RESULT, {**_REPLY, "content": "Other"}, _MORE],
        ),
        ([_MORE], [_MORE]),
        (ASKED, [*ASKED, _RAN, _RESULT]),
        ([*ASKED, _AGAIN], [*ASKED, _RAN, _RESULT, _AGAIN]),
        ([*_STORED, _MORE], [*_STORED, _MORE]),
        ([], []),
    ],
)
def test_turns_of_tools_of_the_session_stand_where_they_were(incoming: Any, joined: Any) -> None:
    assert spliced(_STORED, incoming) == joined
    assert spliced([], incoming) == incoming


def test_the_clients_own_calls_are_not_told_twice() -> None:
    stored = [*ASKED, _RAN, _RESULT, _CLIENTS, _CLIENTS_RESULT, _REPLY]
    incoming = [*ASKED, _CLIENTS, _CLIENTS_RESULT, _REPLY, _MORE]
    assert spliced(stored, incoming) == [*stored, _MORE]


def test_calls_that_come_back_one_by_one_are_those_of_the_session() -> None:
    both = {
        "role": "assistant",
        "content": None,
        "tool_calls": [*_RAN["tool_calls"], *_CLIENTS["tool_calls"]],
    }
    stored = [*ASKED, both, _RESULT, _CLIENTS_RESULT, _REPLY]
    alone = {**_RAN, "content": None}
    told = [*ASKED, alone, {**_RESULT, "content": "{}"}, _CLIENTS, _CLIENTS_RESULT, _REPLY, _MORE]
    assert spliced(stored, told) == [*stored, _MORE]


def test_arguments_keep_the_digits_of_long_numbers() -> None:
    loop = _loop()
    text = '{"code":"1","n":123456789012345678901234567890}'
    _round(loop, _called(0, CODE, text))
    loop.turn()
    assert loop.messages[-1]["tool_calls"][0]["function"]["arguments"] == text
