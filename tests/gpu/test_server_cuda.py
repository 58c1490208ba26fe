"""Whole servers with workers on a CUDA device: memory, faults of the device, kills, device memory of clients."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pynvml
import pytest
import torch

from ipc.wire.messages import InputItem
from tests.conformance import kserve
from tests.fakes.adapter import vector_of
from tests.fakes.cuda_faults import TOKENS
from tests.harness.calls import asked
from tests.harness.lifecycle import load, unload
from tests.harness.load import Load
from tests.harness.server import Server, make_server, serving, wait_until
from tests.tiny.models import build
from tests.tiny.programs import SCRIPTED, write_repository
from workers.adapters.base import LoadContext
from workers.adapters.dense import DenseAdapter

pytestmark = pytest.mark.gpu
MODEL, FAULTY = "tiny/mean", "fake/faulty"
ON_CUDA = {"worker.device": "cuda"}
SLACK_NBYTES = 8 << 20
"""The driver takes memory for kernels as they are first used."""
TEXTS = [f"Water turns wheel number {number} of the mill by the river." for number in range(300)]


def write_catalog(place: Path) -> Path:
    """A dense model in half precision, and the model that does harm."""
    catalog = place / "catalog"
    catalog.mkdir()
    entry = {
        "id": MODEL,
        "source": {"kind": "directory", "path": str(build("dense_mean", place / "model"))},
        "adapter": "dense",
        "outputs": {"dense": {"dims": 64}},
        "precision": "bfloat16",
    }
    faulty = {
        "id": FAULTY,
        "source": {"kind": "directory", "path": str(place / "model")},
        "adapter": "tests.fakes.cuda_faults:CudaFaults",
        "outputs": {"dense": {"dims": 16}},
        "max_sequence_length": 512,
    }
    for name, content in (("mean", entry), ("faulty", faulty)):
        (catalog / f"{name}.yaml").write_text(json.dumps(content))
    return catalog


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker with both models, whose results are never inline."""
    place = tmp_path_factory.mktemp("cuda")
    settings = {**ON_CUDA, "arena.inline_bytes": 0}
    with serving(place, (MODEL, FAULTY), settings, catalog=write_catalog(place)) as running:
        yield running
        assert "could not be pinned" not in running.log


def test_vectors_come_through_the_pinned_arena_as_they_are_computed_on_the_device(
    server: Server, tmp_path: Path
) -> None:
    found = server.encode(MODEL, TEXTS)
    assert found.status == 200, found.body
    directory = build("dense_mean", tmp_path / "model")
    adapter = DenseAdapter.load(
        LoadContext(
            directory, "m", torch.device("cuda"), torch.float32, None, {}, lambda phase, fraction: None
        )
    )
    batch = adapter.collate(adapter.prepare([InputItem(text=text) for text in TEXTS], asked()))
    wanted = adapter.encode(batch, frozenset({"dense"}))["dense"].cpu().numpy()
    rows = np.array([item["dense"]["values"] for item in found.json()["items"]])
    assert (1 - (rows * wanted).sum(1)).max() < 1e-3


def test_the_device_and_its_memory_are_told(server: Server) -> None:
    name = torch.cuda.get_device_name()
    assert name in server.log
    total = torch.cuda.get_device_properties(0).total_memory
    wait_until(
        lambda: server.metric("penstock_gpu_memory_total_bytes") >= total * 0.9, what="the memory told"
    )
    assert 0 < server.metric("penstock_gpu_memory_bytes") <= server.metric("penstock_gpu_memory_total_bytes")
    assert server.metric("penstock_gpu_power_watts") > 0


