"""`python -m workers --slot N`: one worker process."""

from __future__ import annotations

import os

from workers.main import main

if __name__ == "__main__":
    # NOTE: not sys.exit: native threads of the device runtime must not be torn down in an arbitrary order.
    os._exit(main())
