"""A decoupled model through a server: over gRPC streams, as events, and where it cannot be asked."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from ipc.protos import trtis_v1_pb2 as v1
from ipc.wire.streams import WINDOW
from tests.conformance import trtis
from tests.harness.decoupled import FINAL, MODEL, Events, message, number_of
from tests.harness.rpc import Rpc, address_of, failure_of, grpc_settings
from tests.harness.server import PATIENCE_S, Server, serving, wait_until
from tests.harness.streams import record_of
from tests.tiny.programs import SCRIPTED, tensor, write_repository

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("decoupled")
    repository = write_repository(place / "models", [MODEL, "add_sub"], SCRIPTED)
    sides = tensor("input", "INPUT", "INT32", [1]) + tensor("output", "OUTPUT", "INT32", [1])
    for name, more in (("sequenced", "sequence_batching { }"), ("exported", "")):
        (repository / name / "1").mkdir(parents=True)
        program = "model.py" if more else "model.pt2"
        (repository / name / "1" / program).write_text("")
        config = f"max_batch_size: 1\n{sides}{more} model_transaction_policy {{ decoupled: true }}"
        (repository / name / "config.pbtxt").write_text(config)
    with serving(place, ("fake/echo",), _settings(repository), supervised=False) as running:
        yield running


def _settings(repository: Path, **more: Any) -> dict[str, Any]:
    return grpc_settings(
        **{
            "repository.dirs": repository,
            "repository.allow_python": "true",
            "arena.bytes": 32 * MIB,
            "arena.lease_copy_after_s": 0.2,
            "worker.heartbeat_timeout_s": 60,
            **more,
        }
    )


@pytest.fixture
def record(tmp_path: Path) -> tuple[Path, Callable[[], list[str]]]:
    """A file for the model, and what it has noted there."""
    path = tmp_path / "record"
    return path, record_of(path)


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    """After each test no request is in work and the arena is free."""
    yield
    wait_until(lambda: server.metric("penstock_requests_in_flight") == 0, what="the end of all requests")
    wait_until(lambda: server.metric("penstock_shm_bytes_used") == 0, what="a free arena")


class Talk:
    """A stream that messages are put into one by one."""

    def __init__(self, rpc: Rpc, **options: Any) -> None:
        self._messages: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
        self.answers = rpc.stream(iter(self._messages.get, None), **options)

    def say(self, *messages: pb.ModelInferRequest) -> None:
        """Send."""
        for made in messages:
            self._messages.put(made)

    def end(self) -> list[pb.ModelStreamInferResponse]:
        """Say that this was all; what is still answered."""
        self.hang_up()
        return list(self.answers)

    def hang_up(self) -> None:
        """Say that this was all."""
        self._messages.put(None)


def add_sub(request_id: str) -> pb.ModelInferRequest:
    """A message for a model that is not decoupled."""
    ones = np.ones(16, np.int32).tobytes()
    made = pb.ModelInferRequest(model_name="add_sub", id=request_id, raw_input_contents=[ones, ones])
    for name in ("INPUT0", "INPUT1"):
        made.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_a_stream_has_all_responses_in_order(server: Server, count: int) -> None:
    with Rpc(address_of(server)) as rpc:
        answers = list(rpc.stream([message(count, "one")]))
        assert [number_of(answer) for answer in answers] == list(range(count))
        assert {answer.infer_response.id for answer in answers} <= {"one"}
        ended = list(rpc.stream([message(count, "two", empty_final=True)]))
        assert [number_of(answer) for answer in ended] == [*range(count), -1]
        assert ended[-1].infer_response.id == "two"


def test_requests_of_one_stream_are_answered_side_by_side(server: Server) -> None:
    with Rpc(address_of(server)) as rpc:
        talk = Talk(rpc)
        talk.say(message(1_000_000, "endless", sleep_ms=20))
        answers = [next(talk.answers)]
        talk.say(add_sub("first"), message(2, "short"), add_sub("second"))
        while sum(answer.infer_response.id != "endless" for answer in answers) < 4:
            answers.append(next(talk.answers))
        talk.answers.cancel()
        talk.hang_up()
    for name in ("endless", "short"):
        numbers = [number_of(answer) for answer in answers if answer.infer_response.id == name]
        assert numbers == list(range(len(numbers)))
    plain = [answer for answer in answers if answer.infer_response.model_name == "add_sub"]
    assert [answer.infer_response.id for answer in plain] == ["first", "second"]
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in plain)


def test_requests_to_one_model_overlap_while_one_of_them_waits(server: Server) -> None:
    with Rpc(address_of(server)) as rpc:
        talk = Talk(rpc)
        talk.say(message(1, "waits", pause_ms=3_600_000), message(3, "goes", pause_ms=1), add_sub("plain"))
        answers = [next(talk.answers) for _ in range(4)]
        talk.answers.cancel()
        talk.hang_up()
    assert sorted(answer.infer_response.id for answer in answers) == ["goes", "goes", "goes", "plain"]


def test_an_error_comes_after_the_responses_before_it_and_the_stream_goes_on(server: Server) -> None:
    with Rpc(address_of(server)) as rpc:
        talk = Talk(rpc)
        talk.say(message(5, "bad", raise_at=2))
        found = [next(talk.answers) for _ in range(3)]
        assert [number_of(answer) for answer in found[:2]] == [0, 1]
        assert found[2].infer_response.id == "bad" and "the model failed" in found[2].error_message
        assert "secret" not in found[2].error_message
        talk.say(message(1, "good"))
        assert [number_of(answer) for answer in talk.end()] == [0]


def test_an_error_names_its_request_and_the_empty_final_message_follows(server: Server) -> None:
    unread = message(3, "unread", empty_final=True)
    unread.inputs[0].datatype = "INT33"
    unknown = message(1, "unknown", empty_final=True)
    unknown.model_name = "nobody"
    odd = message(1, "odd")
    odd.parameters["triton_enable_empty_final_response"].string_param = "yes"
    asked = [message(5, "bare", raise_at=0), message(5, "ended", True, raise_at=1), unread, unknown, odd]
    with Rpc(address_of(server)) as rpc:
        answers = [(bool(answer.error_message), answer.infer_response) for answer in rpc.stream(asked)]

    def told(request_id: str) -> list[tuple[bool, str, str, bool]]:
        """Whether an answer is an error, its model and version, and whether the answer is the final one."""
        return [
            (failed, found.model_name, found.model_version, found.parameters[FINAL].bool_param)
            for failed, found in answers
            if found.id == request_id
        ]

    error, last = (True, MODEL, "1", False), (False, MODEL, "1", True)
    assert told("bare") == told("odd") == [(True, MODEL, "1", True)]
    assert told("ended") == [(False, MODEL, "1", False), error, last]
    assert told("unread") == [error, last]
    assert told("unknown") == [(True, "nobody", "", True)]


def test_a_stream_that_wants_to_end_with_an_error_does(server: Server) -> None:
    with Rpc(address_of(server)) as rpc:
        talk = Talk(rpc, metadata=(("triton_grpc_error", "true"),))
        talk.say(message(5, "bad", raise_at=1))
        assert number_of(next(talk.answers)) == 0
        error = failure_of(lambda: next(talk.answers))
        assert error.code() is grpc.StatusCode.INTERNAL
        talk.hang_up()


def test_cancelling_a_stream_stops_the_model(
    server: Server, record: tuple[Path, Callable[[], list[str]]]
) -> None:
    path, noted = record
    with Rpc(address_of(server)) as rpc:
        answers = rpc.stream([message(1_000_000, sleep_ms=1, record=path)])
        assert number_of(next(answers)) == 0
        answers.cancel()
        wait_until(lambda: "closed" in noted(), what="the end of the generator")


def test_a_slow_reader_of_a_stream_holds_the_model_up_and_no_memory(
    server: Server, record: tuple[Path, Callable[[], list[str]]]
) -> None:
    path, noted = record
    frontend = psutil.Process(server.frontend_pids()[0])
    with Rpc(address_of(server)) as rpc:
        answers = rpc.stream([message(1000, width=MIB // 4, record=path)])
        assert number_of(next(answers)) == 0
        before = frontend.memory_info()
        rest = _until_at_rest(noted)
        assert rest < 200, f"{rest} responses of 1 MiB were made for a client that does not read"
        now = frontend.memory_info()
        assert now.rss - now.shared - before.rss + before.shared < 48 * MIB
        assert server.post(f"/v2/models/{MODEL}/generate", {"COUNT": 1}).json()["OUTPUT"] == 0
        answers.cancel()
    wait_until(lambda: "closed" in noted(), what="the end of the generator")


def test_a_client_that_never_reads_is_sent_away_after_its_deadline(tmp_path: Path) -> None:
    path = tmp_path / "record"
    noted = record_of(path)
    settings = _settings(write_repository(tmp_path / "models", [MODEL]), **{"limits.request_timeout_s": 6})
    with (
        serving(tmp_path, ("fake/echo",), settings, supervised=False) as server,
        Rpc(address_of(server)) as rpc,
    ):
        answers = rpc.stream([message(1000, width=MIB // 4, record=path)])
        assert number_of(next(answers)) == 0
        assert server.metric("penstock_requests_in_flight") == 1
        wait_until(lambda: "closed" in noted(), what="the end of the generator")
        # The client is still there and holds its window shut.
        wait_until(lambda: server.metric("penstock_requests_in_flight") == 0, what="the end of the request")
        wait_until(lambda: server.metric("penstock_shm_bytes_used") == 0, what="a free arena")
        # What had been sent is there to be read; then the stream is over.
        with pytest.raises(grpc.RpcError) as ended:
            for _ in answers:
                pass
        assert ended.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def _until_at_rest(noted: Callable[[], list[str]]) -> int:
    """How many steps there were when no more came for a second."""
    seen, since = -1, time.monotonic()

    def rested() -> bool:
        nonlocal seen, since
        if (now := len(noted())) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 1.0

    wait_until(rested, what="rest")
    return seen


def test_events_come_one_by_one(server: Server, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Events(server, 3, gate_at=1, gate=gate) as events:
        assert events.status == 200 and events.content_type == "text/event-stream; charset=utf-8"
        each = iter(events)
        assert next(each) == {"model_name": MODEL, "model_version": "1", "OUTPUT": 0}
        gate.touch()
        assert [event["OUTPUT"] for event in each] == [1, 2]


@pytest.mark.parametrize("count", [0, 1, 5 * WINDOW])
def test_generate_stream_has_an_event_for_each_response(server: Server, count: int) -> None:
    with Events(server, count) as events:
        assert events.status == 200
        assert events.numbers() == list(range(count))


def test_an_error_after_the_first_event_is_an_event(server: Server) -> None:
    with Events(server, 5, raise_at=2) as events:
        found = list(events)
    assert [event.get("OUTPUT") for event in found] == [0, 1, None]
    assert "the model failed" in found[2]["error"] and found[2]["code"] == "INFERENCE_ERROR"
    with Events(server, 5, raise_at=0) as events:
        assert events.status == 500, "before the first event it is a status"


def test_generate_wants_exactly_one_response(server: Server) -> None:
    one = server.post(f"/v2/models/{MODEL}/generate", {"COUNT": 1, "width": 3})
    assert one.status == 200 and one.json()["OUTPUT"] == [0, 0, 0]
    for count, words in ((0, "gave none"), (2, "gave more than one"), (1000, "gave more than one")):
        answer = server.post(f"/v2/models/{MODEL}/generate", {"COUNT": count})
        assert answer.status == 400
        assert words in answer.json()["error"] and "generate_stream" in answer.json()["error"]


def test_a_client_that_hangs_up_stops_the_model(
    server: Server, record: tuple[Path, Callable[[], list[str]]]
) -> None:
    path, noted = record
    with Events(server, 1_000_000, sleep_ms=1, record=path) as events:
        assert next(iter(events))["OUTPUT"] == 0
    wait_until(lambda: "closed" in noted(), what="the end of the generator")


def test_a_client_that_does_not_read_its_events_holds_the_model_up(
    server: Server, record: tuple[Path, Callable[[], list[str]]]
) -> None:
    path, noted = record
    with Events(server, 100_000, width=20_000, record=path) as events:
        assert next(iter(events))["OUTPUT"][0] == 0
        assert _until_at_rest(noted) < 400, "events of 40 kB were made for a client that does not read"
        assert server.encode("fake/echo", ["others"]).status == 200
    wait_until(lambda: "closed" in noted(), what="the end of the generator")


def test_calls_with_one_response_refuse_a_decoupled_model(server: Server) -> None:
    given = {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}
    answer = server.post(f"/v2/models/{MODEL}/infer", {"inputs": [given]})
    assert answer.status == 501 and "generate_stream" in answer.json()["error"]
    with Rpc(address_of(server)) as rpc:
        error = failure_of(lambda: rpc.call("ModelInfer", message(1)))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "ModelStreamInfer" in str(error.details())
    header = 'batch_size: 1 input { name: "COUNT" dims: 1 } output { name: "OUTPUT" }'
    found = trtis.infer(server, MODEL, header, np.int32(1).tobytes())
    assert found.answer.status == 400 and "UNSUPPORTED" in str(found.status)
    made = v1.InferRequest(model_name=MODEL, model_version=-1, raw_input=[np.int32(1).tobytes()])
    made.meta_data.batch_size = 1
    made.meta_data.input.add(name="COUNT", dims=[1])
    made.meta_data.output.add(name="OUTPUT")
    with grpc.insecure_channel(address_of(server)) as channel:
        path = "/nvidia.inferenceserver.GRPCService/"
        forms = v1.InferRequest.SerializeToString, v1.InferResponse.FromString
        alone = channel.unary_unary(f"{path}Infer", *forms)(made, timeout=PATIENCE_S)
        [streamed] = list(
            channel.stream_stream(f"{path}StreamInfer", *forms)(iter([made]), timeout=PATIENCE_S)
        )
    for status in (alone.request_status, streamed.request_status):
        assert status.code == v1.UNSUPPORTED and "any number of responses" in status.msg


def test_what_cannot_be_decoupled_says_so_when_it_is_loaded(server: Server) -> None:
    reasons = {
        entry["name"]: entry.get("reason", "") for entry in server.post("/v2/repository/index", {}).json()
    }
    assert "sequence_batching: not supported with model_transaction_policy.decoupled" in reasons["sequenced"]
    assert "only a model.py can give several responses" in reasons["exported"]
    config = server.get(f"/v2/models/{MODEL}/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}


def test_a_request_counts_once_and_its_responses_apart(server: Server) -> None:
    def stats() -> dict[str, Any]:
        answer = server.get(f"/v2/models/{MODEL}/stats")
        assert answer.status == 200, answer.body
        found = answer.json()["model_stats"][0]
        assert isinstance(found, dict)
        return found

    before, parts = stats(), server.metric("penstock_stream_parts_total", model=f"{MODEL}@1")
    asked = server.metric("penstock_requests_total", operation="generate", code="200")
    with Events(server, 7) as events:
        assert len(events.numbers()) == 7
    wait_until(lambda: stats()["inference_count"] == before["inference_count"] + 1, what="one inference")
    after = stats()
    assert after["execution_count"] == before["execution_count"] + 1
    success = after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
    assert success == 1
    wait_until(
        lambda: server.metric("penstock_stream_parts_total", model=f"{MODEL}@1") == parts + 7, what="7 parts"
    )
    wait_until(
        lambda: server.metric("penstock_requests_total", operation="generate", code="200") == asked + 1,
        what="one request",
    )


def test_many_clients_at_once_get_their_own_responses(server: Server) -> None:
    def one(number: int) -> list[int]:
        if number % 2:
            with Events(server, 20 + number) as events:
                return events.numbers()
        with Rpc(address_of(server)) as rpc:
            return [number_of(answer) for answer in rpc.stream([message(20 + number)])]

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(one, range(16))):
            assert found == list(range(20 + number))
