"""Chunks and answers of chat and completions, from recorded events, byte by byte."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from frontend.engine.events import (
    Arguments,
    CallBegun,
    Called,
    CallEnded,
    Ended,
    Event,
    Finished,
    Reasoning,
    Started,
    Text,
)
from frontend.generation.outcome import Outcome
from frontend.protocols.chat import completions, output
from frontend.protocols.chat.completions import CompletionChunks, TokenTable
from frontend.protocols.chat.output import ChatChunks, Envelope
from ipc.wire.streams import TokenLogprob

_USAGE = (
    b'{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"avg_tok_per_sec":10.667,"avg_prompt_tok_per_sec":20.0,'
    b'"avg_compl_tok_per_sec":6.0,"total_time_sec":0.75,"total_prompt_time_sec":0.25,"total_completion_time_sec":0.5,'
    b'"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":1}}'
)
_HEAD = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","system_fingerprint":"local",'
_ENDED = Ended(5, 3, 1, 2, 0.25, 0.5)
_LOGPROB = TokenLogprob(9, b"\xc3\xa9", -0.5, [(9, b"\xc3\xa9", -0.5), (3, b"\xff", float("-inf"))])


def _chunks(choices: int = 1, **options: bool) -> ChatChunks:
    chosen: Any = {"logprobs": False, "include_usage": False} | options
    return ChatChunks(Envelope("chatcmpl-1", output.CHUNK, 7, "m"), choices, **chosen)


def test_text_leaves_as_it_comes_and_the_last_chunk_has_the_usage() -> None:
    chunks = _chunks()
    assert chunks.feed([Started(5, 2)]) == []
    assert chunks.feed([Reasoning(0, "hm"), Text(0, 'é"\n')]) == [
        _HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":null,'
        b'"reasoning_content":"hm"},"finish_reason":null,"logprobs":null}],"usage":null}',
        _HEAD
        + b'"choices":[{"index":0,"delta":{"role":"assistant","content":"\xc3\xa9\\"\\n","tool_calls":null},'
        b'"finish_reason":null,"logprobs":null}],"usage":null}',
    ]
    assert chunks.feed([Finished(0, "stop", tokens=3)]) == []
    assert chunks.feed([_ENDED]) == [
        _HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":"","tool_calls":null},'
        b'"finish_reason":"stop","logprobs":null}],"usage":' + _USAGE + b"}"
    ]


_CALLS: list[Event] = [
    Text(0, "well"),
    *Called(0, 0, "call-1", "f", '{"a":1}').events(),
    *Called(0, 1, "call-2", "g", "{}").events(),
    Finished(0, "stop", tokens=3),
    _ENDED,
]


def test_a_call_leaves_as_its_pieces_come() -> None:
    delta = b'"choices":[{"index":%d,"delta":{"role":"assistant","content":null,"tool_calls":%s},'
    end = b'"finish_reason":null,"logprobs":null}],"usage":null}'
    begun = b'[{"index":%d,"id":"call-%d","type":"function","function":{"name":"%s","arguments":""}}]'
    piece = b'[{"index":%d,"function":{"arguments":"%s"}}]'
    events: list[Event] = [
        CallBegun(1, 0, "call-1", "f"),
        CallBegun(0, 0, "call-2", "g"),
        Arguments(1, '{"a":'),
        Arguments(1, "1}"),
        CallEnded(1),
        CallBegun(1, 1, "call-3", "h"),
        CallEnded(0),
        CallEnded(1, is_whole=False),
        Finished(1, "length"),
        Finished(0, "stop", tokens=3),
        _ENDED,
    ]
    *told, last = _chunks(2).feed(events)
    assert told == [
        _HEAD + delta % (1, begun % (0, 1, b"f")) + end,
        _HEAD + delta % (0, begun % (0, 2, b"g")) + end,
        _HEAD + delta % (1, piece % (0, b'{\\"a\\":')) + end,
        _HEAD + delta % (1, piece % (0, b"1}")) + end,
        _HEAD + delta % (1, begun % (1, 3, b"h")) + end,
        _HEAD + delta % (1, b"null") + end.replace(b":null", b':"length"', 1),
    ]
    assert last.startswith(_HEAD + delta % (0, b"null") + b'"finish_reason":"tool_calls"')


def test_calls_in_one_piece_leave_together_with_their_finish_reason() -> None:
    text, last = _chunks(stream_arguments=False).feed(_CALLS)
    assert orjson.loads(text)["choices"][0]["delta"]["content"] == "well"
    assert last == (
        _HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":['
        b'{"index":0,"id":"call-1","type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}},'
        b'{"index":1,"id":"call-2","type":"function","function":{"name":"g","arguments":"{}"}}]},'
        b'"finish_reason":"tool_calls","logprobs":null}],"usage":' + _USAGE + b"}"
    )


def test_choices_interleave_and_only_the_last_to_finish_has_the_usage() -> None:
    events: list[Event] = [
        Text(1, "b"), Text(0, "a"), Finished(1, "length"), Text(0, "c"), Finished(0, "stop"), _ENDED,
    ]  # fmt: skip
    told = [orjson.loads(chunk) for chunk in _chunks(2).feed(events)]
    assert [chunk["choices"][0]["index"] for chunk in told] == [1, 0, 1, 0, 0]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None, None, "length", None, "stop"]
    assert [chunk["usage"] is None for chunk in told] == [True, True, True, True, False]


def test_include_usage_adds_a_chunk_without_choices() -> None:
    finish, last = _chunks(include_usage=True).feed([Finished(0, "stop"), _ENDED])
    assert orjson.loads(finish)["choices"][0]["finish_reason"] == "stop"
    assert orjson.loads(finish)["usage"] is None, "clients add up the usage of all chunks"
    assert last == _HEAD + b'"choices":[],"usage":' + _USAGE + b"}"


def test_log_probabilities_have_text_bytes_and_the_id_of_each_token() -> None:
    [chunk] = _chunks(logprobs=True).feed([Text(0, "é", logprobs=[_LOGPROB])])
    assert chunk.partition(b'"logprobs":')[2] == (
        b'{"content":[{"token":"\xc3\xa9","logprob":-0.5,"bytes":[195,169],"token_id":9,"top_logprobs":['
        b'{"token":"\xc3\xa9","logprob":-0.5,"bytes":[195,169],"token_id":9},'
        b'{"token":"\xef\xbf\xbd","logprob":-9999.0,"bytes":[255],"token_id":3}]}]}}],"usage":null}'
    )


def _outcome(*events: Event, choices: int = 1) -> Outcome:
    outcome = Outcome(choices)
    outcome.take([Started(5, 2), *events])
    return outcome


def test_a_whole_answer_has_message_reason_and_usage() -> None:
    outcome = _outcome(
        Reasoning(0, "h"),
        Reasoning(0, "m"),
        Text(0, "a"),
        Text(0, "b"),
        Finished(0, "stop", "END", 3),
        _ENDED,
    )
    envelope = Envelope("chatcmpl-1", output.OBJECT, 7, "m")
    assert msgspec.json.encode(output.answer_of(envelope, outcome, False)) == (
        b'{"id":"chatcmpl-1","object":"chat.completion","created":7,"model":"m","system_fingerprint":"local",'
        b'"choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"ab","tool_calls":null,'
        b'"reasoning_content":"hm"},"logprobs":null,"stop_sequence":"END"}],"usage":' + _USAGE + b"}"
    )


def test_a_whole_answer_of_calls_has_no_content() -> None:
    outcome = _outcome(*Called(0, 0, "call-1", "f", "{}").events(), Finished(0, "tool_calls"), _ENDED)
    [choice] = msgspec.to_builtins(
        output.answer_of(Envelope("x", output.OBJECT, 7, "m"), outcome, True).choices
    )
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (choice["finish_reason"], choice["logprobs"]) == ("tool_calls", {"content": []})


def test_an_answer_that_was_cut_off_tells_what_is_known() -> None:
    answer = output.answer_of(Envelope("x", "y", 7, "m"), _outcome(Text(0, "half")), False)
    assert answer.choices[0].finish_reason == "canceled"
    assert (answer.usage.prompt_tokens, answer.usage.avg_tok_per_sec) == (5, 0.0)


_TEXT_HEAD = (
    b'{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","system_fingerprint":"local",'
)
_TEXT_ENVELOPE = Envelope("cmpl-1", completions.OBJECT, 7, "m")


def test_chunks_of_a_completion_begin_with_the_echo() -> None:
    chunks = CompletionChunks(_TEXT_ENVELOPE, ["once "], 1, logprobs=False, include_usage=False)
    assert chunks.feed([Started(5), Text(0, "a"), Finished(0, "length"), _ENDED]) == [
        _TEXT_HEAD
        + b'"choices":[{"index":0,"text":"once ","finish_reason":null,"logprobs":null}],"usage":null}',
        _TEXT_HEAD + b'"choices":[{"index":0,"text":"a","finish_reason":null,"logprobs":null}],"usage":null}',
        _TEXT_HEAD
        + b'"choices":[{"index":0,"text":"","finish_reason":"length","logprobs":null}],"usage":'
        + _USAGE
        + b"}",
    ]


def test_a_completion_has_log_probabilities_in_columns() -> None:
    chunks = CompletionChunks(_TEXT_ENVELOPE, [""], 1, logprobs=True, include_usage=False)
    chunks.feed([Text(0, "é", logprobs=[_LOGPROB])])
    [chunk] = chunks.feed([Text(0, "é", logprobs=[_LOGPROB])])
    assert orjson.loads(chunk)["choices"][0]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5, "\ufffd": -9999.0}],
        "text_offset": [1],
    }


def test_a_whole_completion_has_its_choices_in_order() -> None:
    outcome = _outcome(
        Text(1, "b"), Text(0, "a"), Finished(0, "stop"), Finished(1, "stop"), _ENDED, choices=2
    )
    completed = [completions.Completed(choice, choice, "x") for choice in outcome.choices]
    answer = completions.answer_of(_TEXT_ENVELOPE, completed, outcome.counts, False)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "xa"), (1, "xb")]
    assert msgspec.json.encode(answer.usage) == _USAGE


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    """A client finds out by the highest of the likeliest whether the model would have chosen the token."""
    half = TokenLogprob(5, b"\xfe", -3.0, [(3, b"\xff", -0.25)])
    [told] = TokenTable().columns([half])["top_logprobs"]
    assert told == {"\ufffd": -0.25}


def test_offsets_count_the_characters_of_the_text() -> None:
    halves = [TokenLogprob(number, raw, -1.0) for number, raw in enumerate([b"\xf0\x9f", b"\x98\x80", b"a"])]
    chunks = CompletionChunks(_TEXT_ENVELOPE, ["ab"], 1, logprobs=True, include_usage=False)
    _, first, second = chunks.feed(
        [Text(0, "\U0001f600", logprobs=halves[:2]), Text(0, "a", logprobs=halves[2:])]
    )
    assert orjson.loads(first)["choices"][0]["logprobs"]["text_offset"] == [2, 2]
    assert orjson.loads(second)["choices"][0]["logprobs"]["text_offset"] == [3]


_END_TOKEN = TokenLogprob(2, b"<end>", -0.1, [(2, b"<end>", -0.1)], is_silent=True)
_WITHOUT_TEXT: list[Event] = [
    Started(5),
    Text(0, "a", logprobs=[_LOGPROB]),
    *Called(0, 0, "call_1", "f", "{}", [_LOGPROB, _LOGPROB]).events(),
    Finished(0, "stop", tokens=4, logprobs=[_END_TOKEN]),
    _ENDED,
]


def test_tokens_without_text_have_their_entries_whole_and_streamed() -> None:
    outcome = _outcome(*_WITHOUT_TEXT)
    answer = output.answer_of(Envelope("x", output.OBJECT, 7, "m"), outcome, True)
    whole = (answer.choices[0].logprobs or {})["content"]
    assert [entry["token_id"] for entry in whole] == [9, 9, 9, 2]
    assert whole[-1]["token"] == "<end>"
    assert whole[-1]["bytes"] == []
    for streams in (True, False):
        made = _chunks(logprobs=True, stream_arguments=streams).feed(_WITHOUT_TEXT)
        told = [orjson.loads(chunk)["choices"][0]["logprobs"] for chunk in made]
        assert [entry for each in told if each for entry in each["content"]] == whole
        silent = _chunks(logprobs=False, stream_arguments=streams).feed(_WITHOUT_TEXT)
        assert all(orjson.loads(chunk)["choices"][0]["logprobs"] is None for chunk in silent)


def test_columns_have_tokens_without_text_which_move_no_offset() -> None:
    tokens = [_END_TOKEN, TokenLogprob(7, b"b", -0.5, [])]
    chunks = CompletionChunks(_TEXT_ENVELOPE, [""], 1, logprobs=True, include_usage=False)
    events = [Text(0, "b", logprobs=tokens), Finished(0, "stop", logprobs=[_END_TOKEN]), _ENDED]
    told = [orjson.loads(chunk)["choices"][0]["logprobs"] for chunk in chunks.feed(events)]
    assert [each["tokens"] for each in told] == [["<end>", "b"], ["<end>"]]
    assert [each["text_offset"] for each in told] == [[0, 0], [1]]
