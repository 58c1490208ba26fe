"""Calls of the public HTTP clients, each a function that runs in a process of its own (`tests.harness.apart`)."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.http as triton
from tritonclient.http.auth import BasicAuth
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
    "FP16": np.array([[0.1, -65504, 0]], np.float16),
    "FP32": np.array([[0.1, -3e38, 1e-45]], np.float32),
    "FP64": np.array([[0.1, -1e308, 5e-324]], np.float64),
    "BYTES": np.array([[b"", "kana かな".encode(), b"x" * 300]], np.object_),
}
"""A tensor of each datatype, at the ends of its range, that JSON can say too."""


def tensor(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    """An input with data."""
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def pair(a: np.ndarray = A, b: np.ndarray = B, binary: bool = True) -> list[triton.InferInput]:
    """The inputs of add_sub."""
    return [tensor("INPUT0", a, "INT32", binary), tensor("INPUT1", b, "INT32", binary)]


def expect_sum(result: triton.InferResult, a: np.ndarray = A, b: np.ndarray = B) -> None:
    """The answer of add_sub."""
    assert np.array_equal(result.as_numpy("OUTPUT0"), a + b)
    assert np.array_equal(result.as_numpy("OUTPUT1"), a - b)


def refused(call: Callable[[], Any], status: str, *words: str) -> None:
    """`call` raises, with this status and these words."""
    try:
        call()
    except InferenceServerException as error:
        assert error.status() == status, (error.status(), error.message())
        for word in words:
            assert word in error.message(), (word, error.message())
        return
    raise AssertionError("the call was answered")


def check_health_and_metadata(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("add_sub") and client.is_model_ready("add_sub", "1")
        assert not client.is_model_ready("add_sub", "9") and not client.is_model_ready("unknown")
        server = client.get_server_metadata()
        assert server["name"] == "penstock" and server["version"]
        assert {"binary_tensor_data", "statistics", "sequence"} <= set(server["extensions"])
        model = client.get_model_metadata("add_sub")
        assert (model["name"], model["versions"]) == ("add_sub", ["1"])
        assert model["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]}
        refused(lambda: client.get_model_metadata("unknown"), "404", "Request for unknown model: 'unknown'")
        config = client.get_model_config("add_sub")
        assert (config["name"], config["max_batch_size"]) == ("add_sub", 8)
        assert config["input"][0]["data_type"] == "TYPE_INT32" and "dynamic_batching" in config
        assert "sequence_batching" not in config and "model_transaction_policy" not in config


def check_every_datatype_in_every_form(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        for datatype, array in DATATYPES.items():
            for binary_in in (True, False):
                if datatype == "FP16" and not binary_in:
                    continue
                for binary_out in (True, False):
                    inputs = [tensor("INPUT", array, datatype, binary_in)]
                    wanted = [triton.InferRequestedOutput("OUTPUT", binary_data=binary_out)]
                    result = client.infer(f"identity_{datatype.lower()}", inputs, outputs=wanted)
                    answer = result.as_numpy("OUTPUT")
                    if datatype == "BYTES" and not binary_out:
                        answer = np.array([[one.encode() for one in answer[0]]], np.object_)
                    assert np.array_equal(answer, array), (datatype, binary_in, binary_out)
                    assert result.get_output("OUTPUT")["datatype"] == datatype
                    assert ("data" in result.get_output("OUTPUT")) != binary_out


def check_infer(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        result = client.infer("add_sub", pair(), request_id="a7")
        expect_sum(result)
        response = result.get_response()
        assert (response["id"], response["model_name"], response["model_version"]) == ("a7", "add_sub", "1")
        mixed = [pair()[0], pair(binary=False)[1]]
        expect_sum(client.infer("add_sub", mixed))
        batch = np.arange(128, dtype=np.int32).reshape(8, 16)
        expect_sum(client.infer("add_sub", pair(batch, batch), query_params={"x": 1}), batch, batch)
        wanted = [triton.InferRequestedOutput("OUTPUT1"), triton.InferRequestedOutput("OUTPUT0")]
        listed = client.infer("add_sub", pair(), outputs=wanted)
        assert [one["name"] for one in listed.get_response()["outputs"]] == ["OUTPUT1", "OUTPUT0"]
        expect_sum(listed)
        expect_sum(client.infer("add_sub", pair(), priority=1, timeout=5_000_000, parameters={"mine": 1}))


def check_large_tensors(address: str) -> None:
    array = np.random.default_rng(7).standard_normal((1, 1 << 20)).astype(np.float32)
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("identity_fp32", [tensor("INPUT", array, "FP32")]).as_numpy("OUTPUT")
        assert answer.tobytes() == array.tobytes()


def check_compression(address: str) -> None:
    array = np.zeros((1, 100_000), np.float32)
    with triton.InferenceServerClient(address) as client:
        for algorithm in ("gzip", "deflate"):
            for sent, received in ((algorithm, None), (None, algorithm), (algorithm, algorithm)):
                result = client.infer(
                    "identity_fp32",
                    [tensor("INPUT", array, "FP32")],
                    request_compression_algorithm=sent,
                    response_compression_algorithm=received,
                )
                assert np.array_equal(result.as_numpy("OUTPUT"), array)


def check_classification(address: str) -> None:
    image = np.random.default_rng(3).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with triton.InferenceServerClient(address) as client:
        inputs = [tensor("image", image, "FP32")]
        scores = client.infer("classifier", inputs).as_numpy("scores")
        for binary in (True, False):
            wanted = [triton.InferRequestedOutput("scores", binary_data=binary, class_count=3)]
            classes = client.infer("classifier", inputs, outputs=wanted).as_numpy("scores")
            assert classes.shape == (2, 3)
            for row, found in zip(scores, classes, strict=True):
                texts = [one.decode() if isinstance(one, bytes) else str(one) for one in found]
                best = np.argsort(-row, kind="stable")[:3].tolist()
                assert [int(text.split(":")[1]) for text in texts] == best
                assert all(text.split(":")[2] for text in texts)


def check_versions(address: str) -> None:
    array = np.zeros((1, 4), np.int32)
    with triton.InferenceServerClient(address) as client:
        for version, plus in (("", 3), ("1", 1), ("2", 2), ("3", 3)):
            inputs = [tensor("INPUT", array, "INT32")]
            result = client.infer("versions_all", inputs, model_version=version)
            assert np.array_equal(result.as_numpy("OUTPUT"), array + plus)
            assert result.get_response()["model_version"] == str(plus)
        assert client.get_model_metadata("versions_all")["versions"] == ["1", "2", "3"]


def check_async_infer(address: str) -> None:
    with triton.InferenceServerClient(address, concurrency=4) as client:
        pending = [client.async_infer("add_sub", pair()) for _ in range(20)]
        for one in pending:
            expect_sum(one.get_result())


def check_statistics(address: str) -> None:
    with triton.InferenceServerClient(address) as client:

        def counted() -> Any:
            return client.get_inference_statistics("versions_all", "2")["model_stats"][0]

        before = counted()
        for _ in range(5):
            client.infer("versions_all", [tensor("INPUT", np.zeros((2, 4), np.int32), "INT32")], "2")
        after = counted()
        assert after["inference_count"] - before["inference_count"] == 10
        assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
        everything = client.get_inference_statistics()["model_stats"]
        assert {(one["name"], one["version"]) for one in everything} >= {("versions_all", v) for v in "123"}
        refused(lambda: client.get_inference_statistics("unknown"), "400", "is not available")


def host_repository(address: str) -> None:
    zeros = [tensor("INPUT", np.zeros((1, 4), np.int32), "INT32")]
    with triton.InferenceServerClient(address) as client:

        def states() -> dict[tuple[str, str], tuple[str, str]]:
            models = client.get_model_repository_index()
            return {(one["name"], one["version"]): (one["state"], one.get("reason", "")) for one in models}

        assert states()["versions_all", "2"] == ("READY", "")
        client.unload_model("versions_all")
        wait_until(lambda: states()["versions_all", "2"] == ("UNAVAILABLE", "unloaded"), what="the unload")
        assert not client.is_model_ready("versions_all") and client.is_server_ready()
        refused(lambda: client.infer("versions_all", zeros), "404", "has no available versions")
        client.load_model("versions_all")
        assert client.is_model_ready("versions_all")
        client.infer("versions_all", zeros)
        client.unload_model("unknown")
        refused(lambda: client.load_model("unknown"), "500", "failed to load 'unknown'")


def check_settings(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        log = client.update_log_settings({"log_verbose_level": 1})
        assert log["log_verbose_level"] == 1
        assert client.get_log_settings() == log
        client.update_log_settings({"log_verbose_level": 0})
        refused(lambda: client.update_log_settings({"log_file": "/tmp/x"}), "501")
        assert client.update_trace_settings(settings={"trace_rate": "7"})["trace_rate"] == "7"
        assert client.update_trace_settings(settings={"trace_rate": None})["trace_rate"] != "7"
        refused(lambda: client.get_trace_settings("unknown"), "400")


def host_system_shared_memory(address: str) -> None:
    nbytes, key = A.nbytes, f"client_{uuid.uuid4().hex[:8]}"
    region = shared_memory.create_shared_memory_region("tensors", key, 4 * nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [A, B])
        with triton.InferenceServerClient(address) as client:
            assert "system_shared_memory" in client.get_server_metadata()["extensions"]
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            _infer_in_shared_memory(client, key, nbytes)
        sums = shared_memory.get_contents_as_numpy(region, np.int32, [4, 16])
        assert np.array_equal(sums[2], (A + B)[0])
    finally:
        shared_memory.destroy_shared_memory_region(region)


def _infer_in_shared_memory(client: triton.InferenceServerClient, key: str, nbytes: int) -> None:
    client.register_system_shared_memory("tensors", key, 4 * nbytes)
    status = client.get_system_shared_memory_status()
    assert status == [{"name": "tensors", "key": key, "offset": 0, "byte_size": 4 * nbytes}]
    refused(lambda: client.register_system_shared_memory("tensors", key, nbytes), "400", "already")
    inputs = [triton.InferInput(f"INPUT{number}", [1, 16], "INT32") for number in (0, 1)]
    for number, one in enumerate(inputs):
        one.set_shared_memory("tensors", nbytes, offset=number * nbytes)
    wanted = [triton.InferRequestedOutput("OUTPUT0"), triton.InferRequestedOutput("OUTPUT1")]
    wanted[0].set_shared_memory("tensors", nbytes, offset=2 * nbytes)
    result = client.infer("add_sub", inputs, outputs=wanted)
    assert np.array_equal(result.as_numpy("OUTPUT1"), A - B)
    assert result.get_output("OUTPUT0") == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}
    inputs[0].set_shared_memory("tensors", nbytes, offset=4 * nbytes)
    refused(lambda: client.infer("add_sub", inputs), "400", "Invalid offset")
    inputs[0].set_shared_memory("nothing", nbytes)
    refused(lambda: client.infer("add_sub", inputs), "404", "Unable to find shared memory region: 'nothing'")
    client.unregister_system_shared_memory("tensors")
    client.unregister_system_shared_memory("tensors")
    assert client.get_system_shared_memory_status() == []


def gateway_loads_and_regions_are_refused(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        extensions = set(client.get_server_metadata()["extensions"])
        assert not extensions & {"system_shared_memory", "cuda_shared_memory"}
        index = {(one["name"], one["version"]): one["state"] for one in client.get_model_repository_index()}
        assert index["versions_all", "2"] == "READY"
        for call in (client.load_model, client.unload_model):
            refused(lambda call=call: call("versions_all"), "501", "models run elsewhere")  # type: ignore[misc]
        away = "models run on other hosts"
        refused(lambda: client.register_system_shared_memory("x", "client_x", 64), "400", away)
        refused(client.unregister_system_shared_memory, "400", away)
        refused(client.get_system_shared_memory_status, "400", away)
        refused(lambda: client.register_cuda_shared_memory("x", b"eA==", 0, 64), "400", away)
        refused(client.get_cuda_shared_memory_status, "400", away)
        client.unregister_cuda_shared_memory()
        first, second = pair()
        first.set_shared_memory("x", A.nbytes)
        refused(lambda: client.infer("add_sub", [first, second]), "400", away)
        expect_sum(client.infer("add_sub", pair()))


def check_errors(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        refused(lambda: client.infer("unknown", pair()), "404", "Request for unknown model")
        refused(lambda: client.infer("add_sub", pair()[:1]), "400", "expected 2 inputs but got 1")
        refused(lambda: client.infer("add_sub", pair(), model_version="9"), "404", "version 9 is not found")


def host_loads_that_bring_something(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        client.load_model("brought", config=config_of(2), files=files())
        assert client.infer("brought", infer_brought(tensor)).as_numpy("OUTPUT").tolist() == [[5]]
        many = [tensor("INPUT", np.zeros((3, 1), np.int32), "INT32")]
        refused(lambda: client.infer("brought", many), "400", "batch-size must be <= 2")
        client.load_model("brought", config=config_of(3), files=files())
        client.infer("brought", many)
        client.unload_model("brought")
        refused(lambda: client.load_model("brought"), "500", "failed to load 'brought'")
        refused(lambda: client.load_model("add_sub", config="{"), "400", "failed to load 'add_sub'")
        refused(lambda: client.load_model("add_sub", files=files()), "400", "'config' is missing")
        expect_sum(client.infer("add_sub", pair()))


def check_plugins(address: str) -> None:
    client = triton.InferenceServerClient(address)
    plugin = BasicAuth("name", "word")
    client.register_plugin(plugin)
    assert client.plugin() is plugin and client.is_server_live()
    client.unregister_plugin()
    client.close()


def check_bodies_made_and_read_by_hand(address: str) -> None:
    body, length = triton.InferenceServerClient.generate_request_body(pair(), request_id="7")
    assert length and length < len(body)
    answer = b'{"outputs":[{"name":"O","datatype":"INT32","shape":[1],"data":[5]}]}'
    assert triton.InferenceServerClient.parse_response_body(answer).as_numpy("O").tolist() == [5]


def check_sequences(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        totals = []
        for step in range(1, 4):
            inputs = [tensor("INPUT", np.array([[step]], np.int32), "INT32")]
            where = {"sequence_id": "mine", "sequence_start": step == 1, "sequence_end": step == 3}
            totals.append(int(client.infer("accumulator", inputs, **where).as_numpy("OUTPUT")[0, 0]))
        assert totals == [1, 3, 6]


def host_cuda_shared_memory_without_a_gpu(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        client.unregister_cuda_shared_memory()
        refused(lambda: client.get_cuda_shared_memory_status(), "501", "CUDA")
        refused(lambda: client.register_cuda_shared_memory("x", b"eA==", 0, 64), "501", "CUDA")
