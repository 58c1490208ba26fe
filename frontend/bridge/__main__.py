"""`python -m frontend.bridge`: the bridge of a box."""

from __future__ import annotations

import sys

from frontend.bridge.main import main

if __name__ == "__main__":
    sys.exit(main())
