"""A `model.pt2` that would run code of its own is refused before any of it runs."""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny.program_modules import AddSub, Classifier, RowSums
from tests.tiny.programs import exported
from workers.loading.program_files import open_program
from workers.loading.source import SourceError

MODEL = "models/model.json"
Change = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary program with weights and free dimensions."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    exported(Classifier(False), [torch.zeros(2, 3, 32, 32)], [0], path)
    return path


def rewritten(path: Path, into: Path, change: Change) -> Path:
    """A copy of an archive whose records were changed."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(into, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"{root}/{name}", data)
    return into


def edit(record: str, change: Callable[[Any], None]) -> Change:
    """Change a record that is JSON."""

    def apply(records: dict[str, bytes]) -> None:
        document = json.loads(records[record])
        change(document)
        records[record] = json.dumps(document).encode()

    return apply


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def pickled(value: Any) -> bytes:
    """What torch makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def nodes(document: Any) -> Any:
    return document["graph_module"]["graph"]["nodes"]


def test_ordinary_programs_are_opened(tmp_path: Path, program: Path) -> None:
    assert open_program(program).state_dict.keys() == Classifier(False).state_dict().keys()
    assert open_program(rewritten(program, tmp_path / "same.pt2", lambda records: None))
    exported(RowSums(), [torch.zeros(2, 3, 4)], [0, 1, 2], tmp_path / "free.pt2")
    assert open_program(tmp_path / "free.pt2")
    exported(AddSub(), [torch.zeros(2), torch.zeros(2)], [], tmp_path / "fixed.pt2")
    assert open_program(tmp_path / "fixed.pt2")


