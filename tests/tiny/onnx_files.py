"""A tiny ONNX file, written field by field as the public ONNX schema (onnx.proto, IR version 8) numbers them."""

from __future__ import annotations

INT32, STRING = 6, 8
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


def _value(name: str, datatype: int, dims: list[int | str]) -> bytes:
    """A ValueInfoProto; a text among `dims` names a dimension of any size."""
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


def _model(graph: bytes) -> bytes:
    return _number(1, 8) + _bytes(7, graph) + _bytes(8, _number(2, 17))
