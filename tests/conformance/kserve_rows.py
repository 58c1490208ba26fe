"""Requests of KServe v2 over gRPC by hand, and those that are refused, by the specification's table."""

from __future__ import annotations

from typing import Any

from ipc.protos import kserve_v2_pb2 as pb
from tests.conformance.kserve import A, B
from tests.conformance.kserve_limits import MAX_MESSAGE_BYTES, UNLOADED


def message(
    model: str = "add_sub",
    *changes: dict[str, Any],
    version: str = "",
    raw: list[bytes] | None = None,
    **more: Any,
) -> pb.ModelInferRequest:
    """A request of typed inputs: `contents` is a field and its values."""
    made = pb.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=raw or [], **more)
    for given in changes:
        side = made.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
        for field, values in given.get("contents", {}).items():
            getattr(side.contents, field).extend(values)
    return made


def side(
    name: str = "INPUT0", datatype: str = "INT32", shape: Any = (1, 16), **contents: Any
) -> dict[str, Any]:
    """One input; without `contents` it has 16 integers."""
    given = contents if contents or datatype == "RAW" else {"int_contents": [1] * 16}
    return {"name": name, "datatype": datatype, "shape": list(shape), "contents": given}


def bare(name: str = "INPUT0", datatype: str = "INT32", shape: Any = (1, 16)) -> dict[str, Any]:
    """One input without contents."""
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def wanting(*names: str) -> pb.ModelInferRequest:
    """A good request that wants these outputs."""
    made = message("add_sub", side(), ONE)
    for name in names:
        made.outputs.add(name=name)
    return made


def with_parameter(name: str, **value: Any) -> pb.ModelInferRequest:
    """A good request with one parameter."""
    made = message("add_sub", side(), ONE)
    for kind, one in value.items():
        setattr(made.parameters[name], kind, one)
    if not value:
        made.parameters[name].SetInParent()
    return made


ONE = side("INPUT1")
GOOD = message("add_sub", side(), ONE)
RAW = [A.tobytes(), B.tobytes()]
INVALID = "INVALID_ARGUMENT"
ROWS: list[tuple[str, pb.ModelInferRequest, str, str]] = [
    (
        "unknown model",
        message("nothing", side()),
        "NOT_FOUND",
        "Request for unknown model: 'nothing' is not found",
    ),
    ("unknown version", message("add_sub", side(), ONE, version="9"), "NOT_FOUND", "version 9 is not found"),
    ("version no number", message("add_sub", side(), ONE, version="x"), INVALID, "version"),
    ("failed model", message("broken", side()), "NOT_FOUND", "has no available versions"),
    ("unloaded model", message(UNLOADED, side("INPUT")), "NOT_FOUND", "has no available versions"),
    ("no inputs", message("add_sub"), INVALID, "expected 2 inputs but got 0"),
    ("no name", message("add_sub", side(""), ONE), INVALID, "unexpected inference input ''"),
    ("no shape", message("add_sub", side(shape=()), ONE), INVALID, "INPUT0"),
    ("no datatype", message("add_sub", side(datatype=""), ONE), INVALID, "datatype"),
    ("negative shape", message("add_sub", side(shape=(-1, 16)), ONE), INVALID, "negative"),
    ("overflow", message("add_sub", side(shape=(2**62, 2**62)), ONE), INVALID, "2^59"),
    ("many dimensions", message("add_sub", side(shape=[1] * 65), ONE), INVALID, "65 dimensions"),
    ("wrong field", message("add_sub", side(fp32_contents=[1.0] * 16), ONE), INVALID, "found fp32_contents"),
    (
        "two fields",
        message("add_sub", side(int_contents=[1] * 16, bool_contents=[True]), ONE),
        INVALID,
        "bool_contents",
    ),
    ("too few", message("add_sub", side(int_contents=[1] * 15), ONE), INVALID, "expected 16 elements"),
    ("too many", message("add_sub", side(int_contents=[1] * 17), ONE), INVALID, "got 17"),
    (
        "out of range",
        message("add_sub", side(datatype="INT8", int_contents=[128] + [0] * 15), ONE),
        INVALID,
        "128",
    ),
    (
        "typed FP16",
        message("identity_fp16", side("INPUT", "FP16", (1, 1), fp32_contents=[1.0])),
        INVALID,
        "raw",
    ),
    ("unknown datatype", message("add_sub", side(datatype="INT99"), ONE), INVALID, "datatype 'INT99'"),
    (
        "other datatype",
        message("add_sub", side(datatype="FP32", fp32_contents=[1.0] * 16), ONE),
        INVALID,
        "data-type is",
    ),
    (
        "other shape",
        message("add_sub", side(shape=(1, 8), int_contents=[1] * 8), ONE),
        INVALID,
        "unexpected shape for input",
    ),
    (
        "large batch",
        message("add_sub", *(side(n, shape=(9, 16), int_contents=[1] * 144) for n in ("INPUT0", "INPUT1"))),
        INVALID,
        "batch-size must be <= 8",
    ),
    (
        "batches differ",
        message("add_sub", side(shape=(2, 16), int_contents=[1] * 32), ONE),
        INVALID,
        "batch-size",
    ),
    ("missing input", message("add_sub", ONE), INVALID, "expected 2 inputs but got 1"),
    (
        "unexpected input",
        message("add_sub", ONE, side("OTHER")),
        INVALID,
        "unexpected inference input 'OTHER'",
    ),
    ("duplicate input", message("add_sub", ONE, ONE), INVALID, "more than once"),
    ("unknown output", wanting("X"), INVALID, "unexpected inference output 'X' for model"),
    ("duplicate output", wanting("OUTPUT0", "OUTPUT0"), INVALID, "more than once"),
    ("typed and raw", message("add_sub", side(), ONE, raw=RAW), INVALID, "exclude each other"),
    ("raw missing", message("add_sub", bare(), bare("INPUT1"), raw=RAW[:1]), INVALID, "expected 2 entries"),
    ("raw left over", message("add_sub", bare(), bare("INPUT1"), raw=[*RAW, b""]), INVALID, "got 3"),
    (
        "raw too short",
        message("add_sub", bare(), bare("INPUT1"), raw=[RAW[0][:-1], RAW[1]]),
        INVALID,
        "unexpected size 63",
    ),
    (
        "raw too long",
        message("add_sub", bare(), bare("INPUT1"), raw=[RAW[0] + b"x", RAW[1]]),
        INVALID,
        "unexpected size 65",
    ),
    (
        "raw BYTES",
        message("identity_bytes", bare("INPUT", "BYTES", (1, 1)), raw=[b"\x09\0\0\0x"]),
        INVALID,
        "says 9 bytes",
    ),
    ("nothing", message("add_sub", bare(), ONE), INVALID, "expected 16 elements"),
    ("reserved parameter", with_parameter("triton_x", string_param="1"), INVALID, "triton_"),
    ("headers", with_parameter("headers", string_param="1"), INVALID, "reserved"),
    ("empty parameter", with_parameter("x"), INVALID, "no value"),
    ("sequence_start", with_parameter("sequence_start", int64_param=1), INVALID, "sequence_start"),
    ("priority", with_parameter("priority", int64_param=-1), INVALID, "priority"),
    ("model raises", message("raising", side("INPUT", "FP32", (1, 1), fp32_contents=[-1.0])), "INTERNAL", ""),
    ("too large", message("add_sub", raw=[bytes(MAX_MESSAGE_BYTES + 1)]), "RESOURCE_EXHAUSTED", ""),
]
