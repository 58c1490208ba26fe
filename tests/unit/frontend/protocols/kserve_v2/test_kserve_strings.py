"""Strings as the tensors that models of bytes take, and such tensors as strings, compared with bytes by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from frontend.protocols.kserve_v2 import conversions, generate, rendering
from frontend.protocols.kserve_v2.management import TensorMetadata, output_metadata
from frontend.tensors.request import InputTensor
from frontend.tensors.result import OutputTensor, TensorResult
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.settings import Limits
from tests.fakes.tensors import elements, finish, tensor


def model(dims: tuple[int, ...], datatype: str = "UINT8", batch: int = 0) -> ModelConfig:
    """A model of one input."""
    return ModelConfig(name="m", max_batch_size=batch, inputs=(tensor("x", datatype, *dims),))


def converted(config: ModelConfig, *texts: bytes) -> tuple[str, list[int], bytes]:
    """Datatype, shape and bytes of the input after these strings were given for it."""
    given = InputTensor("x", "BYTES", [len(texts)], elements(*texts))
    conversions.defer(config, [given], Limits())
    data = finish(given)
    return given.datatype, given.shape, data


@pytest.mark.parametrize("config", [model((-1, -1)), model((3, -1)), model((-1,), batch=4)])
def test_strings_become_rows_with_zeros_behind(config: ModelConfig) -> None:
    found = converted(config, b"abc", b"", b"h\xff")
    assert found == ("UINT8", [3, 4], b"abc\0" + b"\0\0\0\0" + b"h\xff\0\0")


def test_rows_are_as_wide_as_the_model_says() -> None:
    assert converted(model((-1, 0)), b"") == ("UINT8", [1, 0], b"")
    assert converted(model((-1, 5)), b"abc", b"defgh") == ("UINT8", [2, 5], b"abc\0\0defgh")
    with pytest.raises(InvalidInput, match="a string of 6 bytes, the model takes 5"):
        converted(model((-1, 5)), b"abcdef")


def test_an_input_of_one_dimension_gets_strings_packed() -> None:
    """Number, begin of the first, ends, content, as OpenVINO Model Server lays them out."""
    table = np.array([4, 0, 3, 3, 5, 9], "<u4").tobytes()
    assert converted(model((-1,)), b"ala", b"", b"ma", b"kota") == ("UINT8", [33], table + b"alamakota")


@pytest.mark.parametrize("config", [model((-1, -1)), model((-1,))])
def test_what_strings_take_is_bounded(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "MOST_NBYTES", 100)
    with pytest.raises(InvalidInput, match=r"strings take .* bytes as a tensor, the limit is 100"):
        converted(config, b"x" * 99, b"")


def test_one_long_string_does_not_make_many_rows_long() -> None:
    with pytest.raises(InvalidInput, match=r"1004004 bytes of strings take 1001001001 bytes as rows"):
        converted(model((-1, -1)), b"x" * 1_000_000, *[b""] * 1000)
    datatype, shape, _ = converted(model((-1, -1)), b"x" * 1_000_000, *[b""] * 15)
    assert (datatype, shape) == ("UINT8", [16, 1_000_001])


def test_other_models_get_no_strings() -> None:
    given = [InputTensor("x", "BYTES", [1], elements(b"a"))]
    for config in (model((4,)), model((-1,), "FP32"), model((-1,), "BYTES"), model((-1, -1, -1))):
        assert conversions.to_convert(config, given) == []
    with pytest.raises(InvalidInput, match="UINT8 or BYTES, not FP32"):
        converted(model((-1, -1), "FP32"), b"a")


def output(name: str, values: Any, datatype: str = "UINT8") -> OutputTensor:
    """An output of these values."""
    array = np.array(values, np.uint8)
    return OutputTensor(name, datatype, list(array.shape), memoryview(array.tobytes()), array.nbytes)


def test_a_marked_output_is_told_as_strings() -> None:
    made = output("text_string", [list(b"abc\0"), list(b"de\0f"), list(b"ghij"), [0] * 4])
    datatype, shape, data = rendering.told(made, False)
    assert (datatype, shape) == ("BYTES", [4])
    assert data is not None and bytes(data) == elements(b"abc", b"de", b"ghij", b"")


def test_generate_tells_a_marked_output_as_strings() -> None:
    outputs = [output("one_string", [list(b"abc\0")]), output("two_string", [list(b"d\0"), list(b"ef")])]
    outputs.append(output("plain", [[1, 2]]))
    result = TensorResult("m", 1, outputs, None)  # type: ignore[arg-type]
    assert json.loads(generate.answer_of(result, False)) == {
        "model_name": "m",
        "model_version": "1",
        "one_string": "abc",
        "two_string": ["d", "ef"],
        "plain": [1, 2],
    }


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_rows_are_empty_strings(shape: tuple[int, int]) -> None:
    _, told, data = rendering.told(output("x_string", np.zeros(shape)), False)
    assert data is not None and (told, bytes(data)) == ([shape[0]], elements(*[b""] * shape[0]))


@pytest.mark.parametrize(
    ("name", "values", "datatype"),
    [
        ("string", [[1, 2]], "UINT8"),
        ("x_strings", [[1, 2]], "UINT8"),
        ("x_string", [1, 2], "UINT8"),
        ("x_string", [[[1]]], "UINT8"),
        ("x_string", [[1, 2]], "INT8"),
    ],
)
def test_other_outputs_stay_as_they_are(name: str, values: Any, datatype: str) -> None:
    made = output(name, values, datatype)
    assert rendering.told(made, False) == (made.datatype, made.shape, made.data)


def test_an_output_in_a_region_stays_as_it_is() -> None:
    written = OutputTensor("x_string", "UINT8", [1, 2], None, 2)
    assert rendering.told(written, False) == ("UINT8", [1, 2], None)


def test_many_rows_are_work_for_a_thread_and_too_many_are_refused() -> None:
    few, many = (
        TensorResult("m", 1, [output("x_string", np.zeros((count, 8)))], None)  # type: ignore[arg-type]
        for count in (8, 1 << 15)
    )
    assert (conversions.is_long(few), conversions.is_long(many)) == (False, True)
    with pytest.raises(InvalidInput, match="elements of BYTES"):
        rendering.told(output("x_string", np.zeros(((1 << 20) + 1, 1))), False)


def test_metadata_says_what_answers_have() -> None:
    marked = TensorConfig("x_string", "UINT8", (-1,))
    assert output_metadata(marked, model((1,), batch=2)) == TensorMetadata("x_string", "BYTES", [-1])
    plain = TensorConfig("x_string", "UINT8", (2, 3))
    assert output_metadata(plain, model((1,), batch=2)).datatype == "UINT8"
