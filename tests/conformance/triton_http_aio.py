"""Every call of the public asyncio HTTP client, each in a function that runs apart (`tests.harness.apart`)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Any

import numpy as np
from tritonclient.http import aio
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException, shared_memory

from tests.conformance.brought import config_of, files, infer_brought
from tests.conformance.triton_http import A, B, expect_sum, pair, tensor
from tests.harness.server import eventually


async def refused(call: Awaitable[Any], status: str, *words: str) -> None:
    """`call` raises, with this status and these words."""
    try:
        await call
    except InferenceServerException as error:
        assert error.status() == status, (error.status(), error.message())
        for word in words:
            assert word in error.message(), (word, error.message())
        return
    raise AssertionError("the call was answered")


def check_what_is_said_of_server_and_models(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("add_sub") and not await client.is_model_ready("unknown")
            assert (await client.get_server_metadata())["name"] == "penstock"
            assert (await client.get_model_metadata("add_sub", "1"))["versions"] == ["1"]
            assert (await client.get_model_config("add_sub"))["max_batch_size"] == 8
            [one] = (await client.get_inference_statistics("add_sub"))["model_stats"]
            assert one["name"] == "add_sub"
            await refused(client.get_model_metadata("unknown"), "404", "Request for unknown model")
            await refused(client.get_inference_statistics("unknown"), "400", "is not available")

    asyncio.run(run())


def check_infer(address: str) -> None:
    async def run() -> None:
        array = np.zeros((1, 100_000), np.float32)
        async with aio.InferenceServerClient(address) as client:
            for result in await asyncio.gather(*(client.infer("add_sub", pair()) for _ in range(20))):
                expect_sum(result)
            expect_sum(await client.infer("add_sub", pair(binary=False)))
            for algorithm in ("gzip", "deflate", None):
                result = await client.infer(
                    "identity_fp32",
                    [tensor("INPUT", array, "FP32")],
                    request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )
                assert np.array_equal(result.as_numpy("OUTPUT"), array)
            await refused(client.infer("unknown", pair()), "404", "Request for unknown model")

    asyncio.run(run())


def check_bodies_made_and_read_by_hand(address: str) -> None:
    body, length = aio.InferenceServerClient.generate_request_body(pair(), request_id="7")
    assert length and length < len(body)
    answer = b'{"outputs":[{"name":"O","datatype":"INT32","shape":[1],"data":[5]}]}'
    assert aio.InferenceServerClient.parse_response_body(answer).as_numpy("O").tolist() == [5]


def check_sequences(address: str) -> None:
    async def run() -> None:
        totals = []
        async with aio.InferenceServerClient(address) as client:
            for step in range(1, 4):
                inputs = [tensor("INPUT", np.array([[step]], np.int32), "INT32")]
                where = {"sequence_id": 72, "sequence_start": step == 1, "sequence_end": step == 3}
                found = await client.infer("accumulator", inputs, **where)
                totals.append(int(found.as_numpy("OUTPUT")[0, 0]))
        assert totals == [1, 3, 6]

    asyncio.run(run())


def host_repository(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.unload_model("versions_all")

            async def gone() -> bool:
                index = await client.get_model_repository_index()
                return ("versions_all", "UNAVAILABLE") in {(one["name"], one["state"]) for one in index}

            await eventually(gone, "the unload")
            await client.load_model("versions_all")
            assert await client.is_model_ready("versions_all")
            await refused(client.load_model("unknown"), "500", "failed to load 'unknown'")

    asyncio.run(run())


def host_loads_that_bring_something(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.load_model("brought_aio", config=config_of(2), files=files())
            expected = await client.infer("brought_aio", infer_brought(tensor))
            assert expected.as_numpy("OUTPUT").tolist() == [[5]]
            await client.unload_model("brought_aio")
            await refused(client.load_model("brought_aio"), "500", "failed to load 'brought_aio'")

    asyncio.run(run())


def check_settings(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            log = await client.update_log_settings({"log_verbose_level": 0})
            assert await client.get_log_settings() == log
            trace = await client.update_trace_settings(settings={"trace_rate": "9"})
            assert trace["trace_rate"] == "9" and await client.get_trace_settings() == trace
            assert (await client.update_trace_settings(settings={"trace_rate": None}))["trace_rate"] != "9"

    asyncio.run(run())


def host_shared_memory(address: str) -> None:
    async def run(key: str, nbytes: int) -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.unregister_system_shared_memory()
            await client.unregister_cuda_shared_memory()
            await client.register_system_shared_memory("aio", key, nbytes)
            [status] = await client.get_system_shared_memory_status("aio")
            assert status == {"name": "aio", "key": key, "offset": 0, "byte_size": nbytes}
            first = tensor("INPUT0", A, "INT32")
            first.set_shared_memory("aio", nbytes)
            expect_sum(await client.infer("add_sub", [first, tensor("INPUT1", B, "INT32")]))
            await client.unregister_system_shared_memory("aio")
            await refused(client.get_system_shared_memory_status("aio"), "404", "aio")
            # There is no GPU here: only the unregistering, which clients in use always do, is answered.
            await refused(client.get_cuda_shared_memory_status(), "501", "CUDA")
            await refused(client.register_cuda_shared_memory("x", b"eA==", 0, 64), "501", "CUDA")

    key = f"client_{uuid.uuid4().hex[:8]}"
    region = shared_memory.create_shared_memory_region("aio", key, A.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [A])
        asyncio.run(run(key, A.nbytes))
    finally:
        shared_memory.destroy_shared_memory_region(region)


def check_plugins(address: str) -> None:
    async def run() -> None:
        client = aio.InferenceServerClient(address)
        plugin = BasicAuth("name", "word")
        client.register_plugin(plugin)
        assert client.plugin() is plugin and await client.is_server_live()
        client.unregister_plugin()
        await client.close()

    asyncio.run(run())
