"""Events and answers of Messages, from recorded events, byte by byte."""

from __future__ import annotations

import msgspec
import orjson

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from frontend.generation.outcome import Outcome
from frontend.protocols.messages.messages import PING, MessageEvents, MessagesAnswer, answer_of
from ipc.wire.streams import TokenLogprob

_ENDED = Ended(5, 3, 1, 2, 0.25, 0.25)
_LOGPROB = TokenLogprob(9, b"a", -0.5, [(9, b"a", -0.5)])
_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message",'
    b'"role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,'
    b'"usage":{"input_tokens":5,"output_tokens":0}}}\n\n'
)
_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"%s","stop_sequence":%s},'
    b'"usage":{"input_tokens":5,"output_tokens":3}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def _stream(*events: Event, logprobs: bool = False) -> bytes:
    made = MessageEvents("msg_1", "m", logprobs=logprobs)
    return b"".join(piece for event in events for piece in made.feed([event]))


def _answer(*events: Event, logprobs: bool = False) -> MessagesAnswer:
    outcome = Outcome(1)
    outcome.take(events)
    return answer_of("msg_1", "m", outcome, logprobs)


def _opened(index: int, block: bytes) -> bytes:
    return (
        b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%s}\n\n'
        % (index, block)
    )


def _delta(index: int, delta: bytes) -> bytes:
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%s}\n\n' % (
        index,
        delta,
    )


def _closed(index: int) -> bytes:
    return b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % index


_THOUGHT = b'{"type":"thinking","thinking":"","signature":""}'
_SPOKEN = b'{"type":"text","text":""}'


def test_text_is_one_block_between_start_and_stop() -> None:
    told = _stream(Started(5, 2), Text(0, 'é"\n'), Text(0, "you"), Finished(0, "stop", tokens=3), _ENDED)
    assert told == (
        _START
        + _opened(0, _SPOKEN)
        + _delta(0, b'{"type":"text_delta","text":"\xc3\xa9\\"\\n"}')
        + _delta(0, b'{"type":"text_delta","text":"you"}')
        + _closed(0)
        + _END % (b"end_turn", b"null")
    )


def test_the_start_leaves_before_any_text() -> None:
    assert _stream(Started(5)) == _START


def test_blocks_come_in_the_order_of_arrival() -> None:
    told = _stream(
        Started(5),
        Reasoning(0, "hm"),
        Text(0, "so"),
        Reasoning(0, "or"),
        *Called(0, 0, "call-1", "f", '{"a":1}').events(),
        *Called(0, 1, "call-2", "g", "{}").events(),
        Text(0, "done"),
        Finished(0, "stop", tokens=3),
        _ENDED,
    )
    call = b'{"type":"tool_use","id":"call-%d","name":"%s","input":{}}'
    assert told == (
        _START
        + _opened(0, _THOUGHT)
        + _delta(0, b'{"type":"thinking_delta","thinking":"hm"}')
        + _closed(0)
        + _opened(1, _SPOKEN)
        + _delta(1, b'{"type":"text_delta","text":"so"}')
        + _closed(1)
        + _opened(2, _THOUGHT)
        + _delta(2, b'{"type":"thinking_delta","thinking":"or"}')
        + _closed(2)
        + _opened(3, call % (1, b"f"))
        + _delta(3, b'{"type":"input_json_delta","partial_json":"{\\"a\\":1}"}')
        + _closed(3)
        + _opened(4, call % (2, b"g"))
        + _delta(4, b'{"type":"input_json_delta","partial_json":"{}"}')
        + _closed(4)
        + _opened(5, _SPOKEN)
        + _delta(5, b'{"type":"text_delta","text":"done"}')
        + _closed(5)
        + _END % (b"tool_use", b"null")
    )


def test_an_empty_answer_has_no_block() -> None:
    events: list[Event] = [Started(5), Text(0, ""), Finished(0, "length"), _ENDED]
    assert _stream(*events) == _START + _END % (b"max_tokens", b"null")
    assert _answer(*events).content == []


def test_a_stop_text_is_named() -> None:
    events: list[Event] = [Started(5), Finished(0, "stop", stop="END"), _ENDED]
    assert _stream(*events) == _START + _END % (b"stop_sequence", b'"END"')
    answer = _answer(*events)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


def test_log_probabilities_stand_beside_their_delta() -> None:
    events: list[Event] = [Started(5), Text(0, "a", logprobs=[_LOGPROB]), Finished(0, "stop"), _ENDED]
    entry = (
        b'{"token":"a","logprob":-0.5,"bytes":[97],"token_id":9,'
        b'"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97],"token_id":9}]}'
    )
    assert b'"delta":{"type":"text_delta","text":"a"},"logprobs":{"content":[%s]}}' % entry in _stream(
        *events, logprobs=True
    )
    assert b"logprobs" not in _stream(*events)
    assert _answer(*events, logprobs=True).logprobs == {"content": [orjson.loads(entry)]}


def test_a_whole_answer() -> None:
    answer = _answer(
        Started(5),
        Reasoning(0, "h"),
        Reasoning(0, "m"),
        Text(0, "so"),
        *Called(0, 0, "call-1", "f", '{"a":[1]}').events(),
        Finished(0, "tool_calls", tokens=3),
        _ENDED,
    )
    assert msgspec.json.encode(answer) == (
        b'{"id":"msg_1","type":"message","role":"assistant","content":['
        b'{"type":"thinking","thinking":"hm","signature":""},{"type":"text","text":"so"},'
        b'{"type":"tool_use","id":"call-1","name":"f","input":{"a":[1]}}],"model":"m",'
        b'"stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":5,"output_tokens":3}}'
    )


def test_the_input_of_a_call_is_told_to_the_last_digit() -> None:
    arguments = '{"a":12345678901234567890123,"b":%s}' % ("1" * 400)
    answer = _answer(Started(5), *Called(0, 0, "c", "f", arguments).events(), Finished(0, "stop"), _ENDED)
    assert f'"input":{arguments}}}' in msgspec.json.encode(answer).decode()


def test_a_call_that_the_limit_cut_off_ends_for_the_limit() -> None:
    answer = _answer(Started(5), *Called(0, 0, "c", "f", "{}").events(), Finished(0, "length"), _ENDED)
    assert answer.stop_reason == "max_tokens"


def test_the_ping_has_its_name() -> None:
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_tokens_of_calls_and_of_the_end_have_their_entries() -> None:
    events: list[Event] = [
        Started(5),
        *Called(0, 0, "toolu_1", "f", "{}", [_LOGPROB]).events(),
        Finished(0, "stop", logprobs=[_LOGPROB, _LOGPROB]),
        _ENDED,
    ]
    assert len((_answer(*events, logprobs=True).logprobs or {})["content"]) == 3
    streamed = [
        orjson.loads(line[6:])
        for line in _stream(*events, logprobs=True).split(b"\n")
        if line[:5] == b"data:"
    ]
    told = {event["type"]: len(event["logprobs"]["content"]) for event in streamed if "logprobs" in event}
    assert told == {"content_block_delta": 1, "message_delta": 2}
    assert b"logprobs" not in _stream(*events)
