"""Infer answers of KServe v2: which output is where, and what JSON cannot say."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from frontend.http.threads import at_once
from frontend.protocols.kserve_v2.reading import InferRequest
from frontend.protocols.kserve_v2.rendering import LONG_NBYTES, AnswerBody, is_long, json_of, render
from frontend.tensors.request import TensorRequest
from frontend.tensors.result import INLINE_CLASSES, OutputTensor, TensorResult, TopClass
from ipc.errors import InvalidInput
from tests.fakes import described_answers

A, B = np.arange(4, dtype="<i4"), np.array([[0.5, -2.0]], "<f4")


def result(*outputs: OutputTensor, batches: bool = True) -> TensorResult:
    return TensorResult("m", 3, list(outputs), None, batches=batches)  # type: ignore[arg-type]


def output(name: str, values: np.ndarray[Any, Any], datatype: str) -> OutputTensor:
    raw = memoryview(values.tobytes())
    return OutputTensor(name, datatype, list(values.shape), raw, raw.nbytes)


def wanted(default: bool = False, binary: dict[str, bool] | None = None, given_id: str = "") -> InferRequest:
    return InferRequest(TensorRequest("m", None, [], None), given_id, default, binary or {})


def rendered(answer: AnswerBody) -> tuple[dict[str, Any], bytes]:
    """The JSON, whose fields the API's description names, and the bytes behind the JSON."""
    whole = b"".join(answer.parts)
    cut = answer.json_nbytes or len(whole)
    described_answers.check("POST", "/v2/models/m/infer", 200, whole[:cut])
    return json.loads(whole[:cut]), whole[cut:]


CHOICES = [None, True, False]


@pytest.mark.parametrize(
    ("default", "first", "second"), list(itertools.product([False, True], CHOICES, CHOICES))
)
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("b",)])
def test_the_default_holds_for_every_output_that_says_nothing_else(
    default: bool, first: bool | None, second: bool | None, names: tuple[str, ...]
) -> None:
    made = {"a": output("a", A, "INT32"), "b": output("b", B, "FP32")}
    said = {name: value for name, value in (("a", first), ("b", second)) if value is not None}
    head, tail = rendered(
        at_once(render(result(*(made[name] for name in names)), wanted(default, said), "r", False))
    )
    assert [entry["name"] for entry in head["outputs"]] == list(names)
    expected_tail = b""
    for entry in head["outputs"]:
        values = {"a": A, "b": B}[entry["name"]]
        if said.get(entry["name"], default):
            assert entry["parameters"] == {"binary_data_size": values.nbytes} and "data" not in entry
            expected_tail += values.tobytes()
        else:
            assert entry["data"] == values.ravel().tolist() and "parameters" not in entry
        assert entry["shape"] == list(values.shape)
    assert tail == expected_tail


def test_the_id_comes_first_and_is_the_clients_or_ours() -> None:
    for given, shown in (("mine", "mine"), ("", "ours")):
        head, _ = rendered(at_once(render(result(), wanted(given_id=given), "ours", False)))
        assert list(head) == ["id", "model_name", "model_version", "outputs"]
        assert (head["id"], head["model_version"]) == (shown, "3")


def test_an_empty_binary_output_leaves_plain_json() -> None:
    empty = output("e", np.zeros((0, 3), "<f4"), "FP32")
    answer = at_once(render(result(empty), wanted(True), "r", False))
    head, tail = rendered(answer)
    assert (answer.json_nbytes, tail) == (0, b"")
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_an_output_in_a_region_has_neither_data_nor_parameters() -> None:
    written = OutputTensor("o", "FP32", [1, 2], None, 8)
    head, _ = rendered(at_once(render(result(written), wanted(True), "r", False)))
    assert head["outputs"] == [{"name": "o", "datatype": "FP32", "shape": [1, 2]}]


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", np.array([True, False])),
        ("UINT64", np.array([0, 2**64 - 1], "<u8")),
        ("INT64", np.array([-(2**63), 2**63 - 1], "<i8")),
        ("INT8", np.array([-128, 127], "<i1")),
        ("FP16", np.array([65504, 0.1], "<f2")),
        ("FP32", np.array([3.4e38, 1e-45, 0.1], "<f4")),
        ("FP64", np.array([1e308, 0.1, -0.0], "<f8")),
    ],
)
def test_json_gives_back_the_very_values(datatype: str, values: np.ndarray[Any, Any]) -> None:
    text = at_once(json_of(memoryview(values.tobytes()), datatype, values.shape, "x", False))
    assert np.array(json.loads(text), values.dtype).tobytes() == values.tobytes()


