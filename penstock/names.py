"""The names of models that a shell completes, found without reading the entries of the catalog.

A shell waits for this module at each press of the key, so nothing here imports the models' packages.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ipc import settings
from ipc.catalog.reading import ID_LINE, files_below
from ipc.errors import ConfigError
from ipc.processes.paths import asset


def model_names() -> list[str]:
    """Ids of the catalog and names of the settings file, sorted; of the default settings where these are wrong."""
    config = settings.Settings()
    with contextlib.suppress(ConfigError):
        config = settings.load(None, {})
    names = {name.rpartition("=")[2] for name in config.catalog.models}
    for root in [Path(each) for each in config.catalog.dirs] or [asset("config/models")]:
        for path in files_below(root):
            with contextlib.suppress(OSError):
                names |= {found.decode(errors="replace") for found in ID_LINE.findall(path.read_bytes())}
    return sorted(name for name in names if re.fullmatch(r"[\w./:@+-]+", name))


def main() -> int:
    """Print the names."""
    print("\n".join(model_names()))
    return 0
