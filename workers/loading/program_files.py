"""Files of programs whose own readers trust the files: archives of torch.export, and data beside ONNX programs.

`open_program` opens a torch.export program (`model.pt2`) without executing code in the file.

`torch.export.load` trusts its file: `load` unpickles weights, constants and example inputs, loads shared libraries,
evaluates sizes and guards as Python, writes names into generated code, and looks up functions by any name below
`torch`. So the archive is checked first, by the loader's own reader. Only these are allowed:

1. The records of one program, with weights and constants as plain bytes: no pickles, no objects, no libraries.
2. Example inputs that torch reads with `weights_only`.
3. Operators of torch's own library, `operator`, `math` and `torch.sym_*`, never as arguments of other operators;
   operators of higher order with graphs as the functions they call; sizes as arithmetic of symbols and numbers; names
   that are identifiers. Guards are dropped, as shapes are checked against the configuration.

An ONNX program may have data in files beside the program (`model.onnx.data` and the like). onnxruntime maps such files,
so their content is handed to the session in memory. The names are in the program, which is a protocol buffer: the walk
goes through the messages that may hold tensors and skips all else without reading. Numbers of fields are those of
onnx.proto (IR version 13).
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from workers.foreign import line_of
from workers.loading.source import SourceError

_MODEL = "models/model.json"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_SAMPLE = "data/sample_inputs/model.pt"
_RECORD = re.compile(
    r"models/model\.json|data/(weights|constants)/(model_(weights|constants)_config\.json|(weight|tensor)_\d+)"
    r"|data/sample_inputs/model\.pt|archive_format|archive_version|byteorder|version|\.data/\w+|\.format_version"
    r"|\.storage_alignment|extra/[\w./-]+"
)
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prim|prims|quantized_decomposed|torch_attn)(\.(?!__)\w+){1,2}"
    r"|torch\.ops\.aten\.__(and|or|xor|lshift|rshift|iand|ior|ixor|ilshift|irshift)__\.\w+"
    r"|torch\.(sym_\w+|_sym_\w+)|_?operator\.(?!__)\w+|math\.(?!__)\w+"
)
_UNSAFE = re.compile(
    r"torch\.ops\.aten\.(from_file|save|load)\b|_?operator\.(attrgetter|methodcaller|call)\b"
)
_HIGHER_ORDER = {
    "torch.ops.higher_order.associative_scan": (0,),
    "torch.ops.higher_order.cond": (1, 2),
    "torch.ops.higher_order.invoke_subgraph": (0,),
    "torch.ops.higher_order.map_impl": (0,),
    "torch.ops.higher_order.scan": (0,),
    "torch.ops.higher_order.tag_activation_checkpoint": (0,),
    "torch.ops.higher_order.while_loop": (0, 1),
    "torch.ops.higher_order.wrap_with_autocast": (4,),
    "torch.ops.higher_order.wrap_with_set_grad_enabled": (1,),
}
"""Operators that call some of their arguments, with the places of these arguments."""
_NAME = re.compile(r"([A-Za-z_]\w{0,1023})?")
_SYMBOL = re.compile(r"[A-Za-z]\w{0,63}")
_FUNCTION = re.compile(r"[A-Z]\w*|abs|ceiling|floor|log|sqrt|exp|round")
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Load),
    *(ast.Constant, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_MOST_CHARACTERS = 10_000
_MOST_EXPONENT = 64
_INSIDE = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {1: "text", 2: "text"},
}
"""Fields of each message that are followed, with the kinds of their content."""
_LOCATION = b"location"
_MOST_LEVELS = 100
"""Levels of messages, of which onnxruntime allows as many."""
_MOST_NAME_BYTES = 4096
_FIXED_BYTES = {1: 8, 5: 4}


def open_program(path: Path) -> torch.export.ExportedProgram:
    """The program of a file. Raises `SourceError` that names the fault."""
    # PERF: the import brings the compiler of torch and sympy, which take as long as torch, and other workers need none.
    from torch.export.pt2_archive._package import load_pt2

    with path.open("rb") as stream:
        try:
            _refuse_strange_records(path.name, torch._C.PyTorchFileReader(stream))
        except (RuntimeError, OSError) as error:
            raise SourceError(
                f"{path.name} is no program of torch.export: damaged or cut off", "UNKNOWN"
            ) from error
        stream.seek(0)
        try:
            program = load_pt2(stream).exported_programs["model"]
        except Exception as error:
            text = f"{path.name} cannot be loaded by torch {torch.__version__}: {line_of(error)}"
            raise SourceError(text, "UNKNOWN") from error
    program._guards_code = []
    return program


def _refuse_strange_records(name: str, reader: Any) -> None:
    records = reader.get_all_records()
    strange = next((record for record in records if not _RECORD.fullmatch(record)), None)
    if strange is not None:
        raise SourceError(
            f"{name} holds {strange[:200]!a}, which is not loaded; export the program again", "UNKNOWN"
        )
    if len(set(records)) != len(records) or not {_MODEL, *_CONFIGS} <= set(records):
        raise SourceError(f"{name} is no program of torch.export", "UNKNOWN")
    for config in _CONFIGS:
        for tensor, meta in _document(name, reader, config).get("config", {}).items():
            if not isinstance(meta, dict) or meta.get("use_pickle") is not False:
                raise SourceError(
                    f"{name}: {tensor[:200]!a} is stored as a pickle, which is not loaded", "UNKNOWN"
                )
    if _SAMPLE in records:
        _refuse_pickled_sample(name, reader.get_record(_SAMPLE))
    for problem in _problems(_document(name, reader, _MODEL)):
        raise SourceError(f"{name}: {problem}", "UNKNOWN")


def _document(name: str, reader: Any, record: str) -> dict[str, Any]:
    try:
        content = json.loads(reader.get_record(record))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: {record} is no JSON", "UNKNOWN") from error
    if not isinstance(content, dict):
        raise SourceError(f"{name}: {record} is no map", "UNKNOWN")
    return content


def _refuse_pickled_sample(name: str, raw: bytes) -> None:
    try:
        if raw:
            torch.load(io.BytesIO(raw), weights_only=True)
    except Exception as error:
        raise SourceError(
            f"{name}: its example inputs are more than tensors and are not loaded", "UNKNOWN"
        ) from error


def _problems(model: dict[str, Any]) -> Iterator[str]:
    """Parts of a serialized program that could run code, as messages."""
    places: list[Any] = [model]
    while places:
        place = places.pop()
        if isinstance(place, list):
            places += place
        if not isinstance(place, dict):
            continue
        if "target" in place and "metadata" in place:
            yield from _operator_problems(str(place["target"]), place.get("inputs"))
        for key, value in place.items():
            if key == "as_operator":
                yield f"operator {str(value)[:200]!a} as an argument is not allowed"
            elif key == "expr_str" and not _is_arithmetic(value):
                yield f"size {str(value)[:200]!a} is no arithmetic"
            elif key == "name" and not (isinstance(value, str) and _NAME.fullmatch(value)):
                yield f"the name {str(value)[:200]!a} is no identifier"
            elif key == "default_factory_module" and value != "builtins":
                yield f"an import of {str(value)[:200]!a} is not allowed"
            elif key in ("in_spec", "out_spec"):
                places.append(_tree(value))
            elif key == "range_constraints" and isinstance(value, dict):
                places.append([{"expr_str": symbol} for symbol in value])
        places += place.values()


def _tree(text: Any) -> Any:
    """A tree of arguments, decoded from JSON; None for other texts."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _operator_problems(target: str, inputs: Any) -> Iterator[str]:
    called = _HIGHER_ORDER.get(target)
    if called is None:
        if not _OPERATOR.fullmatch(target) or _UNSAFE.match(target):
            yield f"operator {target[:200]!a} is not allowed"
        return
    graphs = [at for at, given in enumerate(inputs) if _is_graph(given)] if isinstance(inputs, list) else []
    if not set(called) <= set(graphs):
        yield f"operator {target!a} is given something to call that is no graph"


