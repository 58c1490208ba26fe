"""Optional packages: import a package, or say which extra brings the package and how to install the extra."""

from __future__ import annotations

import importlib
from typing import Any

from ipc.processes.starting import TOP
from ipc.version import VERSION

_ALONE = {"gliner": "gliner"}
"""Packages that declare older dependencies than they work with, by the extra whose models need them."""


def needed(extra: str) -> str:
    """`the extra vision (pip install ...)`: the command that installs a missing extra."""
    if (TOP / "pyproject.toml").is_file():
        command = f"pip install -c constraints.txt -e '.[{extra}]' in the source tree"
    else:
        command = f"pip install 'penstock_server-{VERSION}-py3-none-any.whl[{extra}]'"
    more = f", then pip install --no-deps {_ALONE[extra]}" if extra in _ALONE else ""
    return f"the extra {extra} ({command}{more})"


def require(module: str, extra: str, package: str = "") -> Any:
    """Import `module` of `package` (by default the module's first name).

    Raises ImportError that names the package and its extra when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise ImportError(f"this model needs the package {name}: {needed(extra)}") from error
