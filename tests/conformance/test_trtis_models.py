"""TRTIS v1 with a model of every datatype, of every version policy, and of every kind of size."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import FADING, NAMED, NUMPY, strings
from tests.conformance.trtis_transports import TRANSPORTS, Asked, Stub, over_http
from tests.harness.server import Server, wait_until

POLICIES = {"versions_latest": {3}, "versions_all": {1, 2, 3}, "versions_specific": {1, 3}}
ONE = 'batch_size: {rows} input {{ name: "INPUT" {dims} }} output {{ name: "OUTPUT" }} id: 5'


@pytest.fixture
def server(either_trtis: Server) -> Server:
    """The server, and a gateway whose only box is the server."""
    return either_trtis


@pytest.fixture
def stub(trtis_stub: Stub) -> Stub:
    return trtis_stub


def sample(name: str, count: int) -> bytes:
    """Raw values of a datatype, its limits among them."""
    if name == BYTES:
        return strings(*([b"", "säge\0".encode(), b"\xff" * 300] * count)[:count])
    dtype = np.dtype(NUMPY[name])
    if dtype.kind == "b":
        return (np.arange(count) % 2 == 0).tobytes()
    facts = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return np.resize(np.array([facts.min, facts.max, 1], dtype), count).tobytes()


def test_every_datatype_of_the_contract_is_looked_at() -> None:
    assert set(NAMED) == set(DATATYPES) - {"BF16"}
    assert set(NAMED.values()) == set(pb.DataType.keys()) - {"TYPE_INVALID"}


@pytest.mark.parametrize("over", TRANSPORTS)
@pytest.mark.parametrize("name", NAMED)
def test_values_of_every_datatype_come_back(server: Server, stub: Stub, name: str, over: str) -> None:
    for rows, width in ((2, 3), (1, 1), (3, 0)):
        raw = sample(name, rows * width)
        more = f"dims: {width}" + (f" batch_byte_size: {len(raw)}" if name == BYTES else "")
        asked = Asked(f"identity_{name.lower()}", ONE.format(rows=rows, dims=more), (raw,))
        told = TRANSPORTS[over](server, stub, asked)
        assert told.status.code == pb.SUCCESS, told.status.msg
        [output] = told.header.output
        assert (list(output.raw.dims), output.raw.batch_byte_size) == ([width], len(raw))
        assert told.raw == [raw] and told.header.batch_size == rows


def test_the_status_names_every_datatype(server: Server) -> None:
    found = pb.ServerStatus.FromString(server.get("/api/status?format=binary").body).model_status
    for name, config in NAMED.items():
        shown = found[f"identity_{name.lower()}"].config
        assert [pb.DataType.Name(one.data_type) for one in (*shown.input, *shown.output)] == [config] * 2


@pytest.mark.parametrize("model", POLICIES)
def test_only_versions_of_the_policy_are_served(server: Server, stub: Stub, model: str) -> None:
    sent = np.arange(4, dtype="<i4")
    for over in TRANSPORTS.values():
        for version in (-1, 0, 1, 2, 3, 4):
            told = over(server, stub, Asked(model, ONE.format(rows=1, dims=""), (sent.tobytes(),), version))
            answered = max(POLICIES[model]) if version == -1 else version
            if answered in POLICIES[model]:
                assert told.header.model_version == answered
                assert told.raw == [(sent + answered).astype("<i4").tobytes()]
            else:
                assert told.status.msg.startswith(f"Inference request for unknown model '{model}'")
    found = pb.ServerStatus.FromString(server.get(f"/api/status/{model}?format=binary").body)
    assert set(found.model_status[model].version_status) - {-1} == POLICIES[model]


@pytest.mark.parametrize("over", TRANSPORTS)
def test_sizes_that_vary_are_nothing_or_are_reshaped(server: Server, stub: Stub, over: str) -> None:
    numbers = np.arange(12, dtype="<f4")
    cases = [
        ("variable", "dims: 2 dims: 3", numbers, [2], numbers.reshape(2, 2, 3).sum(-1)),
        ("variable", "dims: 3 dims: 2", numbers, [3], numbers.reshape(2, 3, 2).sum(-1)),
        ("zero_size", "dims: 6", numbers, [0], numbers[:0]),
        ("zero_size", "dims: 0", numbers[:0], [0], numbers[:0]),
        ("reshape", "", numbers[:8], [1], numbers[:8].reshape(2, 4).sum(-1)),
    ]
    for model, dims, sent, shape, expected in cases:
        told = TRANSPORTS[over](server, stub, Asked(model, ONE.format(rows=2, dims=dims), (sent.tobytes(),)))
        assert told.status.code == pb.SUCCESS, told.status.msg
        assert list(told.header.output[0].raw.dims) == shape
        assert told.raw == [expected.astype("<f4").tobytes()]


@pytest.mark.parametrize("either_trtis", ["workers"], indirect=True)
def test_what_is_removed_stays_in_the_status_with_its_counts(server: Server, stub: Stub) -> None:
    def shown() -> dict[int, tuple[str, int]]:
        found = pb.ServerStatus.FromString(server.get(f"/api/status/{FADING}?format=binary").body)
        versions = found.model_status[FADING].version_status.items()
        return {
            number: (pb.ModelReadyState.Name(one.ready_state), one.model_inference_count)
            for number, one in versions
        }

    asked = Asked(FADING, ONE.format(rows=1, dims=""), (bytes(16),), 2)
    assert over_http(server, stub, asked).status.code == pb.SUCCESS
    repository = Path(server.environment["PENSTOCK_REPOSITORY__DIRS"])
    shutil.rmtree(repository / FADING / "2")
    ready, gone = "MODEL_READY", "MODEL_UNAVAILABLE"
    wait_until(lambda: shown() == {1: (ready, 0), 2: (gone, 1), 3: (ready, 0)}, what="the version's end")
    shutil.rmtree(repository / FADING)
    wait_until(lambda: shown() == {1: (gone, 0), 2: (gone, 1), 3: (gone, 0)}, what="the model's end")

    def state_in_the_whole() -> int:
        whole = pb.ServerStatus.FromString(server.get("/api/status?format=binary").body)
        return whole.model_status[FADING].version_status[2].ready_state

    wait_until(lambda: state_in_the_whole() == pb.MODEL_UNAVAILABLE, what="the end in the whole status")
