"""Every call of the public asyncio gRPC client, each in a function that runs apart (`tests.harness.apart`)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import numpy as np
from tritonclient.grpc import aio
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException, shared_memory

from tests.conformance.brought import config_of, files, infer_brought
from tests.conformance.triton_grpc import A, B, expect_sum, pair, tensor
from tests.harness.server import eventually


async def refused(call: Awaitable[Any], status: str, *words: str) -> None:
    """`call` raises, with this status and these words."""
    try:
        await call
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{status}", (error.status(), error.message())
        for word in words:
            assert word in error.message(), (word, error.message())
        return
    raise AssertionError("the call was answered")


def check_what_is_said_of_server_and_models(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("add_sub") and not await client.is_model_ready("unknown")
            assert (await client.get_server_metadata()).name == "penstock"
            assert list((await client.get_model_metadata("add_sub", "1")).versions) == ["1"]
            assert (await client.get_model_config("add_sub")).config.max_batch_size == 8
            [one] = (await client.get_inference_statistics("add_sub")).model_stats
            assert one.name == "add_sub"
            await refused(client.get_model_metadata("unknown"), "NOT_FOUND", "Request for unknown model")

    asyncio.run(run())


def check_infer(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            for result in await asyncio.gather(*(client.infer("add_sub", pair()) for _ in range(20))):
                expect_sum(result)
            for algorithm in ("gzip", "deflate"):
                expect_sum(await client.infer("add_sub", pair(), compression_algorithm=algorithm))
            await refused(client.infer("unknown", pair()), "NOT_FOUND", "Request for unknown model")
            await refused(client.infer("add_sub", pair()[:1]), "INVALID_ARGUMENT", "expected 2 inputs")

    asyncio.run(run())


def check_streams_and_sequences(address: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for step in range(1, 5):
            inputs = [tensor("INPUT", np.array([[step]], np.int32), "INT32")]
            where = {"sequence_id": "text", "sequence_start": step == 1, "sequence_end": step == 4}
            yield {"model_name": "accumulator", "inputs": inputs, "request_id": str(step), **where}

    async def run() -> None:
        totals = []
        async with aio.InferenceServerClient(address) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                totals.append((result.get_response().id, int(result.as_numpy("OUTPUT")[0, 0])))
        assert totals == [("1", 1), ("2", 3), ("3", 6), ("4", 10)]

    asyncio.run(run())


def host_repository(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.unload_model("versions_all")

            async def gone() -> bool:
                index = (await client.get_model_repository_index()).models
                return ("versions_all", "UNAVAILABLE") in {(one.name, one.state) for one in index}

            await eventually(gone, "the unload")
            await client.load_model("versions_all")
            assert await client.is_model_ready("versions_all")
            await refused(client.load_model("unknown"), "INTERNAL", "failed to load 'unknown'")

    asyncio.run(run())


def host_loads_that_bring_something(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.load_model("brought_aio", config=config_of(2), files=files())
            expected = await client.infer("brought_aio", infer_brought(tensor))
            assert expected.as_numpy("OUTPUT").tolist() == [[5]]
            await client.unload_model("brought_aio")
            await refused(client.load_model("brought_aio"), "INTERNAL", "failed to load 'brought_aio'")
            await refused(client.load_model("add_sub", config="{"), "INVALID_ARGUMENT", "failed to load")

    asyncio.run(run())


def check_settings(address: str) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(address) as client:
            log = await client.update_log_settings({"log_verbose_level": 0}, as_json=True)
            assert await client.get_log_settings(as_json=True) == log
            trace = await client.update_trace_settings(settings={"trace_rate": "9"}, as_json=True)
            assert trace["settings"]["trace_rate"] == {"value": ["9"]}
            assert await client.get_trace_settings(as_json=True) == trace
            await client.update_trace_settings(settings={"trace_rate": None})

    asyncio.run(run())


def host_shared_memory(address: str) -> None:
    async def run(key: str, nbytes: int) -> None:
        async with aio.InferenceServerClient(address) as client:
            await client.unregister_system_shared_memory()
            await client.unregister_cuda_shared_memory()
            await client.register_system_shared_memory("aio", key, nbytes)
            regions = (await client.get_system_shared_memory_status("aio")).regions
            assert (regions["aio"].key, regions["aio"].byte_size) == (key, nbytes)
            first = tensor("INPUT0", A, "INT32")
            first.set_shared_memory("aio", nbytes)
            expect_sum(await client.infer("add_sub", [first, tensor("INPUT1", B, "INT32")]))
            await client.unregister_system_shared_memory("aio")
            await refused(client.get_system_shared_memory_status("aio"), "NOT_FOUND", "aio")
            # There is no GPU here: only the unregistering, which clients in use always do, is answered.
            await refused(client.get_cuda_shared_memory_status(), "UNIMPLEMENTED", "CUDA")
            await refused(client.register_cuda_shared_memory("x", b"eA==", 0, 64), "UNIMPLEMENTED", "CUDA")

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