class Branches(torch.nn.Module):
    """Has a graph for each way, and one without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice or thrice the input, plus one."""
        with torch.no_grad():
            more = x + 1 - x
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)) + more


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with operators that call graphs."""
    path = tmp_path_factory.mktemp("branches") / "model.pt2"
    exported(Branches(), [torch.ones(3)], [], path)
    return path


def test_graphs_inside_a_program_are_opened(branches: Path) -> None:
    program = open_program(branches)
    kinds = {str(node.target) for node in program.graph.nodes}
    assert {"cond", "wrap_with_set_grad_enabled"} <= kinds
    for sent, factor in ((torch.ones(3), 2), (-torch.ones(3), 3)):
        assert program.graph_module(sent)[0].tolist() == (sent * factor + 1).tolist()


def higher(change: Callable[[Any], None]) -> Change:
    """Change the node of `wrap_with_set_grad_enabled`."""

    def apply(document: Any) -> None:
        [node] = [each for each in nodes(document) if each["target"].endswith("wrap_with_set_grad_enabled")]
        change(node)

    return edit(MODEL, apply)


def called(argument: Any) -> Change:
    """Give the node something else to call."""
    return higher(lambda node: node["inputs"][1].update(arg=argument))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (called({"as_operator": "torch.ops.aten.from_file.default"}), "something to call that is no graph"),
        (called({"as_operator": "torch.os.system"}), "something to call that is no graph"),
        (called({"as_string": "torch.os.system"}), "something to call that is no graph"),
        (higher(lambda node: node.update(inputs=[])), "something to call that is no graph"),
        (higher(lambda node: node.update(target="torch.ops.higher_order.wrap")), "is not allowed"),
        (higher(lambda node: node.update(target="torch.ops.higher_order.print")), "is not allowed"),
        (
            higher(lambda node: node["inputs"].append({"name": "f", "arg": {"as_operator": "x"}, "kind": 2})),
            "'x' as an argument is not allowed",
        ),
    ],
)
def test_an_operator_is_given_nothing_to_call_but_graphs(
    tmp_path: Path, branches: Path, change: Change, said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        open_program(rewritten(branches, tmp_path / "model.pt2", change))


def test_a_tree_of_arguments_imports_nothing(tmp_path: Path, program: Path) -> None:
    context = {
        "default_factory_module": "antigravity",
        "default_factory_name": "webbrowser",
        "dict_context": [],
    }
    tree = [1, {"type": "collections.defaultdict", "context": context, "children_spec": []}]

    def change(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(tree)

    path = rewritten(program, tmp_path / "model.pt2", edit(MODEL, change))
    with pytest.raises(SourceError, match="an import of 'antigravity' is not allowed"):
        open_program(path)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("where", ["weight", "sample"])
def test_no_pickle_is_executed(tmp_path: Path, program: Path, where: str) -> None:
    trap = tmp_path / "sprung"

    def change(records: dict[str, bytes]) -> None:
        if where == "sample":
            records["data/sample_inputs/model.pt"] = pickled(((Trap(trap),), {}))
            return
        config = json.loads(records["data/weights/model_weights_config.json"])
        first = next(iter(config["config"].values()))
        first["use_pickle"] = True
        records["data/weights/model_weights_config.json"] = json.dumps(config).encode()
        records[f"data/weights/{first['path_name']}"] = pickled(Trap(trap))

    path = rewritten(program, tmp_path / "model.pt2", change)
    with pytest.raises(SourceError, match=r"pickle|more than tensors"):
        open_program(path)
    assert not trap.exists()
    with pytest.raises(Exception):  # noqa: B017  whatever torch says of what the trap returned
        torch.export.load(path)
    assert trap.exists(), "the trap works: torch's own loader springs it"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            edit(MODEL, lambda d: nodes(d)[0].update(target="torch.os.system")),
            r"operator 'torch\.os\.system' is not allowed",
        ),
        (
            edit(MODEL, lambda d: nodes(d)[0].update(target="torch.ops.aten.from_file.default")),
            "is not allowed",
        ),
        (
            edit(MODEL, lambda d: nodes(d)[0].update(target="torch.ops.aten.__class__.__init__")),
            "is not allowed",
        ),
        (edit(MODEL, lambda d: nodes(d)[0].update(target="_operator.methodcaller")), "is not allowed"),
        (edit(MODEL, lambda d: nodes(d)[0].update(target="torch.ops.mine.run.default")), "is not allowed"),
        (edit(MODEL, lambda d: nodes(d)[0].update(target="#extension:thing")), "is not allowed"),
        (
            edit(MODEL, lambda d: d["range_constraints"].update({"__import__('os').mkdir('x')": {}})),
            "is no arithmetic",
        ),
        (
            edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "(lambda: 1)()"})),
            "is no arithmetic",
        ),
        (edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "eval('a')"})), "is no arithmetic"),
        (edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "s1.__class__"})), "is no arithmetic"),
        (edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "9 ** 9 ** 9"})), "is no arithmetic"),
        (edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "S('open(1)')"})), "is no arithmetic"),
        (edit(MODEL, lambda d: nodes(d)[0].update(x={"expr_str": "(" * 9000})), "is no arithmetic"),
        (
            edit(MODEL, lambda d: nodes(d)[0]["inputs"][0].update(name="x=__import__('os').mkdir('y')")),
            "is no identifier",
        ),
        (
            lambda records: records.update({"data/constants/opaque_obj_0": b"x"}),
            "'data/constants/opaque_obj_0'",
        ),
        (lambda records: records.update({"data/constants/custom_obj_0": b"x"}), "which is not loaded"),
        (lambda records: records.update({"data/weights/model.pt": pickled({})}), "which is not loaded"),
        (lambda records: records.update({"data/aotinductor/model/x.so": b"x"}), "which is not loaded"),
        (lambda records: records.update({"models/other.json": b"{}"}), "which is not loaded"),
        (lambda records: records.pop(MODEL), "no program of torch.export"),
        (lambda records: records.update({MODEL: b"{"}), "is no JSON"),
        (lambda records: records.update({MODEL: b"[]"}), "is no map"),
        (lambda records: records.update({MODEL: b"{}"}), "cannot be loaded by torch"),
        (lambda records: records.update({MODEL: b"[" * 200_000}), "is no JSON"),
        (lambda records: records.update({"data/weights/weight_0": b"short"}), "cannot be loaded by torch"),
        (lambda records: records.pop("data/weights/weight_0"), "cannot be loaded by torch"),
    ],
)
def test_what_an_ordinary_program_has_no_need_of_is_refused(
    tmp_path: Path, program: Path, change: Change, said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        open_program(rewritten(program, tmp_path / "model.pt2", change))


@pytest.mark.parametrize("length", [0, 1, 100, 10_000, -1])
def test_a_damaged_file_is_told_without_its_path(tmp_path: Path, program: Path, length: int) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(program.read_bytes()[:length])
    with pytest.raises(SourceError) as caught:
        open_program(path)
    assert str(caught.value).startswith("model.pt2 is no program of torch.export")
    assert str(tmp_path) not in str(caught.value)


def test_guards_that_a_file_brings_are_dropped(tmp_path: Path, program: Path) -> None:
    path = rewritten(
        program,
        tmp_path / "model.pt2",
        edit(MODEL, lambda d: d.update(guards_code=["__import__('os').mkdir('z')"])),
    )
    assert open_program(path)._guards_code == []
