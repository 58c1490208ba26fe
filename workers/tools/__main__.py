"""`python -m workers.tools`: the tool host."""

from __future__ import annotations

import sys

from workers.tools.server import main

if __name__ == "__main__":
    sys.exit(main())
