"""The one package that a wheel of Penstock installs, and its command. docs/adr/0026 says why.

In an installation `frontend`, `ipc`, `penstock` and `workers` lie in here, out of the way of other people's modules of
these names; importing this package lets Python find them. In the source tree they lie beside this folder.
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
    from penstock.cli import main as run

    return run()
