"""What some tests need from outside: where it is missing they are skipped, and say why, but in CI they fail."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lacking(message: str) -> NoReturn:
    """End a test that cannot be run here."""
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def required_tool(name: str) -> str:
    """Path of a program."""
    return shutil.which(name) or lacking(f"{name} is not installed here")


def named_python(variable: str, package: str) -> str:
    """The interpreter that an environment variable names, which has a package that is none of ours.

    `.ci/run` names the interpreters that can be had on its machine; without a name the test is skipped, in CI too.
    """
    return os.environ.get(variable) or pytest.skip(f"{variable} names no Python with the package {package}")
