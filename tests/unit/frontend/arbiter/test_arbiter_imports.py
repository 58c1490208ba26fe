"""The arbiter stays small: it reads settings and keys, and imports no protocol."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import frontend.arbiter.configuration, frontend.arbiter.hooks
print([name for name in sys.modules if name.startswith("frontend.protocols")])
"""


def test_the_arbiter_imports_no_protocol() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
