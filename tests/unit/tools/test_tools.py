"""The repository's own checks: each rule finds what it forbids and lets pass what it allows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import duplication, imports, sizes, structure
from tools.source_tree import ROOT, report


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return root


def problems(root: Path) -> str:
    return "\n".join(str(finding) for finding in imports.find(root))


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("ipc/wire/codec.py", "import falcon", "ipc imports falcon"),
        ("ipc/wire/codec.py", "def f():\n    from torch import nn", "ipc imports torch.nn"),
        ("frontend/app.py", "import torch.nn as nn", "frontend must not import torch"),
        ("frontend/app.py", "from workers.scheduling.queue import Queue", "frontend must not import workers"),
        ("frontend/app.py", "import penstock", "frontend must not import penstock"),
        (
            "frontend/app.py",
            "import importlib\nimportlib.import_module('transformers')",
            "must not import transformers",
        ),
        (
            "workers/main.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import falcon",
            "import falcon",
        ),
        ("frontend/assembly.py", "import nats", "nats is for frontend/bridge and frontend/cluster alone"),
        (
            "penstock/doctor.py",
            "from nats.aio import client",
            "nats is for frontend/bridge and frontend/cluster",
        ),
        ("ipc/brokers.py", "import nats", "ipc imports nats"),
        ("workers/main.py", "import frontend.engine.local.engine", "workers must not import frontend"),
        (
            "frontend/tensors/models.py",
            "from frontend.engine.local import routing",
            "frontend.engine.local is for frontend/assembly.py and frontend/bridge",
        ),
        (
            "frontend/protocols/sie/flow.py",
            "from frontend.engine.local.client import Client",
            "frontend.engine.local is for frontend/assembly.py and frontend/bridge",
        ),
        (
            "workers/adapters/dense.py",
            "from workers.adapters import sparse",
            "dense must not import workers/adapters/sparse",
        ),
        (
            "workers/adapters/dense.py",
            "from .sparse import pool",
            "dense must not import workers/adapters/sparse",
        ),
        (
            "frontend/protocols/sie/routes.py",
            "from frontend.protocols.chat import sse",
            "sie must not import",
        ),
        ("penstock/cli.py", "import pickle", "pickle is banned"),
        ("workers/main.py", "import marshal, shelve", "shelve is banned"),
        (
            "ipc/memory/arena.py",
            "from multiprocessing import shared_memory",
            "multiprocessing.shared_memory is banned",
        ),
        (
            "ipc/memory/arena.py",
            "import multiprocessing.shared_memory as shm",
            "multiprocessing.shared_memory is banned",
        ),
        ("workers/loader.py", "import torch\ntorch.load('weights')", "torch.load without"),
        (
            "workers/loader.py",
            "from torch import load\nload('weights', weights_only=False)",
            "torch.load without",
        ),
        ("workers/loader.py", "import yaml\nyaml.load('text')", "yaml.load is banned"),
        (
            "workers/loader.py",
            "import numpy as np\nnp.load('file', allow_pickle=True)",
            "numpy.load is banned",
        ),
        ("workers/loader.py", "socket.recv_pyobj()", "recv_pyobj is banned"),
    ],
)
def test_import_rule_refuses(tmp_path: Path, name: str, code: str, expected: str) -> None:
    assert expected in problems(write(tmp_path, name, code))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (
            "ipc/wire/codec.py",
            "import msgspec, zmq, numpy, mmap\nfrom ipc import errors\nfrom prometheus_client import Counter",
        ),
        ("frontend/assembly.py", "import falcon.asgi\nfrom frontend.engine.local.client import Client"),
        ("frontend/engine/local/engine.py", "from frontend.engine.local import routing"),
        ("frontend/bridge/main.py", "import nats\nfrom frontend.engine.local.client import Client"),
        ("frontend/cluster/engine.py", "from nats.aio.client import Client"),
        ("tests/harness/broker.py", "import nats"),
        (
            "frontend/protocols/sie/routes.py",
            "from frontend.protocols.sie import schemas\nimport frontend.engine.interface",
        ),
        ("frontend/protocols/registry.py", "from frontend.protocols import chat, sie"),
        ("workers/main.py", "import torch\nfrom workers.endpoint.endpoint import Endpoint"),
        (
            "workers/adapters/dense.py",
            "from workers.adapters.shared import pooling\nfrom workers.adapters.base import Adapter",
        ),
        ("workers/adapters/registry.py", "from workers.adapters import dense, sparse"),
        ("workers/loader.py", "import torch\ntorch.load('weights', weights_only=True)"),
        ("workers/loader.py", "import yaml\nyaml.safe_load('text')"),
        ("workers/loader.py", "import numpy as np\nnp.load('file', allow_pickle=False)"),
        ("penstock/cli.py", "from frontend import app\nfrom workers import main\nfrom ipc import settings"),
    ],
)
def test_import_rule_allows(tmp_path: Path, name: str, code: str) -> None:
    assert problems(write(tmp_path, name, code)) == ""


def test_size_rule_counts_lines_of_functions(tmp_path: Path) -> None:
    write(tmp_path, "ipc/edge.py", "def edge():\n" + "    x = 1\n" * 59)
    assert sizes.find(tmp_path) == []
    write(tmp_path, "ipc/edge.py", "def edge():\n" + "    x = 1\n" * 60)
    assert [finding.text for finding in sizes.find(tmp_path)] == ["edge() has 61 lines, 60 are allowed"]


def test_size_rule_counts_lines_of_modules_except_those_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path, "ipc/edge.py", "x = 1\n" * 500)
    assert sizes.find(tmp_path) == []
    write(tmp_path, "ipc/edge.py", "x = 1\n" * 501)
    assert [finding.text for finding in sizes.find(tmp_path)] == ["501 lines, 500 are allowed"]
    write(tmp_path, "ipc/edge.py", "")
    write(tmp_path, "ipc/wire/messages.py", "x = 1\n" * 501)
    assert sizes.find(tmp_path) == []
    write(tmp_path, "ipc/wire/messages.py", "x = 1\n" * 500)
    assert "need not name" in sizes.find(tmp_path)[0].text


def test_generated_protocol_buffers_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "frontend/grpc/service_pb2.py", "import pickle\n" * 500)
    assert sizes.find(tmp_path) == []
    assert imports.find(tmp_path) == []


def block(seed: int, lines: int = 8) -> str:
    """Code lines that differ between seeds in their names."""
    return "".join(f"value_{seed}_{line} = compute_{line}({seed})\n" for line in range(lines))


def test_duplication_finds_a_copy_with_other_constants_and_layout(tmp_path: Path) -> None:
    copied = block(1).replace("(1)", "( 2 )  # other\n")
    write(tmp_path, "ipc/one.py", '"""One."""\nimport os\n\n' + block(1) + block(3))
    write(tmp_path, "ipc/two.py", '"""Two."""\nimport os\n\n' + block(4) + copied)
    percent, found = duplication.percentage(tmp_path)
    assert percent == pytest.approx(50.0)
    assert {path.name for path, _ in found} == {"one.py", "two.py"}
    assert duplication.main(tmp_path) == 1


def test_duplication_ignores_imports_docstrings_and_runs_below_six_lines(tmp_path: Path) -> None:
    head = '"""Same\n\ntext\n\nin\n\nboth."""\n' + "".join(f"import module_{n}\n" for n in range(10))
    write(tmp_path, "ipc/one.py", head + block(1, lines=5) + block(2))
    write(tmp_path, "ipc/two.py", head + block(1, lines=5) + block(3))
    assert duplication.percentage(tmp_path) == (0.0, {})
    assert duplication.main(tmp_path) == 0


def test_report_says_what_was_found_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "ipc/wire/codec.py", "x = 1\nimport pickle\n")
    assert report("imports", imports.find(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ipc/wire/codec.py:2: pickle is banned everywhere",
        "imports: 1 finding",
    ]
    assert report("imports", []) == 0


def structure_of(root: Path) -> str:
    return "\n".join(str(finding) for finding in structure.find(root))


def test_a_circle_of_imports_is_found_also_where_it_is_for_types_only(tmp_path: Path) -> None:
    write(tmp_path, "frontend/a.py", "from frontend import b")
    write(tmp_path, "frontend/b.py", "def f():\n    from frontend.c import C")
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from frontend.a import A"
    write(tmp_path, "frontend/c.py", for_types)
    write(tmp_path, "frontend/d.py", "from frontend import a")
    assert "imports in a circle: frontend.a, frontend.b, frontend.c" in structure_of(tmp_path)
    write(tmp_path, "frontend/c.py", "import os")
    assert "circle" not in structure_of(tmp_path)


@pytest.mark.parametrize(
    ("module", "imported", "problem"),
    [
        ("ipc/wire/codec.py", "ipc.store.store", "ipc.wire must not import ipc.store"),
        ("ipc/store/store.py", "ipc.memory.arena", "ipc.store must not import ipc.memory"),
        ("ipc/store/store.py", "ipc.wire.codec", None),
        ("ipc/store/store.py", "ipc.store.rows", None),
        ("ipc/new.py", "os", "ipc.new is on no floor"),
        ("penstock/new.py", "ipc.store.store", None),
    ],
)
def test_a_room_imports_lower_floors_only(
    tmp_path: Path, module: str, imported: str, problem: str | None
) -> None:
    for known in ("store/store", "store/rows", "wire/codec", "memory/arena"):
        write(tmp_path, f"ipc/{known}.py", "A = 1")
    write(tmp_path, module, f"import {imported}")
    found = structure_of(tmp_path)
    assert (problem in found) if problem else ("floor" not in found), found


@pytest.mark.parametrize(("count", "refused"), [(20, False), (21, True)])
def test_a_module_with_many_own_imports_is_found(tmp_path: Path, count: int, refused: bool) -> None:
    for number in range(count):
        write(tmp_path, f"workers/m{number}.py", "A = B = 1")
    lines = [f"from workers.m{number} import A, B" for number in range(count)]
    write(tmp_path, "workers/main.py", "\n".join(["import os", *lines]))
    assert ("own imports, 20 are allowed" in structure_of(tmp_path)) is refused


@pytest.mark.parametrize(
    ("text", "refused"), [('"""One."""', True), ("", True), ('"""One.\n\nWho.\n"""', False)]
)
def test_a_package_says_what_it_is_for(tmp_path: Path, text: str, refused: bool) -> None:
    write(tmp_path, "ipc/wire/__init__.py", text)
    assert ("the docstring of a package has 3 lines" in structure_of(tmp_path)) is refused


def test_a_process_writes_down_the_modules_that_it_enters(tmp_path: Path) -> None:
    write(tmp_path, "ipc/__init__.py", "")
    write(tmp_path, "ipc/first.py", "from ipc.second import g\n\ndef f():\n    g()")
    write(tmp_path, "ipc/second.py", "def g():\n    pass")
    entries = tmp_path / "entries"
    entries.mkdir()
    environment = {"WALK_DIR": str(entries), "WALK_ROOT": str(tmp_path)}
    environment["PYTHONPATH"] = f"{ROOT / 'tools' / 'recording'}:{tmp_path}"
    code = "from ipc import first; import os, time; print(os.getpid(), time.monotonic_ns(), flush=True); first.f()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    pid, began = map(int, done.stdout.split())
    lines = [line.split() for line in (entries / str(pid)).read_text().splitlines()]
    assert [name for at, name in lines if int(at) >= began][:2] == ["ipc.first", "ipc.second"]


def test_long_lines_of_markdown_are_found_outside_of_tables(tmp_path: Path) -> None:
    long = "word " * 30
    write(tmp_path, "README.md", f"{long}\n| {long} |\n```\n{long}\n```\n")
    found = [str(finding) for finding in sizes.find(tmp_path)]
    assert found == [f"README.md:{number}: 150 columns, 120 are allowed" for number in (1, 4)]
