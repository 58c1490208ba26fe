"""What is told of errors of programs, runtime by runtime, and which of these refuse an input."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import InferenceFailed, InvalidInput
from tests.tiny import onnx_files
from tests.tiny.program_modules import Rates, Windows
from workers import foreign
from workers.adapters.onnx import run_options
from workers.foreign import answer_of, is_refusal, line_of


def raised_by(run: Callable[[], object]) -> Exception:
    """The error of a call that must fail."""
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("the call has not failed")


def of_onnx(content: bytes, **inputs: np.ndarray) -> Exception:
    """The error of an ONNX program."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(content, options)
    return raised_by(lambda: session.run(None, inputs, run_options(runtime, session)))


@pytest.mark.parametrize(
    ("content", "inputs", "words"),
    [
        (
            onnx_files.embedded(5, 2),
            {"INPUT": np.array([[7]])},
            "Gather: indices element out of data bounds, idx=7 must be within the inclusive range [-5,4]",
        ),
        (
            onnx_files.positions(512),
            {"INPUT": np.zeros((1, 600), np.float32)},
            "Add: Attempting to broadcast an axis by a dimension other than 1. 512 by 600",
        ),
        (onnx_files.parsed(), {"INPUT": np.array([["many"]], object)}, "Cast: stod"),
        (
            onnx_files.same_texts(),
            {"INPUT": np.array([["a", "b"]], object)},
            "Got invalid dimensions for input: INPUT for the following indices index: 1 Got: 2 Expected: 1 "
            "Please fix either the inputs/outputs or the model.",
        ),
    ],
    ids=["index", "length", "number", "dims"],
)
def test_onnxruntime_refuses_with_operator_and_reason(
    content: bytes, inputs: dict[str, Any], words: str
) -> None:
    error = of_onnx(content, **inputs)
    assert (line_of(error), is_refusal(error)) == (words, True)


@pytest.mark.parametrize(
    ("module", "length", "words"),
    [
        (Rates(), 9, "the rate 9 is none of 2 and 4"),
        (Rates(), 1, "too short"),
        (
            Rates(),
            4,
            "The size of tensor a (4) must match the size of tensor b (2) at non-singleton dimension 0",
        ),
        (
            Windows(),
            2,
            "Calculated padded input size per channel: (2). Kernel size: (4). Kernel size can't be greater than "
            "actual input size",
        ),
    ],
    ids=["raise", "assert", "shapes", "short"],
)
def test_torchscript_refuses_with_its_last_line(module: torch.nn.Module, length: int, words: str) -> None:
    error = raised_by(lambda: torch.jit.script(module)(torch.zeros(length)))
    assert (line_of(error), is_refusal(error)) == (words, True)


def test_an_exported_program_refuses_an_index() -> None:
    table = torch.zeros(5, 3)
    error = raised_by(lambda: torch.embedding(table, torch.tensor([7])))
    assert (line_of(error), is_refusal(error)) == ("index out of range in self", True)


@pytest.mark.parametrize(
    ("run", "refuses"),
    [
        (lambda: np.zeros(3) + np.zeros(4), True),
        (lambda: np.zeros((2, 3)) @ np.zeros((2, 3)), True),
        (lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), True),
        (lambda: int("many"), True),
        (lambda: [][1], True),
        (lambda: {}["size"], False),
        (lambda: 1 // 0, False),
        (lambda: None.shape, False),
        (lambda: torch.zeros(1).bogus, False),
    ],
    ids=["broadcast", "matmul", "torch", "value", "index", "key", "division", "attribute", "tensor"],
)
def test_python_refuses_by_values_indices_and_shapes(run: Callable[[], object], refuses: bool) -> None:
    assert is_refusal(raised_by(run)) == refuses


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cannot read /srv/models/m/1/vocab.txt\nsecond line", "cannot read vocab.txt"),
        ("<object at 0x7f0a> of https://user:word@host/x", "<object> of https://host/x"),
        ("a\x1b[31mred\x07 half \udc80", "a [31mred  half ?"),
        ("x" * 400, "x" * 297 + "..."),
        ("\n \n", "RuntimeError"),
        ("", "RuntimeError"),
    ],
    ids=["path", "address", "control", "long", "blank", "empty"],
)
def test_a_line_holds_nothing_that_a_client_must_not_see(text: str, line: str) -> None:
    assert line_of(RuntimeError(text)) == line


def test_a_key_is_told_with_its_class() -> None:
    assert line_of(KeyError("rate")) == "KeyError: 'rate'"


@pytest.mark.parametrize(
    ("error", "may_refuse", "tells", "answer", "words"),
    [
        (ValueError("rate 9"), True, False, InvalidInput, "the model refuses this input: rate 9"),
        (ValueError("rate 9"), False, False, InferenceFailed, "failed"),
        (RuntimeError("a secret"), True, False, InferenceFailed, "failed"),
        (RuntimeError("no kernel"), True, True, InferenceFailed, "failed: no kernel"),
        (InvalidInput("as it is"), False, False, InvalidInput, "as it is"),
    ],
)
def test_the_answer_says_what_its_client_may_know(
    error: Exception, may_refuse: bool, tells: bool, answer: type[Exception], words: str
) -> None:
    found = answer_of(error, "request r", "failed", may_refuse=may_refuse, tells=tells)
    assert type(found) is answer and found.message == words


def test_a_refusal_has_no_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", foreign.__name__):
        answer_of(ValueError("rate 9"), "request r", "failed", may_refuse=True)
        answer_of(RuntimeError("broken"), "request r", "failed", may_refuse=True)
    assert [(each.levelname, bool(each.exc_info)) for each in caplog.records] == [
        ("INFO", False),
        ("ERROR", True),
    ]


def test_a_session_on_cuda_gives_the_memory_of_each_run_back() -> None:
    runtime = pytest.importorskip("onnxruntime")
    on_cuda = SimpleNamespace(
        get_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        get_provider_options=lambda: {"CUDAExecutionProvider": {"device_id": "1"}},
    )
    options = run_options(runtime, on_cuda)
    assert options.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:1"
