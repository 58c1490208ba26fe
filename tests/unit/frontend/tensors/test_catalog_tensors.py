"""Catalog models as tensor models: their configurations, their calls, their outputs."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.scope import plain_scope
from frontend.services import Services
from frontend.tensors.request import InputTensor, Parameter, RegionUse, TensorRequest, WantedOutput
from frontend.tensors.result import TensorResult
from ipc import deadline
from ipc.catalog.entries import OutputSpec
from ipc.errors import InputTooLong, InvalidInput, Unsupported
from ipc.wire import extraction
from ipc.wire.messages import EncodeCall, ExtractCall, InputItem, ItemError, ScoreCall
from tests.fakes.tensors import ArrayReply, elements, entry, loaded, results, run, services_of
from tests.tiny.pictures import encoded, picture

WIDTH = 4
PNG = encoded(picture(1, 48, 32))
DENSE = np.array([[3, 0, 4, 0], [0, 1, 0, -1]], np.float32)
ENTRIES = [
    entry(
        "org/encoder",
        inputs=("text", "image"),
        outputs={"dense": OutputSpec(), "sparse": OutputSpec(), "multivector": OutputSpec(dims=2)},
        dimensions=(4, 2),
        runtime={"query_template": "q: {text}"},
    ),
    entry("org/plain"),
    entry("org/pictures", inputs=("image",)),
    entry("org/rank", outputs={"score": OutputSpec()}),
    entry("org/finder", outputs={"json": OutputSpec()}),
    entry("org/writer", outputs={"chat": OutputSpec()}),
]


def services(root: Path, reply: Any = None) -> Services:
    """Services with these models, whose calls get `reply`."""
    statuses = [loaded(made.id, dims={"dense": WIDTH}) for made in ENTRIES]
    return services_of(root, ENTRIES, statuses, lambda request: reply, limits__max_text_bytes="100")


def texts(name: str, *values: str | bytes) -> InputTensor:
    """A BYTES input."""
    return InputTensor(name, "BYTES", [len(values)], elements(*values))


def ask(
    made: Services,
    model: str,
    *inputs: InputTensor,
    wanted: list[WantedOutput] | None = None,
    **parameters: Parameter,
) -> TensorResult:
    """Run one request."""
    known = plain_scope()
    known.deadline_ns = deadline.after(60)
    request = TensorRequest(model, None, list(inputs), wanted, parameters=parameters)
    return asyncio.run(run(made, known, request))


def call_of(made: Services) -> Any:
    """The call that was made."""
    return made.engine.client.requests[-1].call  # type: ignore[attr-defined]


def want(*names: str) -> list[WantedOutput]:
    """These outputs."""
    return [WantedOutput(name) for name in names]


def described(made: Services, model: str) -> tuple[int, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Batch size, inputs and outputs of a configuration."""
    config = made.tensor_models.find(model).config
    inputs = [(one.name, one.datatype, one.dims, one.optional) for one in config.inputs]
    return config.max_batch_size, inputs, [(one.name, one.datatype, one.dims) for one in config.outputs]


def test_configurations_follow_from_catalog_entries(tmp_path: Path) -> None:
    made = services(tmp_path)
    assert described(made, "encoder") == (
        10000,
        [("text", "BYTES", (), True), ("image", "BYTES", (), True)],
        [("dense", "FP32", (4,)), ("sparse", "BYTES", ()), ("multivector", "FP32", (-1, 2))],
    )
    assert described(made, "plain") == (10000, [("text", "BYTES", (), False)], [("dense", "FP32", (4,))])
    assert described(made, "pictures")[1] == [("image", "BYTES", (), False)]
    assert described(made, "rank") == (
        0,
        [("query", "BYTES", (1,), False), ("documents", "BYTES", (-1,), False)],
        [("score", "FP32", (-1,))],
    )
    assert described(made, "finder") == (
        0,
        [("text", "BYTES", (-1,), False), ("labels", "BYTES", (-1,), True)],
        [("extraction", "BYTES", (-1,))],
    )