def test_bfloat16_is_written_as_the_number_it_is() -> None:
    values = torch.tensor([1.0, 0.1, -3.3e38]).bfloat16()
    raw = values.view(torch.int16).numpy().tobytes()
    text = at_once(json_of(memoryview(raw), "BF16", [3], "x", False))
    assert torch.tensor(json.loads(text)).bfloat16().equal(values)


def test_long_arrays_are_written_whole() -> None:
    values = np.arange(200_000, dtype="<i4")
    assert (
        json.loads(at_once(json_of(memoryview(values.tobytes()), "INT32", [200_000], "x", False)))
        == values.tolist()
    )


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_what_is_not_finite_is_refused_or_written_as_words(datatype: str) -> None:
    values = np.array(
        [1, np.nan, np.inf, -np.inf, 2], {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}[datatype]
    )
    raw = memoryview(values.tobytes())
    with pytest.raises(InvalidInput, match=r"output 'x'.*binary"):
        at_once(json_of(raw, datatype, [5], "output 'x'", False))
    assert at_once(json_of(raw, datatype, [5], "output 'x'", True)) == b"[1.0,NaN,Infinity,-Infinity,2.0]"


def test_strings_are_utf8_or_refused() -> None:
    raw = b"\2\0\0\0\xc3\xa9\0\0\0\0"
    assert json.loads(at_once(json_of(memoryview(raw), "BYTES", [2], "x", False))) == ["é", ""]
    with pytest.raises(InvalidInput, match=r"not UTF-8.*binary"):
        at_once(json_of(memoryview(b"\1\0\0\0\xff"), "BYTES", [1], "x", False))


@pytest.mark.parametrize(("batches", "shape"), [(True, [1, 2]), (False, [2])])
@pytest.mark.parametrize("binary", [True, False])
def test_classes_are_bytes_of_value_index_and_label(batches: bool, shape: list[int], binary: bool) -> None:
    top = [[TopClass(0.5, 7, "cat"), TopClass(-1.25, 0, "")]]
    ranked = OutputTensor("o", "FP32", [1, 10], None, 0, top)
    head, tail = rendered(at_once(render(result(ranked, batches=batches), wanted(binary), "r", False)))
    entry = head["outputs"][0]
    assert (entry["datatype"], entry["shape"]) == ("BYTES", shape)
    if binary:
        assert tail == b"\x0e\0\0\0" + b"0.500000:7:cat" + b"\x0b\0\0\0" + b"-1.250000:0"
    else:
        assert entry["data"] == ["0.500000:7:cat", "-1.250000:0"]


def test_classes_of_integers_are_plain() -> None:
    ranked = OutputTensor("o", "UINT8", [1, 3], None, 0, [[TopClass(200, 1, "")]])
    head, _ = rendered(at_once(render(result(ranked), wanted(), "r", False)))
    assert head["outputs"][0]["data"] == ["200:1"]


@pytest.mark.parametrize("binary", [True, False])
def test_many_classes_are_long_work_in_any_form(binary: bool) -> None:
    def ranked(entries: int) -> TensorResult:
        row = [TopClass(0.5, index, "") for index in range(entries // 2)]
        return result(OutputTensor("o", "FP32", [2, 1000], None, 0, [row, row]))

    assert not is_long(ranked(INLINE_CLASSES), wanted(binary))
    assert is_long(ranked(INLINE_CLASSES + 2), wanted(binary))


def test_large_tensors_are_long_work_as_json_only() -> None:
    large = result(output("o", np.zeros(LONG_NBYTES // 4 + 1, "<f4"), "FP32"))
    assert is_long(large, wanted(False)) and not is_long(large, wanted(True))
