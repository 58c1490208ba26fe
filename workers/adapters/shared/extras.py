"""Packages that only some families need: named by the extra that brings them when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from ipc import extras


def require(module: str, extra: str, package: str = "") -> Any:
    """Import `module` of `package` (by default the module's first name).

    Raises ImportError that names the package and its extra when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise ImportError(f"this model needs the package {name}: {extras.needed(extra)}") from error
