"""Batches of sequences: rows by slot, control tensors, ids; and programs of every backend that keep state by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching, TensorConfig
from ipc.errors import InvalidInput
from ipc.wire import codec
from ipc.wire.messages import InferCall, ModelStatus, Step
from tests.tiny import onnx_files, programs
from tests.unit.workers.adapters.test_program_adapters import load
from workers.adapters.base import Prepared
from workers.adapters.shared.named_tensors import NamedInputs, host_array
from workers.adapters.shared.program import ProgramAdapter
from workers.adapters.shared.slot_batch import SlotBatch, check_step
from workers.lifecycle.proof import prove_program
from workers.repository.layout import ModelRefused

CONTROLS = (
    Control("FIRST", "START", "FP32", (-1.5, 2.5)),
    Control("IS_THERE", "READY", "BOOL"),
    Control("LAST", "END", "INT32", (3, 4)),
    Control("WHO", "CORRID", "UINT64"),
)


def config_of(rows: int = 4, datatype: str = "FP32", corrid: str = "UINT64") -> ModelConfig:
    """A model with all controls and one input of two values."""
    controls = (*CONTROLS[:3], Control("WHO", "CORRID", corrid))
    inputs = (TensorConfig("X", datatype, (2,)),)
    return ModelConfig(
        "m", max_batch_size=rows, inputs=inputs, sequence_batching=SequenceBatching(controls=controls)
    )


def asked(step: Step | None, values: Any, rows: int = 1) -> NamedInputs:
    """One request as the operation prepares it."""
    return NamedInputs({"X": np.asarray(values)}, rows, ["Y"], {"p": 1}, step)


@pytest.mark.parametrize("rows", [0, 4])
def test_what_a_program_may_keep_is_no_view_of_the_request(rows: int) -> None:
    memory = np.array([1, 2] if not rows else [[1, 2]], np.float32)
    view = memory[:]
    view.flags.writeable = False
    batch = SlotBatch([asked(Step(1, start=True), view)], [0], config_of(rows))
    kept, tensor = batch.array("X"), batch.tensor("X")
    memory[:] = 9
    assert kept.flat[:2].tolist() == [1, 2] and tensor.flatten()[:2].tolist() == [1, 2]


def test_rows_lie_in_their_slots_and_controls_tell_what_they_are() -> None:
    requests = [
        asked(Step(2**63 + 5, start=True), np.float32([[1, 2]])),
        asked(Step(7, end=True), np.float32([[3, 4]])),
    ]
    batch = SlotBatch(requests, [3, 1], config_of())
    assert batch.rows == 4 and batch.names == ["X", "FIRST", "IS_THERE", "LAST", "WHO"]
    assert batch.array("X").tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert batch.array("FIRST").tolist() == [[-1.5], [-1.5], [-1.5], [2.5]]
    assert batch.array("FIRST").dtype == np.float32
    assert batch.array("IS_THERE").tolist() == [[False], [True], [False], [True]]
    assert batch.array("LAST").tolist() == [[3], [4], [3], [3]]
    assert batch.array("WHO").tolist() == [[0], [7], [0], [2**63 + 5]]
    assert batch.array("WHO").dtype == np.uint64
    assert [dict(found) for found in batch.parameters] == [{}, {"p": 1}, {}, {"p": 1}]
    assert batch.steps == [None, requests[1].step, None, requests[0].step]
    assert batch.tensor("X").tolist() == batch.array("X").tolist()
    assert batch.tensor("IS_THERE").dtype == torch.bool
    with pytest.raises(KeyError):
        batch.array("Z")


def test_texts_are_empty_where_there_is_no_request_and_ids_may_be_texts() -> None:
    texts = np.array([[b"a", b"\xff"]], dtype=object)
    batch = SlotBatch([asked(Step("kä"), texts)], [1], config_of(2, "BYTES", "BYTES"))
    assert batch.array("X").tolist() == [[b"", b""], [b"a", b"\xff"]]
    assert batch.array("WHO").tolist() == [[b""], ["kä".encode()]]
    with pytest.raises(TypeError, match="BYTES"):
        batch.tensor("X")


def test_a_model_without_batches_has_one_slot_and_controls_of_one_value() -> None:
    batch = SlotBatch([asked(Step(5, start=True), np.float32([1, 2]))], [0], config_of(0))
    assert batch.rows == 1 and batch.array("X").shape == (2,)
    assert batch.array("FIRST").tolist() == [2.5] and batch.array("WHO").tolist() == [5]


def test_a_warm_up_of_several_rows_is_no_sequence() -> None:
    batch = SlotBatch([asked(None, np.ones((3, 2), np.float32), rows=3)], [None], config_of())
    assert batch.array("X").sum() == 6 and batch.array("X")[3].sum() == 0
    assert not batch.array("IS_THERE").any()


@pytest.mark.parametrize(
    ("corrid", "step", "rows", "message"),
    [
        ("UINT64", None, 1, "must specify a non-zero correlation ID"),
        ("UINT64", Step(0, True), 1, "must specify a non-zero correlation ID"),
        ("UINT64", Step("", True), 1, "must specify a non-zero correlation ID"),
        (
            "UINT64",
            Step(5, True),
            2,
            "must specify batch-size 1 due to requirements of sequence batcher, got 2",
        ),
        ("UINT64", Step("five", True), 1, "'five': model 'm' takes numbers of UINT64 as ids"),
        ("BYTES", Step(5, True), 1, "takes texts as ids"),
        ("INT32", Step(2**31, True), 1, "takes ids from -2147483648 to 2147483647"),
        ("BYTES", Step("x" * 129, True), 1, "129 characters, the limit is 128"),
    ],
)
def test_steps_that_a_model_cannot_take(corrid: str, step: Step | None, rows: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_step(config_of(corrid=corrid), InferCall([], [], rows=rows, step=step))


def run(adapter: ProgramAdapter, rows: dict[int, tuple[Step, int]]) -> list[int]:
    """Totals of all rows after requests in these slots."""
    prepared = [
        Prepared(
            NamedInputs({"INPUT": np.array([[number]], np.int32)}, 1, ["OUTPUT"], {}, step), 16, slot=slot
        )
        for slot, (step, number) in rows.items()
    ]
    with torch.inference_mode():
        found = adapter.infer(adapter.collate(prepared))["OUTPUT"]
    return [int(number) for number in host_array(found).reshape(-1)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["accumulator", "accumulator_by_id", "accumulator_exported", "accumulator_script"]
)
def test_programs_of_every_backend_keep_totals_by_slot(tmp_path: Path, name: str) -> None:
    programs.write_model(tmp_path, name)
    adapter = load(tmp_path, name)
    run(adapter, {0: (Step(1, start=True), 10), 2: (Step(2, start=True), 20)})
    with torch.inference_mode():
        prove_program(adapter, name)
    assert run(adapter, {2: (Step(2), 5)})[2] == 25
    assert run(adapter, {1: (Step(3, start=True, end=True), 7)})[1] == 7
    found = run(adapter, {0: (Step(1, end=True), 1), 2: (Step(2, end=True), 1), 1: (Step(4, start=True), 3)})
    assert (found[0], found[1], found[2]) == (11, 3, 26)


def test_controls_that_a_program_does_not_take_are_refused(tmp_path: Path) -> None:
    directory = programs.write_model(tmp_path, "accumulator_exported")
    text = (directory / "config.pbtxt").read_text()
    (directory / "config.pbtxt").write_text(text.replace("int32_false_true", "fp32_false_true"))
    with pytest.raises(ModelRefused, match="'START': FP32 is configured, the program's is INT32"):
        load(tmp_path, "accumulator_exported")
    (directory / "config.pbtxt").write_text(text.replace("max_batch_size: 4", "max_batch_size: 5"))
    with pytest.raises(ModelRefused, match=r"shape is \[5"):
        load(tmp_path, "accumulator_exported")


TYPES = {
    "INT32": (onnx_files.INT32, np.int32, "int32"),
    "FP32": (onnx_files.FP32, np.float32, "fp32"),
    "BOOL": (onnx_files.INT32, np.int32, "bool"),
}
"""Of a Triton model `onnx_sequence_<type>`: type of its tensors in the program and here, and that of its controls."""


@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dims", [[1], [4], [-1]])
def test_sequence_models_in_the_form_of_triton_answer_as_they_do_there(
    tmp_path: Path, kind: str, rows: int, dims: list[int]
) -> None:
    number, dtype, pair = TYPES[kind]
    place = tmp_path / "m" / "1"
    place.mkdir(parents=True)
    free: list[int | str] = [dim if dim > 0 else "any" for dim in dims]
    control = onnx_files.BOOL if kind == "BOOL" else number
    (place / "model.onnx").write_bytes(onnx_files.sequence(number, control, ["batch"] * bool(rows), free))
    datatype = "INT32" if kind == "BOOL" else kind
    controls = "".join(
        f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} {pair}_false_true: [ 0, 1 ] }} ] }}, '
        for name in ("START", "READY")
    )
    (place.parent / "config.pbtxt").write_text(
        f'name: "m" platform: "onnxruntime_onnx" max_batch_size: {rows}\n'
        f"sequence_batching {{ max_sequence_idle_microseconds: 5000000 control_input [ {controls[:-2]} ] }}\n"
        + programs.tensor("input", "INPUT", datatype, dims)
        + programs.tensor("output", "OUTPUT", datatype, dims)
    )
    adapter = load(tmp_path, "m")
    codec.check_status(ModelStatus("m@1", "loaded", config=adapter.config))
    prove_program(adapter, "m")
    row = np.array([10, 20, 30, 40] if dims != [1] else [10], dtype)
    sent = {slot: (row + slot)[None] if rows else row for slot in ([1, 3] if rows else [0])}
    prepared = [
        Prepared(NamedInputs({"INPUT": value}, 1, ["OUTPUT"], {}, Step(7, start=slot != 3)), 16, slot=slot)
        for slot, value in sent.items()
    ]
    found = host_array(adapter.infer(adapter.collate(prepared))["OUTPUT"])
    if not rows:
        assert found.tolist() == (row + 1).tolist()
        return
    assert found.shape == (8, len(row)) and found.dtype == dtype
    assert found[1].tolist() == (row + 2).tolist(), "its START is on"
    assert found[3].tolist() == (row + 3).tolist(), "its START is off"
    assert not found[[0, 2, 4, 5, 6, 7]].any(), "READY is off"


def test_a_program_that_declares_controls_of_one_dimension_gets_them_so(tmp_path: Path) -> None:
    programs.write_model(tmp_path, "accumulator_exported")
    config = load(tmp_path, "accumulator_exported").config
    assert config.sequence_batching is not None
    assert [control.flat for control in config.sequence_batching.controls] == [True, True]
    batch = SlotBatch([asked(Step(1, start=True), np.int32([[1]]))], [2], config)
    assert batch.array("START").tolist() == [0, 0, 1, 0]


def test_bfloat16_goes_over_as_its_bits() -> None:
    config = msgspec.structs.replace(config_of(2), inputs=(TensorConfig("X", "BF16", (2,)),))
    batch = SlotBatch([asked(Step(1), np.array([[0x3F80, 0x4000]], np.uint16))], [1], config)
    assert batch.tensor("X").dtype == torch.bfloat16 and batch.tensor("X").tolist() == [[0, 0], [1, 2]]
