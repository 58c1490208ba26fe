"""What holds for all processes of a test run.

1. They keep the bytecode of what they import. A hundred servers start in a run; where `PYTHONDONTWRITEBYTECODE` is set,
   as in many containers, every one of them would compile the same modules again, which is a quarter of its start.
2. One torch thread each: several test processes and their servers share the cores, and teams of threads that share a
   core wait for each other.
3. Hypothesis draws the same examples in every run and does not look at the clock, so that neither luck nor a busy
   machine decides. The tests marked `fuzz` choose for themselves.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
