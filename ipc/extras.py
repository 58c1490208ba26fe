"""How an extra is installed: the one place for these words, in the source tree and where a wheel was installed."""

from __future__ import annotations

from ipc.processes.starting import TOP
from ipc.version import VERSION

_ALONE = {"gliner": "gliner"}
"""Packages that declare older dependencies than they work with, by the extra whose models need them."""


def needed(extra: str) -> str:
    """`the extra vision (pip install ...)`: what somebody runs who reads that it is missing."""
    if (TOP / "pyproject.toml").is_file():
        command = f"pip install -c constraints.txt -e '.[{extra}]' in the source tree"
    else:
        command = f"pip install 'penstock_server-{VERSION}-py3-none-any.whl[{extra}]'"
    more = f", then pip install --no-deps {_ALONE[extra]}" if extra in _ALONE else ""
    return f"the extra {extra} ({command}{more})"
