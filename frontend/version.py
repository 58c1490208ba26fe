"""The version of this installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("penstock")
except PackageNotFoundError:
    VERSION = "0+source"
