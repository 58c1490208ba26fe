"""Programs from outside that some tests call."""

from __future__ import annotations

import os
import shutil

import pytest


def required_tool(name: str) -> str:
    """Path of a program; where it is missing the test is skipped, but fails in CI."""
    found = shutil.which(name)
    if found:
        return found
    message = f"{name} is not installed here"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
