"""Writes the modules of `ipc/protos/` from the .proto files beside them: `python -m tools.protos` (`make protos`).

One `_pb2.py` for Python and one `_pb2.pyi` for mypy per file. The services of a file need no module of their own:
`frontend/grpc/server.py` reads them from the descriptors.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTOS = Path("ipc/protos")


def sources() -> list[str]:
    """The .proto files, relative to the root: the names under which they are registered and imported."""
    return sorted(str(PROTOS / path.name) for path in (ROOT / PROTOS).glob("*.proto"))


def generate(into: Path) -> None:
    """Write the modules under `into`. Raises `RuntimeError` when the compiler refuses a file."""
    from grpc_tools import protoc

    known = str(resources.files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{ROOT}", f"-I{known}", f"--python_out={into}", f"--pyi_out={into}", *sources()]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; what it says is above")


def main() -> int:
    """Write them in place."""
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
