"""Infer requests of KServe v2: the JSON, and the bytes behind it divided among the inputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.protocols.kserve_v2 import reading
from frontend.protocols.kserve_v2.reading import InferRequest
from frontend.protocols.kserve_v2.schemas import INDEX, INFER, TRACE, Decoder
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput


def tensor(name: str = "a", shape: Any = (2,), datatype: str = "INT16", **more: Any) -> dict[str, Any]:
    """An input; `size` stands for `binary_data_size`."""
    if "size" in more:
        more["parameters"] = {"binary_data_size": more.pop("size")}
    return {"name": name, "shape": shape, "datatype": datatype, **more}


def parse(inputs: Any, data: bytes | None = None, **more: Any) -> InferRequest:
    head = json.dumps({"inputs": inputs, **more}).encode()
    return reading.parse("m", None, head, None if data is None else memoryview(data))


@pytest.mark.parametrize("sizes", [{}, {"size": 4}])
def test_bytes_follow_each_other_with_and_without_sizes(sizes: dict[str, int]) -> None:
    inputs = [tensor("a", **sizes), tensor("j", data=[7, 8]), tensor("b", [1, 2, 1], **sizes)]
    found = parse(inputs, b"\1\0\2\0\3\0\4\0").request.inputs
    assert [bytes(one.data or b"") for one in found] == [b"\1\0\2\0", b"\7\0\10\0", b"\3\0\4\0"]
    assert [one.shape for one in found] == [[2], [2], [1, 2, 1]]


def test_a_single_bytes_input_takes_the_rest_without_a_size() -> None:
    found = parse([tensor(datatype="BYTES", shape=[1])], b"\2\0\0\0hi").request.inputs[0]
    assert bytes(found.data or b"") == b"\2\0\0\0hi"


def test_parameters_of_a_request_that_are_null_are_as_if_absent() -> None:
    given = {"headers": None, "priority": None, "triton_x": None, "mine": None, "other": 5}
    inputs = [{"name": "a", "shape": [1], "datatype": "INT8", "data": [1]}]
    parsed = parse(inputs, parameters=given | {"binary_data_output": None})
    assert (parsed.request.parameters, parsed.request.priority) == ({"other": 5}, 0)


def test_scalars_and_empty_tensors() -> None:
    found = parse([tensor("s", []), tensor("z", [3, 0]), tensor("e", [0], data=[])], b"\5\0").request.inputs
    assert [bytes(one.data or b"") for one in found] == [b"\5\0", b"", b""]


@pytest.mark.parametrize(
    ("inputs", "data", "words"),
    [
        ([], None, "'inputs' is empty"),
        ({}, None, "array"),
        ([{"shape": [1], "datatype": "INT8", "data": [1]}], None, "missing required field `name`"),
        ([{"name": "a", "datatype": "INT8", "data": [1]}], None, "missing required field `shape`"),
        ([{"name": "a", "shape": [1], "data": [1]}], None, "missing required field `datatype`"),
        ([tensor(datatype="INT12", data=[1])], None, "unknown datatype 'INT12'"),
        ([tensor(shape=[-1], data=[1])], None, "negative"),
        ([tensor(shape=[1.0], data=[1])], None, "Expected `int`"),
        ([tensor(shape=["2"], data=[1])], None, "Expected `int`"),
        ([tensor(shape=[1 << 40, 1 << 40], data=[1])], None, "above 2"),
        ([tensor(shape=[1] * 65, data=[1])], None, "65 dimensions, the limit is 64"),
        ([tensor()], None, "has no 'data'"),
        ([tensor(data=[1, 2], size=4)], b"\0\0\0\0", "both 'data' and 'binary_data_size'"),
        ([tensor()], b"\0\0\0", "expected 4 bytes after the JSON, got 3"),
        ([tensor()], b"\0\0\0\0\0", "expected 4 bytes after the JSON, got 5"),
        ([tensor(data=[1, 2])], b"\0", "expected 0 bytes after the JSON, got 1"),
        ([tensor(size=3)], b"\0\0\0", "binary_data_size is 3, but shape .* takes 4 bytes"),
        ([tensor(size=-1)], b"", "binary_data_size is -1"),
        ([tensor(size=-4, datatype="BYTES")], b"", "binary_data_size is -4"),
        ([tensor(datatype="BYTES", size=1 << 70)], b"", "bytes after the JSON, got 0"),
        ([tensor(datatype="BYTES"), tensor("b")], b"\0" * 9, "'binary_data_size' is needed for BYTES"),
        ([tensor(), tensor()], b"\0" * 8, "input 'a' is given twice"),
        ([tensor(parameters={"shared_memory_region": "r"})], None, "'shared_memory_byte_size' is needed"),
        (
            [tensor(data=[1, 2], parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4})],
            None,
            "excludes 'data'",
        ),
        (
            [tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": -1})],
            None,
            "must not be negative",
        ),
    ],
)
def test_what_does_not_add_up_is_refused(inputs: Any, data: bytes | None, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refusal:
        parse(inputs, data, id="7")
    assert refusal.value.message.startswith("[request id: ")


@pytest.mark.parametrize(
    "head", [b"", b"{", b"[]", b"3", b'{"inputs": [}', b"\xff", b'{"inputs":[],}', b"{}"]
)
def test_a_head_that_is_no_request_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidInput):
        reading.parse("m", None, head, None)


@pytest.mark.parametrize("value", [5, ["x"], True])
def test_the_id_is_a_string(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"\$\.id"):
        parse([tensor(data=[1, 2])], id=value)


@pytest.mark.parametrize("given", [{"id": None}, {"id": ""}, {}])
def test_an_id_of_null_is_none(given: dict[str, Any]) -> None:
    assert parse([tensor(data=[1, 2])], **given).id == ""
    with pytest.raises(InvalidInput) as refusal:
        parse([tensor(data=[1])], **given)
    assert refusal.value.message.startswith("[request id: <id_unknown>] ")


def test_unknown_keys_are_ignored() -> None:
    found = parse([tensor(data=[1, 2], more=[{}])], model_name="other", extra={"a": 1})
    assert found.request.model == "m"


def test_an_empty_list_of_outputs_means_all_of_them_as_in_grpc() -> None:
    assert parse([tensor(data=[1, 2])], outputs=[]).request.outputs is None


def test_regions_are_taken_as_they_are_named() -> None:
    place = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 4}
    found = parse([tensor(parameters=place)], outputs=[{"name": "o", "parameters": place}]).request
    region = found.inputs[0].region
    assert region is not None and (region.name, region.offset, region.nbytes) == ("r", 8, 4)
    assert found.inputs[0].data is None
    assert found.outputs is not None and found.outputs[0].region == region


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"binary_data": True}, "excludes"),
        ({"classification": 2}, "excludes"),
    ],
)
def test_a_region_of_an_output_excludes_other_forms(parameters: dict[str, Any], words: str) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 4, **parameters}
    with pytest.raises(InvalidInput, match=words):
        parse([tensor(data=[1, 2])], outputs=[{"name": "o", "parameters": place}])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([{"name": "o"}, {"name": "o"}], "output 'o' is given twice"),
        ([{"name": "o", "parameters": {"classification": -1}}], "classification is -1"),
        ([{"name": "o", "parameters": {"binary_data": 1}}], r"Expected `bool \| null`"),
        ([{}], "missing required field `name`"),
    ],
)
def test_wrong_outputs_are_refused(outputs: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        parse([tensor(data=[1, 2])], outputs=outputs)


def test_parameters_go_to_their_places() -> None:
    given = {
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": False,
        "priority": 2,
        "timeout": 5000,
        "binary_data_output": True,
        "temperature": 0.5,
        "name": "x",
    }
    found = parse([tensor(data=[1, 2])], parameters=given)
    request = found.request
    assert (request.sequence.id, request.sequence.start, request.sequence.end) == ("s", True, False)
    assert (request.priority, request.timeout_us, found.binary_default) == (2, 5000, True)
    assert request.parameters == {"temperature": 0.5, "name": "x"}


def test_integers_that_a_worker_can_be_sent_are_kept() -> None:
    given = {"most": (1 << 64) - 1, "least": -(1 << 63)}
    assert parse([tensor(data=[1, 2])], parameters=given).request.parameters == given


def test_parameters_are_bounded() -> None:
    given = {f"p{at}": at for at in range(1024)}
    assert parse([tensor(data=[1, 2])], parameters=given).request.parameters == given
    with pytest.raises(InvalidInput, match="parameters: 1025 given, the limit is 1024"):
        parse([tensor(data=[1, 2])], parameters={**given, "more": 1})


@pytest.mark.parametrize(
    "parameters",
    [
        {"triton_x": 1},
        {"headers": "x"},
        {"priority": -1},
        {"priority": 1.0},
        {"priority": True},
        {"timeout": "5"},
        {"sequence_id": -1},
        {"sequence_id": 1 << 64},
        {"sequence_start": 1},
        {"binary_data_output": "yes"},
        {"big": 1 << 64},
        {"big": -(1 << 63) - 1},
        {"mine": [1]},
        {"mine": {}},
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidInput, match=next(iter(parameters)) if "mine" not in parameters else "parameters"
    ):
        parse([tensor(data=[1, 2])], parameters=parameters)


@pytest.mark.parametrize("header", ["", "x", "-1", "1.0", "+1", "٣", "1" * 19, "0x10", "11"])
def test_a_wrong_length_header_is_refused(header: str) -> None:
    with pytest.raises(InvalidInput, match="Inference-Header-Content-Length"):
        reading.header_length(header, 10)


def test_a_length_header_may_cover_the_whole_body() -> None:
    assert reading.header_length(" 10 ", 10) == 10
    assert reading.header_length("0", 10) == 0
    assert reading.header_length(None, 10) is None


def config(*dims: int, datatype: str = "FP32", batch: int = 8, inputs: int = 1) -> ModelConfig:
    tensors = tuple(TensorConfig(name=f"i{n}", datatype=datatype, dims=dims) for n in range(inputs))
    return ModelConfig(name="m", max_batch_size=batch, inputs=tensors)


@pytest.mark.parametrize(
    ("given", "nbytes", "shape"),
    [
        (config(2, 2), 16, [1, 2, 2]),
        (config(2, -1), 24, [1, 2, 3]),
        (config(-1, batch=0), 8, [2]),
        (config(2, 2, batch=0), 16, [2, 2]),
    ],
)
def test_a_raw_request_is_the_only_input(given: ModelConfig, nbytes: int, shape: list[int]) -> None:
    found = reading.parse_raw("m", None, given, memoryview(bytes(nbytes)))
    assert found.request.inputs[0].shape == shape
    assert found.binary_default


def test_a_raw_string_has_no_length_in_front() -> None:
    found = reading.parse_raw("m", None, config(1, datatype="BYTES"), memoryview(b"hey")).request.inputs[0]
    assert (found.shape, bytes(found.data or b"")) == ([1, 1], b"\3\0\0\0hey")


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (config(2, inputs=2), 8),
        (config(2), 9),
        (config(-1, -1), 16),
        (config(3, -1), 16),
        (config(0, -1), 16),
        (config(2, datatype="BYTES"), 4),
    ],
)
def test_a_raw_request_that_does_not_fit_is_refused(given: ModelConfig, nbytes: int) -> None:
    with pytest.raises(InvalidInput):
        reading.parse_raw("m", None, given, memoryview(bytes(nbytes)))


def test_strings_and_keys_are_bounded_and_numbers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_STRINGS", 40)
    parse([tensor(shape=[500], data=[0] * 500)])
    parse([tensor(shape=[1], datatype="BYTES", data=['"' * 500 + "\\" * 500])])
    with pytest.raises(InvalidInput, match="more than 40 strings and keys"):
        parse([tensor(shape=[40], datatype="BYTES", data=["a"] * 40)])


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (INFER, b'{"inputs": [], "\xff": 1}'),
        (INFER, b'{"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["x"], "\xff": 1}]}'),
        (INFER, b'{"inputs": [], "more": {"x": ["\xff"]}}'),
        (INDEX, b'{"more": "\xff"}'),
        (TRACE, b'{"more": "\xff"}'),
    ],
)
def test_bytes_that_are_not_utf_8_are_refused_also_where_no_field_is(decoder: Decoder, body: bytes) -> None:
    for form in (body, memoryview(body)):
        with pytest.raises(InvalidInput, match="0xff"):
            decoder.decode(form)
