"""A tiny ONNX file, written field by field as the public ONNX schema (onnx.proto, IR version 8) numbers them."""

from __future__ import annotations

import struct

FP32, INT32, INT64, STRING, BOOL = 1, 6, 7, 8, 9
"""TensorProto.DataType of ONNX."""


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw


def _node(operator: str, inputs: list[str], output: str) -> bytes:
    return b"".join(_bytes(1, name) for name in inputs) + _bytes(2, output) + _bytes(4, operator)


def _value(name: str, datatype: int, dims: list[int | str] | None) -> bytes:
    """A ValueInfoProto; a text among `dims` names a dimension of any size, and None leaves the rank open."""
    if dims is None:
        return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, datatype)))
    sizes = (_bytes(2, dim) if isinstance(dim, str) else _number(1, dim) for dim in dims)
    shape = b"".join(_bytes(1, size) for size in sizes)
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, datatype) + _bytes(2, shape)))


def add_sub() -> bytes:
    """INPUT0 and INPUT1, INT32 [batch, 16], to OUTPUT0 (sum) and OUTPUT1 (difference)."""
    inputs = ["INPUT0", "INPUT1"]
    graph = _bytes(1, _node("Add", inputs, "OUTPUT0")) + _bytes(1, _node("Sub", inputs, "OUTPUT1"))
    graph += _bytes(2, "add_sub")
    graph += b"".join(_bytes(11, _value(name, INT32, ["batch", 16])) for name in inputs)
    graph += b"".join(_bytes(12, _value(name, INT32, ["batch", 16])) for name in ("OUTPUT0", "OUTPUT1"))
    return _model(graph)


def same_texts() -> bytes:
    """INPUT, STRING [batch, 1], to OUTPUT, the same."""
    graph = _bytes(1, _node("Identity", ["INPUT"], "OUTPUT")) + _bytes(2, "same_texts")
    graph += _bytes(11, _value("INPUT", STRING, ["batch", 1]))
    return _model(graph + _bytes(12, _value("OUTPUT", STRING, ["batch", 1])))


def sequence(datatype: int, control: int, rows: list[int | str], dims: list[int | str]) -> bytes:
    """(INPUT + START) * READY; INPUT and OUTPUT are [*rows, *dims], controls [*rows, 1], of BOOL or of `datatype`."""
    names = ["START", "READY"]
    nodes = b""
    if control == BOOL:
        to = _bytes(1, "to") + _number(3, datatype) + _number(20, 2)
        nodes = b"".join(_bytes(1, _node("Cast", [name], f"_{name}") + _bytes(5, to)) for name in names)
        names = ["_START", "_READY"]
    nodes += _bytes(1, _node("Add", ["INPUT", names[0]], "sum"))
    nodes += _bytes(1, _node("Mul", [names[1], "sum"], "OUTPUT"))
    graph = nodes + _bytes(2, "sequence") + _bytes(11, _value("INPUT", datatype, [*rows, *dims]))
    graph += b"".join(_bytes(11, _value(name, control, [*rows, 1])) for name in ("START", "READY"))
    return _model(graph + _bytes(12, _value("OUTPUT", datatype, [*rows, *dims])))


def same(datatype: int, dims: list[int | str] | None) -> bytes:
    """INPUT to OUTPUT, the same; `dims` [] is a tensor of rank 0, None one of any rank."""
    graph = _bytes(1, _node("Identity", ["INPUT"], "OUTPUT")) + _bytes(2, "same")
    graph += _bytes(11, _value("INPUT", datatype, dims))
    return _model(graph + _bytes(12, _value("OUTPUT", datatype, dims)))


def over_time() -> bytes:
    """x, FP32 ["time", 4], to y, the sums over all times so far."""
    graph = _bytes(1, _node("CumSum", ["x", "axis"], "y")) + _bytes(2, "over_time")
    graph += _bytes(5, _number(1, 1) + _number(2, 7) + _bytes(8, "axis") + _bytes(9, bytes(8)))
    graph += _bytes(11, _value("x", FP32, ["time", 4]))
    return _model(graph + _bytes(12, _value("y", FP32, ["time", 4])))


def quantized() -> bytes:
    """x, FP32 [batch, 4], to y, the same in steps of a scale that follows the largest value of all rows."""
    steps = _node("DynamicQuantizeLinear", ["x"], "q") + _bytes(2, "scale") + _bytes(2, "zero")
    graph = _bytes(1, steps) + _bytes(1, _node("DequantizeLinear", ["q", "scale", "zero"], "y"))
    graph += _bytes(2, "quantized") + _bytes(11, _value("x", FP32, ["batch", 4]))
    return _model(graph + _bytes(12, _value("y", FP32, ["batch", 4])))


def table(file: str, rows: int, width: int) -> bytes:
    """INPUT, INT64 [batch, 1], to OUTPUT: rows of a table FP32 [rows, width] whose bytes are the whole of `file`."""
    place = {"location": file, "offset": "0", "length": str(4 * rows * width)}
    weights = _number(1, rows) + _number(1, width) + _number(2, FP32) + _bytes(8, "table")
    weights += b"".join(_bytes(13, _bytes(1, key) + _bytes(2, value)) for key, value in place.items())
    graph = _bytes(1, _node("Gather", ["table", "INPUT"], "OUTPUT")) + _bytes(2, "table")
    graph += _bytes(5, weights + _number(14, 1)) + _bytes(11, _value("INPUT", INT64, ["batch", 1]))
    return _model(graph + _bytes(12, _value("OUTPUT", FP32, ["batch", 1, width])))


def embedded(rows: int, width: int) -> bytes:
    """INPUT, INT64 [batch, 1], to OUTPUT: rows of a table FP32 [rows, width] of the numbers from 0 on."""
    numbers = struct.pack(f"<{rows * width}f", *range(rows * width))
    weights = _number(1, rows) + _number(1, width) + _number(2, FP32) + _bytes(8, "numbers")
    graph = _bytes(1, _node("Gather", ["numbers", "INPUT"], "OUTPUT")) + _bytes(2, "embedded")
    graph += _bytes(5, weights + _bytes(9, numbers))
    graph += _bytes(11, _value("INPUT", INT64, ["batch", 1]))
    return _model(graph + _bytes(12, _value("OUTPUT", FP32, ["batch", 1, width])))


def positions(length: int) -> bytes:
    """INPUT, FP32 [batch, "tokens"], to OUTPUT: with a row of `length` zeros added, so that only such inputs suit."""
    row = _number(1, 1) + _number(1, length) + _number(2, FP32) + _bytes(8, "row")
    graph = _bytes(1, _node("Add", ["INPUT", "row"], "OUTPUT")) + _bytes(2, "positions")
    graph += _bytes(5, row + _bytes(9, bytes(4 * length)))
    graph += _bytes(11, _value("INPUT", FP32, ["batch", "tokens"]))
    return _model(graph + _bytes(12, _value("OUTPUT", FP32, ["batch", "tokens"])))


def parsed() -> bytes:
    """INPUT, STRING [batch, 1], to OUTPUT, FP32: the numbers that the texts say."""
    to = _bytes(1, "to") + _number(3, FP32) + _number(20, 2)
    graph = _bytes(1, _node("Cast", ["INPUT"], "OUTPUT") + _bytes(5, to)) + _bytes(2, "parsed")
    graph += _bytes(11, _value("INPUT", STRING, ["batch", 1]))
    return _model(graph + _bytes(12, _value("OUTPUT", FP32, ["batch", 1])))


def _model(graph: bytes) -> bytes:
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))
