"""Checks and statuses of inference: the specification's table over gRPC, states of models and queues over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest

from ipc.protos import kserve_v2_pb2 as pb
from tests.conformance.kserve import ADD_SUB, A, Outcome, json_pair, post, tensor
from tests.conformance.kserve_limits import LATE
from tests.conformance.kserve_rows import GOOD, INVALID, ONE, ROWS, message, side
from tests.fakes.holding import holding, is_waited_for
from tests.harness.cluster import ways_to
from tests.harness.rpc import Rpc, address_of, failure_of, trailers_of
from tests.harness.server import PATIENCE_S, Server, wait_until

server = ways_to("limited_server")


@pytest.fixture
def rpc(server: Server) -> Iterator[Rpc]:
    with Rpc(address_of(server)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("request_", "status", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_refusals_over_grpc(rpc: Rpc, request_: pb.ModelInferRequest, status: str, words: str) -> None:
    error = failure_of(lambda: rpc.call("ModelInfer", request_))
    assert (error.code().name, words in error.details()) == (status, True), error.details()
    assert "Traceback" not in error.details() and "/work" not in error.details()
    assert len(rpc.call("ModelInfer", GOOD).raw_output_contents) == 2


def test_a_stream_tells_the_same_as_messages(rpc: Rpc) -> None:
    chosen = [row for row in ROWS if row[2] == INVALID][:8]
    for number, row in enumerate(chosen):
        row[1].id = str(number)
    answers = list(rpc.stream([row[1] for row in chosen]))
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(len(chosen))]
    assert [row[3] in answer.error_message for row, answer in zip(chosen, answers, strict=True)] == [
        True
    ] * len(chosen)


def slow(ms: float, model: str = "slow") -> pb.ModelInferRequest:
    """A request that takes so long."""
    return message(model, side("INPUT", "FP32", (1, 1), fp32_contents=[ms]))


def slow_json(ms: float, **more: Any) -> dict[str, Any]:
    """The same in JSON."""
    return {"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [ms]}], **more}


def with_parameters(request_: pb.ModelInferRequest, **values: Any) -> pb.ModelInferRequest:
    """The request with parameters: texts, and whole numbers."""
    for name, value in values.items():
        setattr(request_.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
    return request_


def in_json(server: Server, **parameters: Any) -> Callable[[], Outcome]:
    """A short request of the slow model over HTTP, which waits for its answer."""
    return lambda: post(server, "/v2/models/slow/infer", slow_json(1, parameters=parameters))


def in_grpc(rpc: Rpc, **parameters: Any) -> Callable[[], grpc.RpcError | None]:
    """The same over gRPC. Returns the error."""
    return lambda: rpc.start("ModelInfer", with_parameters(slow(1), **parameters)).exception()


def test_a_timeout_ends_the_wait_for_a_busy_device(server: Server, rpc: Rpc, tmp_path: Path) -> None:
    with holding(tmp_path) as hold:
        busy = rpc.start("ModelInfer", with_parameters(slow(1), hold=str(hold)))
        wait_until(lambda: is_waited_for(hold), what="a busy device")
        error, answer = in_grpc(rpc, timeout=100_000)(), in_json(server, timeout=100_000)()
    assert busy.exception() is None, "it had begun"
    assert error is not None
    assert (error.code().name, error.details()) == ("UNAVAILABLE", "Request timeout expired")
    assert int(trailers_of(error)["retry-after"]) >= 1
    assert (answer.status, answer.error) == (503, "Request timeout expired")
    assert int(answer.answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("form", ["json", "grpc"])
def test_a_timeout_does_not_end_what_runs(server: Server, rpc: Rpc, tmp_path: Path, form: str) -> None:
    """The request is sent anew where a busy machine begins it too late."""
    timeout_s = 0.5
    with ThreadPoolExecutor(1) as pool, holding(tmp_path) as hold:
        parameters = {"hold": str(hold), "timeout": int(timeout_s * 1e6)}
        send = in_json(server, **parameters) if form == "json" else in_grpc(rpc, **parameters)

        def running() -> Future[Any] | None:
            sent = pool.submit(send)
            wait_until(
                lambda: is_waited_for(hold) or sent.done(), what="a beginning, or the end of the timeout"
            )
            return None if sent.done() else sent

        sent = wait_until(running, what="a device that begins in time")
        assert not wait([sent], 2 * timeout_s).done, "it ended while it ran"
        hold.unlink()
        answer = sent.result()
    assert answer is None if form == "grpc" else answer.status == 200


def test_the_deadline_of_a_client_ends_what_runs(server: Server, rpc: Rpc) -> None:
    assert failure_of(lambda: rpc.call("ModelInfer", slow(1500), 0.2)).code().name == "DEADLINE_EXCEEDED"
    found = post(server, "/v2/models/slow/infer", slow_json(1500), X_Request_Timeout="0.2")
    assert found.status == 504, found.head
    wait_until(
        lambda: post(server, "/v2/models/slow/infer", slow_json(1)).status == 200, what="an idle model"
    )


def test_a_full_queue(server: Server, rpc: Rpc, tmp_path: Path) -> None:
    """Nothing leaves the queue before both protocols have refused something."""
    with ThreadPoolExecutor(12) as pool, holding(tmp_path) as hold:
        busy = rpc.start("ModelInfer", with_parameters(slow(1), hold=str(hold)))
        wait_until(lambda: is_waited_for(hold), what="a busy device")
        posted = [pool.submit(in_json(server)) for _ in range(12)]
        assert wait(posted, PATIENCE_S, FIRST_COMPLETED).done, "all have room"
        calls = [rpc.start("ModelInfer", slow(1)) for _ in range(12)]
        wait_until(lambda: any(call.done() for call in calls), what="a refusal over gRPC")
    assert busy.exception() is None
    found = [one.result() for one in posted]
    refused = [one for one in found if one.status != 200]
    assert refused and len(refused) < 12
    for one in refused:
        assert one.status == 503 and one.error.startswith("Exceeds maximum queue size")
        assert int(one.answer.headers["retry-after"]) >= 1 and one.head["retryable"]
    errors = [call.exception() for call in calls if call.exception() is not None]
    assert errors
    for error in errors:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("Exceeds maximum queue size")
        assert int(trailers_of(error)["retry-after"]) >= 1


def test_a_model_that_is_loading_and_one_that_was_unloaded(
    limited_server: Server, server: Server, rpc: Rpc
) -> None:
    """Models are loaded by name at their host alone; clients of a gateway are told so of them, too."""
    body = {"inputs": [tensor("INPUT", A[:, :1].reshape(1), "FP32", data=[1.0])]}
    path, asked = f"/v2/models/{LATE}/infer", message(LATE, side("INPUT", "FP32", (1,), fp32_contents=[1.0]))
    go = limited_server.run_dir.parent / "go"
    go.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(limited_server.post, f"/v2/repository/models/{LATE}/load", {})
        index = "/v2/repository/index"
        wait_until(
            lambda: "LOADING" in {one["state"] for one in server.post(index, {}).json()},
            what="the begin of the load",
        )
        found = post(server, path, body)
        assert found.status == 503 and "is loading" in found.error and "% of it is done" in found.error
        assert int(found.answer.headers["retry-after"]) >= 1
        error = failure_of(lambda: rpc.call("ModelInfer", asked))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "is loading" in error.details()
        assert not rpc.call("ModelReady", pb.ModelReadyRequest(name=LATE)).ready
        go.touch()
        assert loading.result(60).status == 200
    wait_until(lambda: post(server, path, body).status == 200, what="the model")
    assert limited_server.post(f"/v2/repository/models/{LATE}/unload", {}).status == 200
    wait_until(lambda: post(server, path, body).status == 404, what="the unload")
    assert "has no available versions (unloaded)" in post(server, path, body).error
    assert "has no available versions" in failure_of(lambda: rpc.call("ModelInfer", asked)).details()
    assert post(limited_server, path, body).status == 404, "no request loads it again"
    assert server.get("/v2/health/ready").status == 200


def test_every_rpc_that_is_not_offered_says_so(server: Server, rpc: Rpc) -> None:
    for method in ("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "CudaSharedMemoryStatus"):
        error = failure_of(lambda method=method: rpc.call(method, getattr(pb, f"{method}Request")()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED, method
    unknown = rpc.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
    assert failure_of(lambda: unknown(b"", timeout=PATIENCE_S)).code() is grpc.StatusCode.UNIMPLEMENTED


def test_statistics_and_metrics_count_what_failed_before_and_after_a_model_ran(
    server: Server, rpc: Rpc
) -> None:
    def failed() -> int:
        [one] = server.get("/v2/models/add_sub/stats").json()["model_stats"]
        found: int = one["inference_stats"]["fail"]["count"]
        return found

    before = failed()
    failure_of(lambda: rpc.call("ModelInfer", message("add_sub", side(fp32_contents=[1.0]), ONE)))
    failure_of(lambda: rpc.call("ModelInfer", message("add_sub", ONE)))
    assert post(server, ADD_SUB, {"inputs": json_pair()[:1]}).status == 400
    assert failed() == before + 3
