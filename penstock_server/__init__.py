"""The one package that a wheel installs, with `frontend`, `ipc`, `penstock` and `workers` inside (docs/adr/0026).

The command of the installation imports this package, which lets Python find the four packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if (_HERE / "ipc").is_dir() and str(_HERE) not in sys.path:
    sys.path.insert(0, str(_HERE))


def main() -> int:
    """The command `penstock`."""
    # Imported here: the place of the module is known only now.
    from penstock.__main__ import main as run

    return run()