def test_a_batch_that_does_not_fit_is_split_and_every_item_is_answered(server: Server) -> None:
    texts = [f"{number:040d}" for number in range(60)]
    answer = server.encode(FAULTY, [*texts, "large " * (TOKENS + 1)], item_errors=True)
    assert answer.status == 200, answer.body
    *items, large = answer.json()["items"]
    for text, item in zip(texts, items, strict=True):
        np.testing.assert_allclose(item["dense"]["values"], vector_of(text, 16), atol=1e-6)
    assert large["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert server.metric("penstock_oom_total", model=FAULTY) > 0
    assert server.starts(0) == 1


def device_memory_of(pid: int | None) -> int:
    """Bytes of the device that a process holds."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(each.usedGpuMemory for each in found if each.pid == pid)


def test_an_unload_gives_device_memory_back(tmp_path: Path) -> None:
    with serving(tmp_path, (MODEL,), ON_CUDA, catalog=write_catalog(tmp_path)) as server:
        used = []
        for _ in range(6):
            load(server, MODEL)
            assert server.encode(MODEL, TEXTS).status == 200
            loaded = device_memory_of(server.worker_pid())
            unload(server, MODEL)
            used.append(device_memory_of(server.worker_pid()))
            assert used[-1] < loaded
        assert used[-1] <= used[1] + SLACK_NBYTES


@contextlib.contextmanager
def two_workers(place: Path) -> Iterator[Server]:
    """Two workers on one device."""
    settings = {**ON_CUDA, "worker.count": 2, "worker.healthy_after_s": 0.5}
    server = make_server(place, (FAULTY,), settings, write_catalog(place))
    server.environment["CUDA_VISIBLE_DEVICES"] = "0,0"
    server.start()
    try:
        server.wait_ready()
        wait_until(lambda: server.starts(0) and server.starts(1), what="two workers")
        yield server
        server.stop()
        server.assert_nothing_left()
    finally:
        server.kill_everything()


def starts(server: Server) -> int:
    """How often workers have become ready."""
    return server.starts(0) + server.starts(1)


def test_a_poisoned_context_ends_the_worker_and_no_other_request(tmp_path: Path) -> None:
    with two_workers(tmp_path) as server:
        with Load(server.port, clients=4, model=FAULTY) as under:
            wait_until(lambda: under.done > 20, what="traffic")
            answer = server.encode(FAULTY, ["#assert"], timeout_s=120)
            assert answer.status == 500, answer.body
            assert answer.json()["detail"]["code"] == "WORKER_CRASHED"
            wait_until(lambda: starts(server) == 4, 120, "both workers again")
            seen = under.done
            wait_until(lambda: under.done > seen + 20, what="traffic")
            outcome = under.stop()
        assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])
        ends = re.findall(r"worker [01] ended[^\n]*", server.log)
        assert len(ends) == 2 and all("(exit-70)" in end for end in ends), server.log[-9000:]


def test_a_killed_worker_costs_no_request(tmp_path: Path) -> None:
    with two_workers(tmp_path) as server:
        with Load(server.port, clients=8, model=FAULTY) as under:
            wait_until(lambda: under.done > 30, what="traffic")
            os.kill(wait_until(server.worker_pid), signal.SIGKILL)
            wait_until(lambda: starts(server) == 3, 120, "the worker's return")
            seen = under.done
            wait_until(lambda: under.done > seen + 30, what="traffic")
            outcome = under.stop()
        assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


def handle_of(memory: torch.Tensor) -> bytes:
    """The IPC handle of device memory that has an allocation of its own."""
    library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    handle = Handle()
    assert library.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr())) == 0
    return bytes(handle)


def test_inputs_and_outputs_lie_in_device_memory_of_the_client(tmp_path: Path) -> None:
    settings = {
        **ON_CUDA,
        "repository.dirs": write_repository(tmp_path / "models", ["add_sub"], SCRIPTED),
        "catalog.dirs": "",
        "catalog.models": "",
        "shared_memory.enabled": "true",
    }
    # NOTE: torch gives more than 20 MiB an allocation of their own, so that the handle names the tensor from its start.
    size = 32 << 20
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    memory[:64].copy_(torch.from_numpy(kserve.A.reshape(-1).view(np.uint8).copy()))
    memory[64:128].copy_(torch.from_numpy(kserve.B.reshape(-1).view(np.uint8).copy()))
    torch.cuda.synchronize()
    with serving(tmp_path, (), settings) as server:
        body = {
            "raw_handle": {"b64": base64.b64encode(handle_of(memory)).decode()},
            "byte_size": size,
            "device_id": 0,
        }
        told = server.post("/v2/cudasharedmemory/region/mine/register", body)
        assert told.status == 200, told.body

        def place(offset: int) -> dict[str, object]:
            return {
                "shared_memory_region": "mine",
                "shared_memory_byte_size": 64,
                "shared_memory_offset": offset,
            }

        request = {
            "inputs": [
                kserve.tensor("INPUT0", kserve.A, parameters=place(0)),
                kserve.tensor("INPUT1", kserve.B, parameters=place(64)),
            ],
            "outputs": [
                {"name": "OUTPUT0", "parameters": place(128)},
                {"name": "OUTPUT1", "parameters": place(192)},
            ],
        }
        found = kserve.post(server, kserve.ADD_SUB, request)
        assert found.status == 200, found.answer.body
        results = memory[128:256].cpu().numpy().view("<i4").reshape(2, 16)
        np.testing.assert_array_equal(results, [(kserve.A + kserve.B)[0], (kserve.A - kserve.B)[0]])
        assert server.post("/v2/cudasharedmemory/region/mine/unregister", {}).status == 200
        refused = kserve.post(server, kserve.ADD_SUB, request)
        assert refused.status == 404 and "mine" in refused.error
