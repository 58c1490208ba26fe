"""Calls of the public gRPC client, each a function that a test runs in a process of its own (`tests.harness.apart`)."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException, shared_memory

from tests.conformance.brought import config_of, files, infer_brought
from tests.harness.server import wait_until

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
DATATYPES = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 2**16 - 1]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[0.1, -65504, np.inf]], np.float16),
    "FP32": np.array([[0.1, -3e38, np.nan]], np.float32),
    "FP64": np.array([[0.1, -1e308, np.inf]], np.float64),
    "BYTES": np.array([[b"", "kana かな".encode(), b"\x00\xff"]], np.object_),
}
"""A tensor of each datatype, at the ends of its range."""


def tensor(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    """An input with data."""
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def pair(a: np.ndarray = A, b: np.ndarray = B) -> list[triton.InferInput]:
    """The inputs of add_sub."""
    return [tensor("INPUT0", a, "INT32"), tensor("INPUT1", b, "INT32")]


def expect_sum(result: triton.InferResult, a: np.ndarray = A, b: np.ndarray = B) -> None:
    """The answer of add_sub."""
    assert np.array_equal(result.as_numpy("OUTPUT0"), a + b)
    assert np.array_equal(result.as_numpy("OUTPUT1"), a - b)


def refused(call: Callable[[], Any], status: str, *words: str) -> InferenceServerException:
    """What `call` raises, which has this status and these words."""
    try:
        call()
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{status}", (error.status(), error.message())
        for word in words:
            assert word in error.message(), (word, error.message())
        return error
    raise AssertionError("the call was answered")


def check_health_and_metadata(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("add_sub") and client.is_model_ready("add_sub", "1")
        assert not client.is_model_ready("add_sub", "9") and not client.is_model_ready("unknown")
        server = client.get_server_metadata(as_json=True)
        assert server["name"] == "penstock" and server["version"]
        assert {"binary_tensor_data", "statistics", "sequence"} <= set(server["extensions"])
        model = client.get_model_metadata("add_sub", as_json=True)
        assert (model["name"], model["versions"]) == ("add_sub", ["1"])
        assert model["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
        refused(
            lambda: client.get_model_metadata("unknown"), "NOT_FOUND", "Request for unknown model: 'unknown'"
        )
        refused(lambda: client.get_model_metadata("add_sub", "x"), "INVALID_ARGUMENT", "version")


def check_configuration(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        config = client.get_model_config("add_sub").config
        assert (config.name, config.max_batch_size, config.backend) == ("add_sub", 8, "torchscript")
        assert [(one.name, list(one.dims)) for one in config.input] == [("INPUT0", [16]), ("INPUT1", [16])]
        assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
        plain = client.get_model_config("identity_int8").config
        assert not plain.HasField("model_transaction_policy")
        refused(lambda: client.get_model_config("unknown"), "NOT_FOUND")


def check_infer(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        result = client.infer("add_sub", pair(), request_id="a7")
        expect_sum(result)
        response = result.get_response()
        assert (response.id, response.model_name, response.model_version) == ("a7", "add_sub", "1")
        assert client.infer("add_sub", pair()).get_response().id == ""
        batch = np.arange(128, dtype=np.int32).reshape(8, 16)
        expect_sum(client.infer("add_sub", pair(batch, batch)), batch, batch)


def check_wanted_outputs_in_their_order(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        wanted = [triton.InferRequestedOutput("OUTPUT1"), triton.InferRequestedOutput("OUTPUT0")]
        result = client.infer("add_sub", pair(), outputs=wanted)
        assert [output.name for output in result.get_response().outputs] == ["OUTPUT1", "OUTPUT0"]
        expect_sum(result)
        only = client.infer("add_sub", pair(), outputs=wanted[:1])
        assert only.as_numpy("OUTPUT0") is None and np.array_equal(only.as_numpy("OUTPUT1"), A - B)


def check_every_datatype(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        for datatype, array in DATATYPES.items():
            result = client.infer(f"identity_{datatype.lower()}", [tensor("INPUT", array, datatype)])
            answer = result.as_numpy("OUTPUT")
            assert answer.dtype == array.dtype and np.array_equal(
                answer, array, equal_nan=array.dtype.kind == "f"
            )
            assert result.get_output("OUTPUT").datatype == datatype


def check_bf16(address: str) -> None:
    import ml_dtypes

    array = np.array([[0.5, -3.0, 1e30]], ml_dtypes.bfloat16)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("identity_bf16", [tensor("INPUT", array, "BF16")]).as_numpy("OUTPUT")
        assert np.array_equal(answer.astype(np.float32), array.astype(np.float32))


def check_large_tensors(address: str) -> None:
    array = np.random.default_rng(7).standard_normal((1, 1 << 20)).astype(np.float32)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("identity_fp32", [tensor("INPUT", array, "FP32")]).as_numpy("OUTPUT")
        assert answer.tobytes() == array.tobytes()


def check_compression(address: str) -> None:
    array = np.zeros((1, 100_000), np.float32)
    with triton.InferenceServerClient(address) as client:
        for algorithm in ("gzip", "deflate"):
            inputs = [tensor("INPUT", array, "FP32")]
            result = client.infer("identity_fp32", inputs, compression_algorithm=algorithm)
            assert np.array_equal(result.as_numpy("OUTPUT"), array)


def check_classification(address: str) -> None:
    image = np.random.default_rng(3).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with triton.InferenceServerClient(address) as client:
        inputs = [tensor("image", image, "FP32")]
        scores = client.infer("classifier", inputs).as_numpy("scores")
        wanted = [triton.InferRequestedOutput("scores", class_count=3)]
        classes = client.infer("classifier", inputs, outputs=wanted).as_numpy("scores")
        assert classes.shape == (2, 3)
        for row, found in zip(scores, classes, strict=True):
            best = np.argsort(-row, kind="stable")[:3]
            told = [entry.decode().split(":") for entry in found]
            assert [int(index) for _, index, _ in told] == best.tolist()
            assert np.allclose([float(value) for value, _, _ in told], row[best], atol=1e-6)
            assert all(label for _, _, label in told)


def check_versions(address: str) -> None:
    array = np.zeros((1, 4), np.int32)
    with triton.InferenceServerClient(address) as client:
        for version, plus in (("", 3), ("1", 1), ("2", 2), ("3", 3)):
            inputs = [tensor("INPUT", array, "INT32")]
            result = client.infer("versions_all", inputs, model_version=version)
            assert np.array_equal(result.as_numpy("OUTPUT"), array + plus)
            assert result.get_response().model_version == str(plus)
        metadata = client.get_model_metadata("versions_all", as_json=True)
        assert metadata["versions"] == ["1", "2", "3"]


def gateway_loads_and_regions_are_refused(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        index = {(one.name, one.version): one.state for one in client.get_model_repository_index().models}
        assert index["versions_all", "2"] == "READY"
        for call in (client.load_model, client.unload_model):
            refused(lambda call=call: call("versions_all"), "UNIMPLEMENTED", "models run elsewhere")  # type: ignore[misc]
        status, away = "INVALID_ARGUMENT", "models run on other hosts"
        refused(lambda: client.register_system_shared_memory("x", "client_x", 64), status, away)
        refused(client.unregister_system_shared_memory, status, away)
        refused(client.get_system_shared_memory_status, status, away)
        refused(lambda: client.register_cuda_shared_memory("x", b"eA==", 0, 64), status, away)
        refused(client.get_cuda_shared_memory_status, status, away)
        client.unregister_cuda_shared_memory()
        first, second = pair()
        first.set_shared_memory("x", A.nbytes)
        refused(lambda: client.infer("add_sub", [first, second]), status, away)
        expect_sum(client.infer("add_sub", pair()))


def check_errors(address: str) -> None:
    half = [tensor("INPUT0", A, "INT32")]
    with triton.InferenceServerClient(address) as client:

        def infer(inputs: Any = None, model: str = "add_sub", **more: Any) -> Callable[[], Any]:
            return lambda: client.infer(model, pair() if inputs is None else inputs, **more)

        refused(infer(model="unknown"), "NOT_FOUND", "Request for unknown model: 'unknown' is not found")
        refused(infer(model_version="9"), "NOT_FOUND", "version 9 is not found")
        refused(infer(model_version="x"), "INVALID_ARGUMENT", "version")
        refused(infer(model="broken"), "NOT_FOUND", "has no available versions")
        refused(infer(half), "INVALID_ARGUMENT", "expected 2 inputs but got 1")
        refused(infer([*half, *half]), "INVALID_ARGUMENT", "'INPUT0'")
        refused(
            infer([*half, tensor("OTHER", B, "INT32")]),
            "INVALID_ARGUMENT",
            "unexpected inference input 'OTHER'",
        )
        floats = tensor("INPUT1", B.astype(np.float32), "FP32")
        refused(infer([*half, floats]), "INVALID_ARGUMENT", "inference input 'INPUT1' data-type is 'FP32'")
        narrow = tensor("INPUT1", B[:, :8], "INT32")
        refused(infer([*half, narrow]), "INVALID_ARGUMENT", "unexpected shape for input 'INPUT1'")
        many = np.zeros((9, 16), np.int32)
        refused(infer(pair(many, many)), "INVALID_ARGUMENT", "inference request batch-size must be <= 8")
        other = triton.InferRequestedOutput("OTHER")
        refused(infer(outputs=[other]), "INVALID_ARGUMENT", "unexpected inference output 'OTHER' for model")
        raising = [tensor("INPUT", np.array([[-1.0]], np.float32), "FP32")]
        error = refused(infer(raising, "raising"), "INTERNAL")
        assert "Traceback" not in error.message() and ".py" not in error.message()


def check_timeouts(address: str) -> None:
    slow = [tensor("INPUT", np.array([[1500.0]], np.float32), "FP32")]
    with triton.InferenceServerClient(address) as client:
        refused(lambda: client.infer("slow", slow, client_timeout=0.3), "DEADLINE_EXCEEDED")
        expired = "Request timeout expired"
        # NOTE: a microsecond has passed before any queue is reached.
        refused(lambda: client.infer("slow", slow, timeout=1), "UNAVAILABLE", expired)


def check_statistics(address: str) -> None:
    with triton.InferenceServerClient(address) as client:

        def counted() -> Any:
            return client.get_inference_statistics("versions_all", "2").model_stats[0]

        before = counted()
        for _ in range(5):
            client.infer("versions_all", [tensor("INPUT", np.zeros((2, 4), np.int32), "INT32")], "2")
        refused(lambda: client.infer("versions_all", pair(), "2"), "INVALID_ARGUMENT")
        after = counted()
        assert after.inference_count - before.inference_count == 10
        assert after.inference_stats.success.count - before.inference_stats.success.count == 5
        assert after.inference_stats.success.ns > before.inference_stats.success.ns
        assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
        assert after.last_inference > before.last_inference
        everything = client.get_inference_statistics().model_stats
        assert {(one.name, one.version) for one in everything} >= {("versions_all", v) for v in "123"}
        refused(lambda: client.get_inference_statistics("unknown"), "INVALID_ARGUMENT", "is not available")


def host_repository(address: str) -> None:
    image = [tensor("INPUT", np.zeros((1, 4), np.int32), "INT32")]
    with triton.InferenceServerClient(address) as client:

        def states() -> dict[tuple[str, str], tuple[str, str]]:
            models = client.get_model_repository_index().models
            return {(one.name, one.version): (one.state, one.reason) for one in models}

        assert states()["versions_all", "2"] == ("READY", "")
        assert states()["broken", "1"][0] == "UNAVAILABLE" and states()["broken", "1"][1]
        client.unload_model("versions_all")
        wait_until(lambda: states()["versions_all", "2"] == ("UNAVAILABLE", "unloaded"), what="the unload")
        assert not client.is_model_ready("versions_all") and client.is_server_ready()
        refused(lambda: client.infer("versions_all", image), "NOT_FOUND", "has no available versions")
        client.load_model("versions_all")
        assert client.is_model_ready("versions_all")
        client.infer("versions_all", image)
        client.unload_model("unknown")
        refused(lambda: client.load_model("broken"), "INTERNAL", "failed to load 'broken'")
        refused(lambda: client.load_model("unknown"), "INTERNAL", "failed to load 'unknown'")


def check_settings(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        log = client.update_log_settings({"log_verbose_level": 1}, as_json=True)["settings"]
        assert log["log_verbose_level"] == {"uint32_param": 1}
        assert client.get_log_settings(as_json=True)["settings"] == log
        client.update_log_settings({"log_verbose_level": 0})
        refused(lambda: client.update_log_settings({"log_file": "/tmp/x"}), "UNIMPLEMENTED")
        trace = client.update_trace_settings(settings={"trace_rate": "7"}, as_json=True)["settings"]
        assert trace["trace_rate"] == {"value": ["7"]}
        reset = client.update_trace_settings(settings={"trace_rate": None}, as_json=True)["settings"]
        assert reset["trace_rate"] != {"value": ["7"]}
        refused(lambda: client.get_trace_settings("unknown"), "INVALID_ARGUMENT")


def host_system_shared_memory(address: str) -> None:
    nbytes, name = A.nbytes, f"client_{uuid.uuid4().hex[:8]}"
    region = shared_memory.create_shared_memory_region("inputs", name, 4 * nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [A, B])
        with triton.InferenceServerClient(address) as client:
            _infer_in_shared_memory(client, name, nbytes)
        sums = shared_memory.get_contents_as_numpy(region, np.int32, [4, 16])
        assert np.array_equal(sums[2], (A + B)[0])
    finally:
        shared_memory.destroy_shared_memory_region(region)


def _infer_in_shared_memory(client: triton.InferenceServerClient, key: str, nbytes: int) -> None:
    client.register_system_shared_memory("tensors", key, 4 * nbytes)
    status = client.get_system_shared_memory_status(as_json=True)["regions"]
    assert status == {"tensors": {"name": "tensors", "key": key, "byte_size": str(4 * nbytes)}}
    refused(lambda: client.register_system_shared_memory("tensors", key, nbytes), "ALREADY_EXISTS")
    inputs = [triton.InferInput(f"INPUT{number}", [1, 16], "INT32") for number in (0, 1)]
    for number, one in enumerate(inputs):
        one.set_shared_memory("tensors", nbytes, offset=number * nbytes)
    wanted = [triton.InferRequestedOutput("OUTPUT0"), triton.InferRequestedOutput("OUTPUT1")]
    wanted[0].set_shared_memory("tensors", nbytes, offset=2 * nbytes)
    result = client.infer("add_sub", inputs, outputs=wanted)
    assert np.array_equal(result.as_numpy("OUTPUT1"), A - B), "the empty entry keeps its place"
    assert result.get_response().raw_output_contents[0] == b""
    inputs[0].set_shared_memory("tensors", nbytes, offset=4 * nbytes)
    refused(lambda: client.infer("add_sub", inputs), "INVALID_ARGUMENT", "Invalid offset")
    inputs[0].set_shared_memory("nothing", nbytes)
    refused(
        lambda: client.infer("add_sub", inputs), "NOT_FOUND", "Unable to find shared memory region: 'nothing'"
    )
    client.unregister_system_shared_memory("tensors")
    client.unregister_system_shared_memory("tensors")
    assert client.get_system_shared_memory_status(as_json=True).get("regions", {}) == {}


def host_cuda_shared_memory_without_a_gpu(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        client.unregister_cuda_shared_memory()
        refused(lambda: client.get_cuda_shared_memory_status(), "UNIMPLEMENTED", "CUDA")
        refused(lambda: client.register_cuda_shared_memory("x", b"aGFuZGxl", 0, 64), "UNIMPLEMENTED")


def check_async_infer(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        for _ in range(20):
            client.async_infer("add_sub", pair(), lambda result, error: done.put((result, error)))
        for _ in range(20):
            result, error = done.get(timeout=60)
            assert error is None, error
            expect_sum(result)


def check_stream_in_request_order(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        slow = np.array([[300.0]], np.float32)
        client.async_stream_infer("slow", [tensor("INPUT", slow, "FP32")], request_id="0")
        for number in range(1, 30):
            a = np.full((1, 16), number, np.int32)
            client.async_stream_infer("add_sub", pair(a), request_id=str(number))
        for number in range(30):
            result, error = done.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            assert response.id == str(number)
            assert response.parameters["triton_final_response"].bool_param
            if number:
                assert np.array_equal(result.as_numpy("OUTPUT0"), number + B)
        client.stop_stream()


def check_stream_goes_on_after_an_error(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        client.async_stream_infer("add_sub", pair(), request_id="good")
        client.async_stream_infer("unknown", pair(), request_id="bad")
        client.async_stream_infer("add_sub", pair(), request_id="again")
        told = [done.get(timeout=60) for _ in range(3)]
        assert [error is None for _, error in told] == [True, False, True]
        assert "Request for unknown model: 'unknown'" in told[1][1].message()
        client.stop_stream()


def check_decoupled_stream(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        assert client.get_model_config("countdown").config.model_transaction_policy.decoupled
        client.start_stream(lambda result, error: done.put((result, error)))
        for count in (0, 1, 20):
            counted = [tensor("COUNT", np.array([count], np.int32), "INT32")]
            client.async_stream_infer(
                "countdown", counted, request_id=str(count), enable_empty_final_response=True
            )
            for number in range(count):
                result, error = done.get(timeout=60)
                assert error is None, error
                assert result.as_numpy("OUTPUT").tolist() == [number]
                response = result.get_response()
                assert response.id == str(count)
                assert not response.parameters["triton_final_response"].bool_param
            result, error = done.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            assert response.id == str(count) and not response.outputs
            assert response.parameters["triton_final_response"].bool_param
        client.async_stream_infer("countdown", [tensor("COUNT", np.array([0], np.int32), "INT32")])
        client.async_stream_infer("countdown", [tensor("COUNT", np.array([2], np.int32), "INT32")])
        assert [done.get(timeout=60)[0].as_numpy("OUTPUT").tolist() for _ in range(2)] == [[0], [1]]
        client.stop_stream()
        assert done.empty(), "a response that nobody asked for"
        counted = [tensor("COUNT", np.array([1], np.int32), "INT32")]
        refused(lambda: client.infer("countdown", counted), "UNIMPLEMENTED", "ModelStreamInfer")


def check_decoupled_stream_is_cancelled(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        counted = [tensor("COUNT", np.array([1_000_000], np.int32), "INT32")]
        client.async_stream_infer("countdown", counted, parameters={"sleep_ms": 1})
        result, error = done.get(timeout=60)
        assert error is None and result.as_numpy("OUTPUT").tolist() == [0]
        client.stop_stream(cancel_requests=True)


def check_stream_that_wants_grpc_errors_ends_with_one(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(
            lambda result, error: done.put((result, error)), headers={"triton_grpc_error": "true"}
        )
        client.async_stream_infer("unknown", pair(), request_id="bad")
        _, error = done.get(timeout=60)
        assert error.status() == "StatusCode.NOT_FOUND", error
        client.stop_stream()


def check_catalog_models(address: str) -> None:
    texts = np.array([b"hello", b"world"], np.object_)
    with triton.InferenceServerClient(address) as client:
        result = client.infer("fake/echo", [tensor("text", texts, "BYTES")])
        vectors = result.as_numpy("dense")
        assert vectors.shape[0] == 2 and vectors.dtype == np.float32
        assert np.array_equal(
            client.infer("echo", [tensor("text", texts, "BYTES")]).as_numpy("dense"), vectors
        )


def check_sequences_in_a_stream(address: str) -> None:
    done: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        for step in range(1, 6):
            inputs = [tensor("INPUT", np.array([[step]], np.int32), "INT32")]
            client.async_stream_infer(
                "accumulator", inputs, sequence_id=41, sequence_start=step == 1, sequence_end=step == 5
            )
        totals = []
        for _ in range(5):
            result, error = done.get(timeout=60)
            assert error is None, error
            totals.append(int(result.as_numpy("OUTPUT")[0, 0]))
        assert totals == [1, 3, 6, 10, 15]
        client.stop_stream()


def host_loads_that_bring_something(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        client.load_model("brought", config=config_of(2), files=files())
        assert client.infer("brought", infer_brought(tensor)).as_numpy("OUTPUT").tolist() == [[5]]
        many = [tensor("INPUT", np.zeros((3, 1), np.int32), "INT32")]
        refused(lambda: client.infer("brought", many), "INVALID_ARGUMENT", "batch-size must be <= 2")
        client.load_model("brought", config=config_of(3), files=files())
        client.infer("brought", many)
        client.unload_model("brought")
        refused(lambda: client.load_model("brought"), "INTERNAL", "failed to load 'brought'")
        refused(
            lambda: client.load_model("add_sub", config="{"), "INVALID_ARGUMENT", "failed to load 'add_sub'"
        )
        refused(
            lambda: client.load_model("add_sub", files=files()), "INVALID_ARGUMENT", "'config' is missing"
        )
        expect_sum(client.infer("add_sub", pair()))


def check_plugins(address: str) -> None:
    client = triton.InferenceServerClient(address)
    plugin = BasicAuth("name", "word")
    client.register_plugin(plugin)
    assert client.plugin() is plugin and client.is_server_live()
    client.unregister_plugin()
    client.close()
