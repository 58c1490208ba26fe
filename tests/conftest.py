"""Lets all processes of a test run keep the bytecode of what they import.

A hundred servers start in a run. Where `PYTHONDONTWRITEBYTECODE` is set, as in many containers, every one of them would
compile the same modules again, which is a quarter of its start.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
