"""Responses and their named events, from recorded events, byte by byte; and the log that tells events again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from frontend.engine.events import (
    Asked,
    Called,
    Calling,
    Completed,
    Ended,
    Event,
    Finished,
    Produced,
    Reasoning,
    Session,
    Started,
    Text,
)
from frontend.protocols.responses import event_bytes, store
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.resources import NamedEvents
from ipc.errors import Draining, InferenceFailed, InvalidInput, PenstockError, WorkerLost
from ipc.wire.streams import TokenLogprob

_BEGUN: dict[str, Any] = {"id": "resp_1", "status": "queued", "output": [], "tools": []}
_ENDED = Ended(5, 3, reasoning_tokens=1, cached_tokens=4)
_PLACE = '"item_id":"msg_1_0","output_index":0,"content_index":0'
_PART = '{"type":"output_text","text":"Hi you","annotations":[]}'


def _told(events: Sequence[Event], begun: dict[str, Any] = _BEGUN, after: int = -1) -> list[str]:
    """The events of a stream in the form `name json`; the instant of completion is 9."""
    named = NamedEvents(after)
    output = Output(begun, named.tell)
    named.queue(begun)
    named.work(begun)
    output.take(events)
    whole = resource.ended(begun, output)
    if "completed_at" in whole:
        assert whole["completed_at"] > 1.7e9
        whole["completed_at"] = 9
    text = named.end(whole).decode()
    assert text.endswith("data: [DONE]\n\n")
    told = []
    for event in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        head = f'{{"type":"{name[7:]}","sequence_number":'
        assert data[6:].startswith(head)
        told.append(f"{name[7:]} {data[6 + len(head) : -1]}")
    return told


def _item(status: str, *parts: str) -> str:
    head = '"item":{"type":"message","id":"msg_1_0","role":"assistant",'
    return f'{head}"status":"{status}","content":[{",".join(parts)}]}}'


def test_text_is_told_by_the_events_of_the_contract_in_their_order() -> None:
    told = _told([Started(5), Text(0, "Hi"), Text(0, " you"), Finished(0, "stop"), _ENDED])
    assert told[:2] == [
        'response.created 0,"response":{"id":"resp_1","status":"queued","output":[],"tools":[]}',
        'response.in_progress 1,"response":{"id":"resp_1","status":"in_progress","output":[],"tools":[]}',
    ]
    empty = _PART.replace("Hi you", "")
    assert told[2:-1] == [
        f'response.output_item.added 2,"output_index":0,{_item("in_progress")}',
        f'response.content_part.added 3,{_PLACE},"part":{empty}',
        f'response.output_text.delta 4,{_PLACE},"delta":"Hi","logprobs":[]',
        f'response.output_text.delta 5,{_PLACE},"delta":" you","logprobs":[]',
        f'response.output_text.done 6,{_PLACE},"text":"Hi you","logprobs":[]',
        f'response.content_part.done 7,{_PLACE},"part":{_PART}',
        f'response.output_item.done 8,"output_index":0,{_item("completed", _PART)}',
    ]
    name, _, data = told[-1].partition(' 9,"response":')
    assert name == "response.completed"
    assert orjson.loads(data) == {
        **_BEGUN,
        "status": "completed",
        "completed_at": 9,
        "output": [orjson.loads(_item("completed", _PART).removeprefix('"item":'))],
        "output_text": "Hi you",
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 8,
        },
    }


def _names(told: Sequence[str]) -> list[str]:
    return [event.partition(" ")[0].removeprefix("response.") for event in told]


def test_items_come_in_the_order_in_which_they_were_written() -> None:
    begun = _BEGUN | {
        "tools": [{"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "f"}]}]
    }
    told = _told(
        [
            Started(5),
            Reasoning(0, "hm"),
            *Called(0, 0, "call-1", "g", '{"a":1}').events(),
            Text(0, "Hi"),
            *Called(0, 1, "call-2", "crm.f", "{}").events(),
            Finished(0, "tool_calls"),
            _ENDED,
        ],
        begun,
    )
    item = ["output_item.added", "output_item.done"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = ["reasoning_text.delta", "reasoning_text.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert _names(told)[2:-1] == [
        *(item[0], *thought, item[1]),
        *(item[0], *call, item[1]),
        *(item[0], *text, item[1]),
        *(item[0], *call, item[1]),
    ]
    assert told[6] == (
        'response.output_item.added 6,"output_index":1,"item":{"type":"function_call","id":"fc_1_1",'
        '"call_id":"call-1","name":"g","arguments":"","status":"in_progress"}'
    )
    place = '"item_id":"fc_1_1","output_index":1,"call_id":"call-1"'
    assert told[7] == f'response.function_call_arguments.delta 7,{place},"delta":"{{\\"a\\":1}}"'
    assert (
        told[8] == f'response.function_call_arguments.done 8,{place},"name":"g","arguments":"{{\\"a\\":1}}"'
    )
    assert told[19].endswith('"name":"f","namespace":"crm","arguments":"{}","status":"completed"}')
    whole = orjson.loads(told[-1].partition('"response":')[2])
    assert [item["type"] for item in whole["output"]] == [
        "reasoning",
        "function_call",
        "message",
        "function_call",
    ]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (whole["reasoning"], whole["output_text"], whole["status"]) == ("hm", "Hi", "completed")


def test_items_that_take_turns_and_choices_have_numbers_of_their_own() -> None:
    events: list[Event] = [Text(0, "a"), Text(1, "x"), Reasoning(0, "b"), Text(0, "c"), Text(1, "y")]
    told = _told([Started(5), *events, Finished(1, "stop"), Finished(0, "stop"), _ENDED])
    whole = orjson.loads(told[-1].partition('"response":')[2])
    texts = [(item["type"], item["content"][0]["text"]) for item in whole["output"]]
    assert texts == [("message", "a"), ("message", "xy"), ("reasoning", "b"), ("message", "c")]
    assert [item["id"] for item in whole["output"]] == ["msg_1_0", "msg_1_1", "rs_1_2", "msg_1_3"]


def test_a_choice_that_gives_nothing_is_an_empty_message() -> None:
    told = _told([Started(5), Finished(0, "stop"), _ENDED])
    assert _names(told)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_the_bound_on_tokens_makes_a_response_incomplete() -> None:
    told = _told([Started(5), Text(0, "Hi"), Finished(0, "length"), _ENDED])
    assert told[-1].startswith("response.incomplete ")
    whole = orjson.loads(told[-1].partition('"response":')[2])
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert "completed_at" not in whole and "error" not in whole


def test_log_probabilities_stand_on_deltas_and_on_the_whole_text() -> None:
    tokens = [TokenLogprob(7, b"H", -0.5, [(8, b"h", -1.5)])]
    told = _told([Started(5), Text(0, "H", logprobs=tokens), Finished(0, "stop"), _ENDED])
    entry = {"token": "H", "logprob": -0.5, "bytes": [72], "token_id": 7}
    entry["top_logprobs"] = [{"token": "h", "logprob": -1.5, "bytes": [104], "token_id": 8}]
    assert orjson.loads("{" + told[4].partition(",")[2] + "}")["logprobs"] == [entry]
    whole = orjson.loads(told[-1].partition('"response":')[2])
    assert whole["output"][0]["content"][0]["logprobs"] == [entry]


@pytest.mark.parametrize("after", range(11))
def test_a_stream_that_is_told_again_goes_on_behind_an_event(after: int) -> None:
    events = [Started(5), Text(0, "Hi"), Text(0, " you"), Finished(0, "stop"), _ENDED]
    assert _told(events, after=after) == _told(events)[after + 1 :]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InferenceFailed("x"), "model_error", "server_error"),
        (WorkerLost("x"), "model_error", "server_error"),
        (InvalidInput("x"), "validation_error", "invalid_prompt"),
        (PenstockError("x"), "internal_error", "server_error"),
        (Draining("x"), "internal_error", "server_overloaded"),
    ],
)
def test_a_response_that_fails_has_an_error_and_the_output_so_far(
    error: PenstockError, kind: str, code: str
) -> None:
    output = Output(_BEGUN)
    output.take([Started(5, 2), Reasoning(0, "hm", tokens=4), Text(0, "Hi", tokens=2)])
    whole = resource.failed(_BEGUN, output, error)
    assert whole["error"] == {"type": kind, "code": code, "message": "x"}
    assert (whole["status"], whole["output_text"], whole["output"][1]["status"]) == (
        "failed",
        "Hi",
        "incomplete",
    )
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 4}
    assert "usage" not in resource.failed(_BEGUN, Output(_BEGUN), error)


def test_an_error_event_has_its_message_twice() -> None:
    named = NamedEvents()
    named.queue(_BEGUN)
    named.taken()
    assert named.fail(InvalidInput("grammar: no")) == (
        b'event: error\ndata: {"type":"error","sequence_number":1,'
        b'"error":{"type":"validation_error","message":"grammar: no"},'
        b'"message":"grammar: no","code":null,"param":null}\n\ndata: [DONE]\n\n'
    )


def test_the_log_gives_events_back_with_neighbouring_texts_joined() -> None:
    logprobs = [TokenLogprob(1, b"\xff", -1.0, [(2, b"a", -3.0)])]
    kept: list[Event] = [Text(1, "c", logprobs=logprobs), Text(1, "d"), Reasoning(1, "e"), Text(1, "f")]
    kept += [
        Calling(0, "a", "t", "{}", {"tool_type": "shell"}),
        Asked("appr_1", "s", 0, {"kind": "shell"}, {"commands": []}),
    ]
    kept += [
        Produced({"id": "file_1"}),
        Completed(0, "a", "t", {"tool_type": "shell"}, {"round": 0}),
        Session("s"),
    ]
    kept += [*Called(0, 0, "id", "f", "{}").events(), Finished(0, "stop", "END", 3, 1), _ENDED]
    given = [Started(4), Text(0, "a"), Text(0, "b", tokens=2), *kept]
    assert event_bytes.decode(event_bytes.encode(given)) == [Started(4), Text(0, "ab", tokens=3), *kept]
    assert event_bytes.decode(event_bytes.encode([])) == []


def test_another_form_of_events_has_another_file() -> None:
    """Whoever changes this list raises the number of the file: rows of an older build would be read as other events."""
    assert store.FILE == "responses-3.db"
    fields = [getattr(kind, "__struct_fields__", None) or kind.__slots__ for kind in event_bytes.KINDS]
    assert [
        " ".join((kind.__name__, *names)) for kind, names in zip(event_bytes.KINDS, fields, strict=True)
    ] == [
        "Started prompt_tokens cached_tokens",
        "Text choice text tokens logprobs",
        "Reasoning choice text tokens logprobs",
        "CallBegun choice index id name logprobs",
        "Arguments choice text logprobs",
        "CallEnded choice is_whole logprobs",
        "Finished choice reason stop tokens reasoning_tokens logprobs",
        "Ended prompt_tokens completion_tokens reasoning_tokens cached_tokens prompt_s completion_s",
        "Calling round id name arguments data server",
        "Asked approval_id session_id round tool arguments",
        "Produced file",
        "Completed round id name data record status sources",
        "Session id",
    ]


def test_the_end_token_of_a_text_has_its_entry() -> None:
    tokens = [TokenLogprob(7, b"H", -0.5, []), TokenLogprob(2, b"<end>", -0.1, [], is_silent=True)]
    events = [Started(5), Text(0, "H", logprobs=tokens[:1]), Finished(0, "stop", logprobs=tokens[1:]), _ENDED]
    told = [orjson.loads("{" + each.partition(",")[2] + "}") for each in _told(events)]
    streamed = [entry["token_id"] for each in told if "delta" in each for entry in each["logprobs"]]
    assert streamed == [7, 2]
    [done] = [each for each in told if "text" in each and "logprobs" in each]
    assert [entry["token_id"] for entry in done["logprobs"]] == [7, 2]
    assert done["text"] == "H"
