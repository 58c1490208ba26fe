"""What holds for all processes of a test run.

1. They keep the bytecode of what they import. A hundred servers start in a run; where `PYTHONDONTWRITEBYTECODE` is set,
   as in many containers, every one of them would compile the same modules again, which is a quarter of its start.
2. One torch thread each: several test processes and their servers share the cores, and teams of threads that share a
   core wait for each other.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["OMP_NUM_THREADS"] = "1"
