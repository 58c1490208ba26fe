"""What programs say of inputs that they do not take reaches clients of every protocol, and costs no neighbour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from ipc.protos import kserve_v2_pb2 as pb
from ipc.protos import trtis_v1_pb2 as trtis_pb
from tests.conformance.kserve import post
from tests.conformance.trtis import infer as infer_of_trtis
from tests.conformance.trtis_transports import Stub
from tests.harness.cluster import ways_to
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import Server, serving
from tests.tiny import onnx_files, programs
from tests.tiny.program_modules import Rates, Windows

SOURCE = '''
import numpy as np
from penstock.model import Model


class Speaking(Model):
    """The input, which says what is raised."""

    def infer(self, batch):
        found = batch.array("INPUT")
        rate = int(found.max())
        if rate == 1:
            raise ValueError(f"the rate {rate} of /srv/models/x/rates.txt is \\x1b[31mwrong\\nsecond line")
        if rate == 2:
            found.reshape(7)
        if rate == 3:
            raise KeyError("a secret of the model")
        return {"OUTPUT": found}
'''
NO_INDEX = "indices element out of data bounds, idx=7"
REFUSED = [
    ("index", np.array([[7]]), NO_INDEX),
    (
        "length",
        np.zeros((1, 600), np.float32),
        "Add: Attempting to broadcast an axis by a dimension other than 1.",
    ),
    ("script", np.zeros(9, np.float32), "the rate 9 is none of 2 and 4"),
    ("script", np.zeros(4, np.float32), "The size of tensor a (4) must match the size of tensor b (2)"),
    ("exported", np.zeros(3, np.float32), "Kernel size can't be greater than actual input size"),
    ("python", np.array([1], np.int32), "the rate 1 of rates.txt is  [31mwrong"),
    ("python", np.array([2], np.int32), "cannot reshape array of size 1 into shape (7,)"),
]
"""Model, input, and words of the refusal."""
DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("onnxruntime")
    place = tmp_path_factory.mktemp("speaking")
    models = place / "models"
    for name, program, content in (
        ("index", "model.onnx", onnx_files.embedded(5, 2)),
        ("length", "model.onnx", onnx_files.positions(512)),
        ("python", "model.py", SOURCE.encode()),
    ):
        (models / name / "1").mkdir(parents=True)
        (models / name / "1" / program).write_bytes(content)
    for name, datatype in (("script", "FP32"), ("python", "INT32")):
        sides = [programs.tensor(kind, kind.upper(), datatype, [-1]) for kind in ("input", "output")]
        (models / name).mkdir(exist_ok=True)
        (models / name / "config.pbtxt").write_text("".join(sides))
    (models / "script" / "1").mkdir()
    torch.jit.save(torch.jit.script(Rates()), models / "script" / "1" / "model.pt")
    programs.exported(Windows(), [torch.zeros(9)], [0], models / "exported" / "1" / "model.pt2")
    settings = {
        "repository.dirs": models,
        "repository.allow_python": "true",
        "catalog.dirs": "",
        "catalog.models": "",
        "log.format": "json",
    }
    with serving(place, (), grpc_settings(**settings), supervised=False) as running:
        yield running


server = ways_to("local")


def side(array: np.ndarray) -> dict[str, Any]:
    """The input of a model without data."""
    return {"name": "INPUT", "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}


def ask(server: Server, model: str, array: np.ndarray) -> Any:
    """One request of KServe over HTTP."""
    inputs = [side(array) | {"data": array.ravel().tolist()}]
    return post(server, f"/v2/models/{model}/infer", {"inputs": inputs})


@pytest.mark.parametrize(("model", "array", "words"), REFUSED)
def test_a_refusal_of_a_program_reaches_the_client(
    server: Server, model: str, array: np.ndarray, words: str
) -> None:
    found = ask(server, model, array)
    assert (found.status, found.head["code"]) == (400, "INVALID_INPUT")
    assert words in found.error and "/" not in found.error.replace("inputs/outputs", "")
    assert found.error.isprintable() and len(found.error) < 400


@pytest.mark.parametrize(("model", "array", "words"), REFUSED)
def test_and_over_grpc(server: Server, model: str, array: np.ndarray, words: str) -> None:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(**side(array))
    with Rpc(address_of(server)) as rpc, pytest.raises(grpc.RpcError) as failed:
        rpc.call("ModelInfer", request)
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in failed.value.details()


@pytest.mark.parametrize(("model", "array", "words"), REFUSED)
def test_and_over_trtis(server: Server, model: str, array: np.ndarray, words: str) -> None:
    batches = model in ("index", "length")
    dims = list(array.shape[1:] if batches else array.shape)
    output = "OUTPUT__0" if model == "exported" else "OUTPUT"
    header = f'batch_size: 1 input {{ name: "INPUT" dims: {dims} }} output {{ name: "{output}" }}'
    found = infer_of_trtis(server, model, header, array.tobytes())
    assert (found.answer.status, found.status.code) == (400, trtis_pb.INVALID_ARG), found.status
    assert words in found.status.msg
    request = trtis_pb.InferRequest(model_name=model, model_version=-1, raw_input=[array.tobytes()])
    request.meta_data.batch_size = 1
    request.meta_data.input.add(name="INPUT", dims=dims)
    request.meta_data.output.add(name=output)
    with grpc.insecure_channel(address_of(server)) as channel:
        status = Stub(channel).infer(request).request_status
    assert status.code == trtis_pb.INVALID_ARG and words in status.msg


def test_what_python_code_raises_otherwise_is_for_the_log_only(server: Server) -> None:
    found = ask(server, "python", np.array([3], np.int32))
    assert (found.status, found.head["code"]) == (500, "INFERENCE_ERROR")
    assert found.error == "the model failed on this input"


def test_a_refused_request_costs_no_neighbour(server: Server) -> None:
    numbers = [7 if at % 5 == 0 else at % 5 for at in range(100)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: ask(server, "index", np.array([[number]])), numbers))
    for number, found in zip(numbers, answers, strict=True):
        if number == 7:
            assert found.status == 400 and NO_INDEX in found.error
        else:
            assert found.status == 200 and found.head["outputs"][0]["data"] == [2 * number, 2 * number + 1]


def test_a_runtime_writes_no_lines_of_its_own(server: Server) -> None:
    ask(server, "index", np.array([[7]]))
    for line in server.log.splitlines():
        json.loads(line)
