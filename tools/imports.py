"""Import rule: allowed imports between packages, and banned modules and calls.

1. `ipc` imports the standard library and a few packages. `frontend` and `workers` import `ipc` and never each
   other. `penstock` may import all three, and none of the three imports `penstock`.
2. Frontends load no model library, workers load no web server.
3. Protocol packages never import each other, and neither do model families. Forms of other servers may import
   `frontend/protocols/foreign`, and all of these `frontend/protocols/sie`, whose flow they extend. Only
   `frontend/assembly.py` and the bridge import the engine over ZeroMQ; other modules import `frontend.engine`.
   Only `frontend/cluster` and `frontend/bridge` import `nats`, so that a server of one host needs no client of brokers.
4. No module imports a module that turns bytes into arbitrary objects, or `multiprocessing.shared_memory` (on
   Python 3.11 a reader's exit unlinks the owner's segment). No module calls a loader in its unsafe form.

Imports inside functions and under `TYPE_CHECKING` count, and so do `import_module("...")` calls with a literal
name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.source_tree import Finding, report, tree_argument, walk_files

IPC_MAY_IMPORT = sys.stdlib_module_names | {
    "google",
    "ipc",
    "msgspec",
    "numpy",
    "prometheus_client",
    "setproctitle",
    "yaml",
    "zmq",
}

_MODEL_LIBRARIES = {
    "accelerate",
    "safetensors",
    "sentence_transformers",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
}
_WEB_SERVERS = {"falcon", "gunicorn", "uvicorn", "uvicorn_worker"}
MUST_NOT_IMPORT = {
    "frontend": _MODEL_LIBRARIES | {"penstock", "workers"},
    "workers": _WEB_SERVERS | {"frontend", "penstock"},
}

BANNED_MODULES = {"cloudpickle", "dill", "marshal", "multiprocessing.shared_memory", "pickle", "shelve"}
BANNED_CALLS = {
    "numpy.load": "numpy.load may unpickle",
    "yaml.full_load": "use yaml.safe_load",
    "yaml.load": "use yaml.safe_load",
    "yaml.unsafe_load": "use yaml.safe_load",
}
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}

OURS = {"frontend", "ipc", "penstock", "penstock_server", "tools", "workers"}
"""What runs without the client of brokers; tests talk to brokers as they like."""
LOCAL_ENGINE = "frontend.engine.local"
MAY_IMPORT_LOCAL_ENGINE = ("frontend/assembly.py", "frontend/bridge/", "frontend/engine/local/")
MAY_IMPORT_NATS = ("frontend/bridge/", "frontend/cluster/")

_SEPARATE_DIRECTORIES = {
    "frontend/protocols": {"grpc_services", "registry", "server_routes"},
    "workers/adapters": {"base", "registry", "shared", "spec"},
}


_SERVERS = ("cohere", "infinity", "ollama", "tei", "vllm")
_EXTENSIONS = {(name, other) for name in _SERVERS for other in ("foreign", "sie")}
_EXTENSIONS |= {("foreign", "sie"), ("gateway", "sie")}
"""(package, package that may be imported) of protocols that are forms of other servers over the flow of SIE."""


def find(root: Path) -> list[Finding]:
    """Every broken import rule under `root`."""
    return list(walk_files(root, check_file))


def check_file(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Findings of one file; `path` is relative to the root of the tree."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for name in imported_names(node, path):
            for problem in import_problems(path, name):
                yield Finding(path, getattr(node, "lineno", 1), problem)
        aliases |= import_aliases(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (problem := call_problem(node, aliases)):
            yield Finding(path, node.lineno, problem)


def imported_names(node: ast.AST, path: Path) -> list[str]:
    """Dotted names that a statement or an `import_module` call imports; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = path.parent.parts[: len(path.parent.parts) - node.level + 1] if node.level else ()
        module = ".".join([*package, *([node.module] if node.module else [])])
        return [f"{module}.{alias.name}" for alias in node.names]
    if (
        isinstance(node, ast.Call)
        and node.args
        and _dotted(node.func).endswith(("import_module", "__import__"))
    ):
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def import_problems(path: Path, name: str) -> Iterator[str]:
    """Why `path` may not import `name`."""
    package, top = path.parts[0], name.partition(".")[0]
    banned = next(
        (module for module in BANNED_MODULES if name == module or name.startswith(f"{module}.")), None
    )
    if banned:
        yield f"{banned} is banned everywhere"
    if package == "ipc" and top not in IPC_MAY_IMPORT:
        allowed = "the standard library, google.protobuf, msgspec, numpy, prometheus_client, setproctitle, yaml, zmq"
        yield f"ipc imports {name}; allowed: {allowed}"
    if top in MUST_NOT_IMPORT.get(package, ()):
        yield f"{package} must not import {top}"
    is_local = package == "frontend" and f"{name}.".startswith(f"{LOCAL_ENGINE}.")
    if is_local and not path.as_posix().startswith(MAY_IMPORT_LOCAL_ENGINE):
        yield (
            f"{LOCAL_ENGINE} is for frontend/assembly.py and frontend/bridge; "
            "the interface is frontend.engine.interface"
        )
    if top == "nats" and package in OURS and not path.as_posix().startswith(MAY_IMPORT_NATS):
        yield "nats is for frontend/bridge and frontend/cluster alone"
    for directory, open_to_all in _SEPARATE_DIRECTORIES.items():
        mine, other = (
            _member(path.with_suffix("").as_posix(), directory),
            _member(name.replace(".", "/"), directory),
        )
        extends = (mine, other) in _EXTENSIONS
        if mine and other and mine != other and not extends and not {mine, other} & open_to_all:
            yield f"{directory}/{mine} must not import {directory}/{other}"


def import_aliases(node: ast.AST) -> dict[str, str]:
    """Local name -> dotted name, for the names that an import statement binds."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name
            if alias.asname
            else alias.name.partition(".")[0]
            for alias in node.names
        }
    if isinstance(node, ast.ImportFrom) and node.module:
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {}


def call_problem(call: ast.Call, aliases: dict[str, str]) -> str:
    """Why this call is banned, or an empty string."""
    head, _, rest = _dotted(call.func).partition(".")
    name = f"{aliases.get(head, head)}.{rest}".rstrip(".")
    if name in BANNED_CALLS and not _is_safe_numpy_load(name, call):
        return f"{name} is banned: {BANNED_CALLS[name]}"
    if name == "torch.load" and not _has_keyword(call, "weights_only", value=True):
        return "torch.load without weights_only=True"
    if isinstance(call.func, ast.Attribute) and call.func.attr in BANNED_METHODS:
        return f"{call.func.attr} is banned: it pickles"
    return ""


def _is_safe_numpy_load(name: str, call: ast.Call) -> bool:
    return name == "numpy.load" and _has_keyword(call, "allow_pickle", value=False)


def _has_keyword(call: ast.Call, name: str, *, value: bool) -> bool:
    return any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes, or an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _member(path: str, directory: str) -> str:
    """First component of `path` below `directory`, or an empty string."""
    inside = path.removeprefix(f"{directory}/")
    first = inside.partition("/")[0]
    return "" if inside == path or first == "__init__" else first


if __name__ == "__main__":
    sys.exit(report("imports", find(tree_argument())))
