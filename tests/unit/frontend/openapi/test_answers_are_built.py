"""What describes an answer is what renders the answer: no struct of the API's description only describes.

A struct of an answer or of an error is named inside of a function or of a class body: there it is built, or values are
converted to it. A struct that only another struct names is built with the other one, by a conversion.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from frontend.protocols.registry import protocols
from tools.source_tree import ROOT, parse, python_files

DESCRIBES_ONLY = {
    "ResponseAnswer": "a response is stored, continued and repeated in events as a plain object",
}
"""Structs that nothing builds, each with the reason. `tests.fakes.described_answers` compares the answers by field."""
TABLES = ("Route", "asking", "faults", "stored")
"""Calls that make rows of routes, which name the struct of an answer and build none."""
CONVERSIONS = ("convert", "answer_as", "decode")
"""Calls that make a struct, and the structs in its fields, of plain values or of JSON."""


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type names itself, those in unions and lists included."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in kind if isinstance(kind, tuple) else typing.get_args(kind):
        yield from _structs(part)


def _fields(struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    hints = typing.get_type_hints(struct, include_extras=True)
    return [found for hint in hints.values() for found in _structs(hint)]


def _described() -> dict[str, type[msgspec.Struct]]:
    """All structs of answers and errors of a gateway, by name, whose table has the rows of a server as well."""
    left = [
        struct
        for route in protocols(is_gateway=True).routes
        if route.summary
        for kind in (route.answer, *route.errors.values())
        for struct in _structs(kind)
    ]
    found: dict[str, type[msgspec.Struct]] = {}
    while left:
        struct = left.pop()
        if struct.__name__ not in found:
            found[struct.__name__] = struct
            left += _fields(struct)
    return found


class _Uses(ast.NodeVisitor):
    """Names that functions and class bodies use as values: built, passed on, or kept as an attribute of a class."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.converted: set[str] = set()
        self._depth = 0

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in TABLES:
            return
        if called in CONVERSIONS:
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            self.converted |= {value.id for value in values if isinstance(value, ast.Name)}
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if self._depth:
            self.names.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._depth:
            self.names.add(node.attr)
        self.generic_visit(node)


def _uses() -> _Uses:
    uses = _Uses()
    for path in python_files(ROOT):
        uses.visit(parse(path))
    return uses


def test_every_struct_of_an_answer_is_built_by_what_renders_the_answer() -> None:
    described, uses = _described(), _uses()
    left = [described[name] for name in described.keys() & uses.converted]
    built = {name for name in described if name in uses.names}
    while left:
        converted = _fields(left.pop())
        left += [struct for struct in converted if struct.__name__ not in built]
        built |= {struct.__name__ for struct in converted}
    assert len(built) > 150
    assert described.keys() - built == DESCRIBES_ONLY.keys()
