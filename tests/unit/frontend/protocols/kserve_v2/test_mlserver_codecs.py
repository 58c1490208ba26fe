"""Requests as the codecs of MLServer 1.7 write them, to catalog models over all forms of KServe v2.

The bodies are those of `StringRequestCodec`, `NumpyRequestCodec` and `Base64Codec`, with the inputs named as catalog
models name them. `model_dump_json` leaves nulls out, `json` writes them. gRPC messages are those of its converters.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.protocols.kserve_v2.generate import GENERATE, request_of
from frontend.protocols.kserve_v2.grpc import reading as grpc_reading
from frontend.protocols.kserve_v2.reading import Target, parse
from frontend.scope import plain_scope
from frontend.services import Services
from frontend.tensors.catalog_calls import LONG_NBYTES
from frontend.tensors.request import InputTensor, TensorRequest, WantedOutput
from ipc import deadline
from ipc.catalog.entries import OutputSpec
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb
from ipc.wire import extraction
from ipc.wire.messages import InputItem
from tests.fakes.tensors import ArrayReply, elements, entry, loaded, run, services_of
from tests.tiny.pictures import encoded, picture

PNG = encoded(picture(1, 48, 32))
LARGE = PNG + random.Random(1).randbytes(LONG_NBYTES)
TEXTS = ["river", "stone"]
ITEMS = [InputItem("river"), InputItem("stone")]
FOUND = extraction.pack(extraction.Extraction())
REPLIES: dict[str, ArrayReply] = {
    "org/plain": ArrayReply({"dense": np.eye(2, 4, dtype=np.float32)}),
    "org/pictures": ArrayReply({"dense": np.eye(1, 4, dtype=np.float32)}),
    "org/rank": ArrayReply({"score": np.array([0.5, 2], np.float32)}),
    "org/finder": ArrayReply(
        {"extraction": np.frombuffer(FOUND * 2, np.uint8)}, {"extraction": [len(FOUND)] * 2}
    ),
}
ENTRIES = [
    entry("org/plain"),
    entry("org/pictures", inputs=("image",)),
    entry("org/rank", outputs={"score": OutputSpec()}),
    entry("org/finder", outputs={"json": OutputSpec()}),
]


@pytest.fixture
def made(tmp_path: Path) -> Services:
    """Services with a model of each kind."""
    statuses = [loaded(one.id, dims={"dense": 4}) for one in ENTRIES]
    return services_of(tmp_path, ENTRIES, statuses, lambda work: REPLIES[work.model])


def ask(made: Services, request: TensorRequest) -> Any:
    """Run a request: the call that was made, and its outputs."""
    scope = plain_scope()
    scope.deadline_ns = deadline.after(60)
    result = asyncio.run(run(made, scope, request))
    return made.engine.client.requests[-1].call, result.outputs  # type: ignore[attr-defined]


def strings(name: str, texts: list[str], nulls: bool, codec: str = "str") -> dict[str, Any]:
    """An input of `StringCodec.encode_input`, or of another codec of lists."""
    tensor = {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
    return {**tensor, "parameters": parameters(codec, nulls)}


def parameters(codec: str, nulls: bool) -> dict[str, Any]:
    """The `Parameters` of a tensor or a request."""
    return {"content_type": codec, **({"headers": None} if nulls else {})}


def sent(model: str, inputs: list[dict[str, Any]], codec: str, nulls: bool, **more: Any) -> TensorRequest:
    """An `InferenceRequest` over HTTP."""
    body = {"parameters": parameters(codec, nulls), "inputs": inputs, **more}
    if nulls:
        body = {"id": None, "outputs": None, **body}
    return parse(model, None, json.dumps(body).encode(), None).request


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("codec", ["str", "np"])
def test_a_request_of_the_codecs_is_answered_by_every_kind(codec: str, nulls: bool, made: Services) -> None:
    call, (dense,) = ask(made, sent("plain", [strings("text", TEXTS, nulls, codec)], codec, nulls))
    assert (call.items, call.options, dense.shape) == (ITEMS, {}, [2, 4])
    inputs = [strings("query", ["q"], nulls, codec), strings("documents", TEXTS, nulls, codec)]
    call, (score,) = ask(made, sent("rank", inputs, codec, nulls))
    assert (call.query, call.items, score.shape) == (InputItem("q"), ITEMS, [2])
    inputs = [strings("text", TEXTS, nulls, codec), strings("labels", ["a", "b", "c"], nulls, codec)]
    call, (found,) = ask(made, sent("finder", inputs, codec, nulls))
    assert (call.items, call.labels, found.shape) == (ITEMS, ["a", "b", "c"], [2])


def test_a_table_of_pandas_has_a_column_for_each_input(made: Services) -> None:
    inputs = [strings("text", TEXTS, False), {**strings("labels", TEXTS, False), "parameters": None}]
    call, _ = ask(made, sent("finder", inputs, "pd", False))
    assert (call.items, call.labels) == (ITEMS, TEXTS)


@pytest.mark.parametrize("file", [PNG, LARGE], ids=["short", "long"])
def test_elements_in_base64_are_decoded(file: bytes, made: Services) -> None:
    image = strings("image", [base64.b64encode(file).decode()], False, "base64")
    outputs = [{"name": "dense", "parameters": parameters("np", True)}]
    call, (dense,) = ask(made, sent("pictures", [image], "", False, outputs=outputs))
    assert (call.items, dense.shape) == ([InputItem(None, None, [file])], [1, 4])
    packed = [base64.b64encode(text.encode()).decode() for text in TEXTS]
    call, _ = ask(made, sent("plain", [strings("text", packed, False, "base64")], "", False))
    assert call.items == ITEMS


@pytest.mark.parametrize("raw", [False, True])
def test_grpc_messages_of_its_converters_are_answered(raw: bool, made: Services) -> None:
    message = pb.ModelInferRequest(model_name="plain")
    message.parameters["content_type"].string_param = "str"
    tensor = message.inputs.add(name="text", datatype="BYTES", shape=[2, 1])
    tensor.parameters["content_type"].string_param = "base64"
    output = message.outputs.add(name="dense")
    output.parameters["content_type"].string_param = "np"
    packed = [base64.b64encode(text.encode()) for text in TEXTS]
    behind = [elements(*packed)] if raw else []
    if not raw:
        tensor.contents.bytes_contents.extend(packed)
    call, (dense,) = ask(made, grpc_reading.request_of(message, behind))
    assert (call.items, dense.shape) == (ITEMS, [2, 4])
    output.parameters["content_type"].bool_param = True
    with pytest.raises(InvalidInput, match=r"output 'dense': parameter 'content_type': expected a text"):
        grpc_reading.request_of(message, behind)


@pytest.mark.parametrize(
    "more",
    [
        {"content_type": "str", "instruction": None},
        {"parameters": {"content_type": "np", "headers": None}},
        {"parameters": None},
    ],
)
def test_generate_takes_the_codec_of_a_request_and_nulls(more: dict[str, Any], made: Services) -> None:
    config = made.tensor_models.find("plain").config
    target = Target("plain", None, "generate")
    text = json.dumps({"text": "river", **more}).encode()
    call, _ = ask(made, request_of(target, config, GENERATE.decode(text)).request)
    assert (call.items, call.options) == (ITEMS[:1], {})


def texts(name: str, shape: list[int], content_type: str = "", *values: str) -> InputTensor:
    """A BYTES input of this shape."""
    return InputTensor(name, "BYTES", shape, elements(*(values or TEXTS)), content_type=content_type)


COLUMN = [2, 1]
REFUSED: dict[str, tuple[str, list[InputTensor], Any, list[WantedOutput] | None, str]] = {
    "of a request": (
        "plain",
        [texts("text", COLUMN)],
        "hg_jsonlist",
        None,
        "parameters.content_type: 'hg_jsonlist' is not one of str, np, pd, the codecs that model 'plain' takes here",
    ),
    "of another type": ("plain", [texts("text", COLUMN)], 7, None, "parameters.content_type: '7' is not"),
    "base64 of a whole request": (
        "plain",
        [texts("text", COLUMN)],
        "base64",
        None,
        "parameters.content_type: 'base64' is not one of",
    ),
    "of an input": (
        "plain",
        [texts("text", COLUMN, "datetime")],
        "",
        None,
        "input 'text': content_type: 'datetime' is not one of str, np, base64",
    ),
    "of an output of numbers": (
        "plain",
        [texts("text", COLUMN)],
        "",
        [WantedOutput("dense", content_type="str")],
        "output 'dense': content_type: 'str' is not one of np,",
    ),
    "of an output of texts": (
        "finder",
        [texts("text", COLUMN)],
        "",
        [WantedOutput("extraction", content_type="base64")],
        "output 'extraction': content_type: 'base64' is not one of str, np",
    ),
    "no base64": (
        "plain",
        [texts("text", COLUMN, "base64", "cml2ZXI=", "stone!")],
        "",
        None,
        "input 'text' element 1: no base64, which content_type states",
    ),
    "two queries in a column": (
        "rank",
        [texts("query", COLUMN), texts("documents", COLUMN)],
        "",
        None,
        "unexpected shape for input 'query' for model 'rank': expected [1], got [2, 1]",
    ),
    "a row": ("finder", [texts("text", [1, 2])], "", None, "unexpected shape for input 'text'"),
    "two columns": ("plain", [texts("text", [1, 2])], "", None, "unexpected shape for input 'text'"),
    "a column of columns": ("plain", [texts("text", [2, 1, 1])], "", None, "unexpected shape for input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_codecs_and_shapes_are_refused_by_name(case: str, made: Services) -> None:
    model, inputs, codec, outputs, words = REFUSED[case]
    request = TensorRequest(model, None, inputs, outputs, parameters={"content_type": codec})
    with pytest.raises(InvalidInput) as refused:
        ask(made, request)
    assert refused.value.message.startswith(words)
    assert made.engine.client.requests == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "beside", "name"), [("finder", "text", "labels"), ("rank", "query", "documents")]
)
def test_elements_are_counted_before_they_are_decoded(
    model: str, beside: str, name: str, made: Services
) -> None:
    one = InputTensor(beside, "BYTES", [1], elements("river"))
    many = InputTensor(name, "BYTES", [10_001], elements(*["stone!"] * 10_001), content_type="base64")
    with pytest.raises(InvalidInput, match=f"input '{name}': 10001 given, the limit is"):
        ask(made, TensorRequest(model, None, [one, many], None))


def test_nulls_of_tensors_are_as_if_absent() -> None:
    nothing = dict.fromkeys(
        ("binary_data_size", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
    )
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"], "parameters": nothing}
    wanted = {"name": "dense", "parameters": {**nothing, "binary_data": None, "classification": None}}
    parsed = parse("m", None, json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode(), None)
    assert parsed.request.inputs == [InputTensor("text", "BYTES", [1], elements("a"))]
    assert (parsed.request.outputs, parsed.binary) == ([WantedOutput("dense")], {})
    region = {"shared_memory_region": "r", "shared_memory_offset": None, "shared_memory_byte_size": None}
    del tensor["data"]
    body = {"inputs": [{**tensor, "parameters": region}]}
    with pytest.raises(InvalidInput, match="'shared_memory_byte_size' is needed"):
        parse("m", None, json.dumps(body).encode(), None)