def test_a_model_that_writes_text_has_no_tensors_and_a_request_is_told_where_to_ask(tmp_path: Path) -> None:
    made = services(tmp_path)
    found = made.tensor_models.find("writer")
    assert (found.kind, found.config.platform) == ("chat", "penstock_chat")
    assert described(made, "writer") == (0, [], [])
    for inputs in ([], [texts("text", "hi")]):
        with pytest.raises(
            Unsupported, match=r"model 'writer' writes text, .* ask it with /v1/chat/completions"
        ):
            ask(made, "writer", *inputs)
    request = TensorRequest("writer", None, [], None)
    with pytest.raises(Unsupported, match="writes text"):
        asyncio.run(anext(results(made, plain_scope(), request)))  # type: ignore[arg-type]
    assert not made.engine.client.requests  # type: ignore[attr-defined]


def test_texts_become_vectors(tmp_path: Path) -> None:
    made = services(tmp_path, ArrayReply({"dense": DENSE}))
    result = ask(
        made, "plain", texts("text", "añb", ""), instruction="find", is_query=True, overflow_policy="error"
    )
    call = call_of(made)
    assert isinstance(call, EncodeCall)
    assert call.items == [InputItem("añb"), InputItem("")]
    assert made.engine.client.requests[-1].tensors, "the statistics count its runs"  # type: ignore[attr-defined]
    assert (call.outputs, call.instruction, call.is_query, call.overflow) == (
        ["dense"],
        "find",
        True,
        "error",
    )
    (output,) = result.outputs
    assert (result.model, result.rows, output.name, output.datatype, output.shape) == (
        "plain",
        2,
        "dense",
        "FP32",
        [2, 4],
    )
    assert bytes(output.data or b"") == DENSE.tobytes()
    assert np.shares_memory(np.frombuffer(output.data or b"", np.float32), DENSE), "no copy is made"
    assert made.extensions.counters.booked == [("org/plain", 1, 2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parameters", "datatype", "expected"),
    [
        ({"output_dtype": "float16"}, "FP16", DENSE.astype(np.float16)),
        ({"dimensions": 2}, "FP32", np.array([[3, 0], [0, 1]], np.float32)),
        ({"output_dtype": "binary"}, "UINT8", np.array([[0b10100000], [0b01000000]], np.uint8)),
    ],
)
def test_vectors_have_the_form_that_is_asked_for(
    parameters: dict[str, Parameter], datatype: str, expected: np.ndarray, tmp_path: Path
) -> None:
    made = services(tmp_path, ArrayReply({"dense": DENSE}))
    (output,) = ask(made, "encoder", texts("text", "a", "b"), wanted=want("dense"), **parameters).outputs
    assert (output.datatype, output.shape) == (datatype, list(expected.shape))
    assert bytes(output.data or b"") == expected.tobytes()


def test_runtime_options_of_the_entry_hold(tmp_path: Path) -> None:
    made = services(tmp_path, ArrayReply({"dense": DENSE}))
    ask(made, "encoder", texts("text", "a", "b"), wanted=want("dense"), max_terms=3)
    assert call_of(made).options == {"query_template": "q: {text}", "max_terms": 3}


def test_all_outputs_of_one_item_come_in_the_order_that_is_wanted(tmp_path: Path) -> None:
    arrays = {
        "dense": DENSE[:1],
        "sparse.indices": np.array([3, 9], np.int32),
        "sparse.values": np.array([0.5, 2], np.float32),
        "multivector": np.arange(6, dtype=np.float32).reshape(3, 2),
    }
    reply = ArrayReply(arrays, {"sparse.indices": [2], "multivector": [3]})
    made = services(tmp_path, reply)
    outputs = ask(made, "encoder", texts("text", "a"), wanted=want("multivector", "sparse", "dense")).outputs
    assert [(one.name, one.datatype, one.shape) for one in outputs] == [
        ("multivector", "FP32", [1, 3, 2]),
        ("sparse", "BYTES", [1]),
        ("dense", "FP32", [1, 4]),
    ]
    raw = bytes(outputs[1].data or b"")
    assert struct.unpack("<I", raw[:4]) == (len(raw) - 4,)
    assert json.loads(raw[4:]) == {"indices": [3, 9], "values": [0.5, 2.0]}
    assert [one.name for one in ask(made, "encoder", texts("text", "a")).outputs] == [
        "dense",
        "sparse",
        "multivector",
    ]


def test_vectors_can_be_ranked(tmp_path: Path) -> None:
    made = services(tmp_path, ArrayReply({"dense": DENSE}))
    (output,) = ask(made, "plain", texts("text", "a", "b"), wanted=[WantedOutput("dense", 1)]).outputs
    assert [[(one.value, one.index) for one in row] for row in output.classes or ()] == [
        [(4.0, 2)],
        [(1.0, 1)],
    ]


def test_pictures_alone_or_beside_texts(tmp_path: Path) -> None:
    made = services(tmp_path, ArrayReply({"dense": DENSE}))
    other = PNG + b"more"
    ask(made, "pictures", texts("image", PNG, other))
    assert call_of(made).items == [InputItem(None, None, [PNG]), InputItem(None, None, [other])]
    ask(made, "encoder", texts("text", "a", "b"), texts("image", PNG, PNG), wanted=want("dense"))
    assert call_of(made).items == [InputItem("a", None, [PNG]), InputItem("b", None, [PNG])]


def test_documents_are_scored_against_a_query(tmp_path: Path) -> None:
    scores = np.array([0.5, -1, 2], np.float32)
    made = services(tmp_path, ArrayReply({"score": scores}))
    result = ask(
        made, "rank", texts("query", "q"), texts("documents", "a", "b", "c"), score_weights='{"dense": 1}'
    )
    call = call_of(made)
    assert isinstance(call, ScoreCall)
    assert (call.query, call.items) == (InputItem("q"), [InputItem("a"), InputItem("b"), InputItem("c")])
    assert call.options == {"score_weights": {"dense": 1}}
    assert made.extensions.counters.booked == [("org/rank", 1, 3)], "as many rows as runs count"  # type: ignore[attr-defined]
    (output,) = result.outputs
    assert (output.datatype, output.shape, bytes(output.data or b"")) == ("FP32", [3], scores.tobytes())


def _found() -> ArrayReply:
    packed = [
        extraction.pack(extraction.Extraction(entities=[extraction.Entity("Ada", "person", 0.9, 0, 3)])),
        extraction.pack(extraction.Extraction()),
    ]
    return ArrayReply(
        {"extraction": np.frombuffer(b"".join(packed), np.uint8)},
        {"extraction": [len(one) for one in packed]},
    )


@pytest.mark.parametrize("where", ["input", "list", "json"])
def test_findings_are_json_texts_and_labels_may_be_given_in_three_ways(where: str, tmp_path: Path) -> None:
    made, given = services(tmp_path, _found()), [texts("text", "Ada", "nobody")]
    parameters: dict[str, Parameter] = {"threshold": 0.5}
    if where == "input":
        given.append(texts("labels", "person", "place"))
    else:
        parameters["labels"] = "person, place" if where == "list" else '["person", "place"]'
    (output,) = ask(made, "finder", *given, **parameters).outputs
    call = call_of(made)
    assert isinstance(call, ExtractCall)
    assert (call.labels, call.options) == (["person", "place"], {"threshold": 0.5})
    assert (output.datatype, output.shape) == ("BYTES", [2])
    raw = bytes(output.data or b"")
    (nbytes,) = struct.unpack("<I", raw[:4])
    entity = {"text": "Ada", "label": "person", "score": 0.9, "start": 0, "end": 3, "bbox": None}
    assert json.loads(raw[4 : 4 + nbytes])["entities"] == [entity]
    assert json.loads(raw[8 + nbytes :])["entities"] == []


def test_a_nul_in_a_text_and_a_label_twice_are_accepted(tmp_path: Path) -> None:
    made = services(tmp_path, _found())
    ask(made, "finder", texts("text", "a\0b", "c"), texts("labels", "x", "y", "x"))
    call = call_of(made)
    assert isinstance(call, ExtractCall)
    assert ([item.text for item in call.items], call.labels) == (["a\0b", "c"], ["x", "y"])


ONE = [texts("text", "a")]
PAIR = [texts("query", "q"), texts("documents", "a")]
REFUSED: dict[str, tuple[str, list[InputTensor], dict[str, Parameter], str]] = {
    "no input": ("encoder", [], {}, "model 'encoder' needs the input 'text' or 'image'"),
    "no UTF-8": ("plain", [texts("text", b"ok", b"\xff")], {}, "input 'text' element 1: no UTF-8"),
    "too long a text": (
        "plain",
        [texts("text", "x" * 101)],
        {},
        "input 'text' element 0: 101 bytes, the limit is 100",
    ),
    "lengths that lie": (
        "plain",
        [InputTensor("text", "BYTES", [1], b"\xff\xff\xff\xffab")],
        {},
        "input 'text': element 0 says 4294967295 bytes, but 2 are left",
    ),
    "no picture": ("pictures", [texts("image", "GIF?")], {}, "input 'image' element 0: not an image"),
    "a picture too few": (
        "encoder",
        [texts("text", "a", "b"), texts("image", PNG)],
        {},
        "input 'image' for model 'encoder' has batch-size 1, but other inputs have 2",
    ),
    "no documents": (
        "rank",
        [texts("query", "q"), InputTensor("documents", "BYTES", [0], b"")],
        {},
        "input 'documents': may not be empty",
    ),
    "two queries": (
        "rank",
        [texts("query", "q", "r"), texts("documents", "a")],
        {},
        "unexpected shape for input 'query' for model 'rank': expected [1], got [2]",
    ),
    "token vectors of two items": (
        "encoder",
        [texts("text", "a", "b")],
        {},
        "output 'multivector' of model 'encoder' has rows of its own for each item",
    ),
    "region": (
        "plain",
        [InputTensor("text", "BYTES", [1], None, RegionUse("known", 0, 5))],
        {},
        "tensor 'text': model 'plain' takes and gives no shared memory regions",
    ),
    "unknown parameter": (
        "plain",
        ONE,
        {"treshold": 1},
        "parameters.'treshold': unknown to encode",
    ),
    "option of another kind": (
        "rank",
        PAIR,
        {"is_query": True},
        "parameters.'is_query'",
    ),
    "option of another type": (
        "plain",
        ONE,
        {"instruction": 7},
        "parameters.instruction: expected str",
    ),
    "instruction too long": (
        "plain",
        ONE,
        {"instruction": "x" * 101},
        "parameters.instruction: 101 bytes",
    ),
    "dtype with a scale": (
        "plain",
        ONE,
        {"output_dtype": "int8"},
        "parameters.output_dtype: 'int8' is not",
    ),
    "dimensions too many": (
        "plain",
        ONE,
        {"dimensions": 5},
        "parameters.dimensions: 5 is outside 1..4",
    ),
    "overflow policy": (
        "plain",
        ONE,
        {"overflow_policy": "x"},
        "parameters.overflow_policy: 'x' is not",
    ),
    "labels twice": (
        "finder",
        [texts("text", "a"), texts("labels", "x")],
        {"labels": "y"},
        "labels: given as input 'labels' and as a parameter",
    ),
    "more labels than allowed, before they are read": (
        "finder",
        [texts("text", "a"), InputTensor("labels", "BYTES", [1001], bytes(5000))],
        {},
        "input 'labels': 1001 given, the limit is 1000 (limits.max_labels)",
    ),
    "labels that are numbers": (
        "finder",
        ONE,
        {"labels": "[1]"},
        "parameters.labels: expected texts only",
    ),
    "no JSON": (
        "finder",
        ONE,
        {"output_schema": "{"},
        "parameters.output_schema: no JSON text",
    ),
    "deep JSON": (
        "finder",
        ONE,
        {"output_schema": "[" * 100_000},
        "parameters.output_schema: no JSON",
    ),
    "JSON of another type": (
        "finder",
        ONE,
        {"output_schema": "[]"},
        "parameters.output_schema: expected the JSON text of an object",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    model, inputs, parameters, message = REFUSED[case]
    made = services(tmp_path)
    with pytest.raises(InvalidInput) as refused:
        ask(made, model, *inputs, **parameters)
    assert refused.value.message.startswith(message)
    assert made.engine.client.requests == []  # type: ignore[attr-defined]


def test_dimensions_are_those_of_the_entry(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^parameters.dimensions: 3 is not one of 4, 2"):
        ask(services(tmp_path), "encoder", texts("text", "a"), wanted=want("dense"), dimensions=3)


def test_an_item_that_failed_fails_the_request(tmp_path: Path) -> None:
    reply = ArrayReply({"dense": DENSE})
    reply.errors = [ItemError(1, "INPUT_TOO_LONG", "items[1]: 9 tokens, the limit is 8")]
    made = services(tmp_path, reply)
    with pytest.raises(InputTooLong):
        ask(made, "plain", texts("text", "a", "b"))
    assert reply.releases == 1