def _is_graph(given: Any) -> bool:
    argument = given.get("arg") if isinstance(given, dict) else None
    return isinstance(argument, dict) and list(argument) == ["as_graph"]


def _is_arithmetic(text: Any) -> bool:
    """Whether an expression of sizes has only numbers, symbols, operators and functions of sympy.

    NOTE: sympy evaluates the expression as Python, with Python's built-in functions.
    """
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _NODES) and _is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and bool(_FUNCTION.fullmatch(node.func.id))
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return bool(_SYMBOL.fullmatch(node.value))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float)) and abs(node.value) < 1 << 64
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        return isinstance(exponent, int) and exponent <= _MOST_EXPONENT
    return True


def external_files(program: Path) -> dict[str, Path]:
    """Files with data of an ONNX program, by the name that the program has for them.

    Files outside of the program's directory are left out, and files that a damaged program names: onnxruntime refuses
    both in its own words.
    """
    home = program.parent.resolve()
    files: dict[str, Path] = {}
    try:
        with program.open("rb") as stream:
            for name in _locations(stream, "model", os.fstat(stream.fileno()).st_size):
                path = (home / os.fsdecode(name)).resolve()
                if path.is_relative_to(home) and path.is_file():
                    files[name.decode()] = path
    except (OSError, ValueError, EOFError):
        return files
    return files


def nbytes_of(program: Path, outside: Mapping[str, Path]) -> int:
    """Bytes of a program and of its files (`external_files`)."""
    return sum(path.stat().st_size for path in {program, *outside.values()})


def _locations(stream: BinaryIO, message: str, end: int, level: int = 0) -> Iterator[bytes]:
    """Names of files in the message that goes on until the byte `end`. Raises ValueError, EOFError when damaged."""
    if level > _MOST_LEVELS:
        raise ValueError("too many levels")
    key = b""
    for field, size in _fields(stream, end):
        held, after = _INSIDE[message].get(field), stream.tell() + size
        if held == "text" and size <= _MOST_NAME_BYTES:
            text = stream.read(size)
            if field == 2 and key == _LOCATION:
                yield text
            key = text
        elif held in _INSIDE:
            yield from _locations(stream, held, after, level + 1)
        stream.seek(after)


def _fields(stream: BinaryIO, end: int) -> Iterator[tuple[int, int]]:
    """(number, bytes) of each field that holds bytes. The stream stands at the content; the caller moves it behind."""
    while stream.tell() < end:
        field, kind = divmod(_varint(stream), 8)
        if kind == 0:
            _varint(stream)
        elif kind == 2:
            size = _varint(stream)
            if stream.tell() + size > end:
                raise EOFError
            yield field, size
        elif kind in _FIXED_BYTES:
            stream.seek(_FIXED_BYTES[kind], os.SEEK_CUR)
        else:
            raise ValueError("no protocol buffer")


def _varint(stream: BinaryIO) -> int:
    number = shift = 0
    while shift < 64:
        [byte] = stream.read(1) or (None,)
        if byte is None:
            raise EOFError
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        shift += 7
    raise ValueError("no protocol buffer")
