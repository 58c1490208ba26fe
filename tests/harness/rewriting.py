"""Rewrites the assertions of test modules once, for all test processes of a run.

pytest rewrites a module's assertions when a process imports the module, and keeps the bytecode beside the source. In a
new clone all processes of pytest-xdist import the same modules at the same time, so that each of them rewrote every
module: 14 processor seconds in each. The process that starts them does so before, while nurseries import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.pathlib import fnmatch_ex


def rewrite_all(config: pytest.Config) -> int:
    """Keep the bytecode of all modules of tests that the arguments name; how many had none, or an old one.

    Nothing is kept where pytest keeps nothing. Modules that cannot be read are left to the process that imports them.
    """
    # NOTE: pytest 9.2 has no public way to do what its import hook does.
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or sys.dont_write_bytecode:
        return 0
    rewritten = 0
    for module in _modules(config):
        place = rewrite.get_cache_dir(module)
        kept = place / (module.name.removesuffix(".py") + rewrite.PYC_TAIL)
        if rewrite._read_pyc(module, kept) is None and rewrite.try_makedirs(place):
            try:
                source_hash, code = rewrite._rewrite_test(module, config)
            except (OSError, SyntaxError, ValueError):
                continue
            rewritten += rewrite._write_pyc(state, code, source_hash, kept)
    return rewritten


def _modules(config: pytest.Config) -> Iterator[Path]:
    """Modules of tests below the arguments, and the files of fixtures beside them, in folders that pytest enters."""
    patterns = (*config.getini("python_files"), "conftest.py")
    ignored = config.getini("norecursedirs")
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        if path.is_file():
            yield path
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(
                name for name in inner if not any(fnmatch_ex(each, Path(folder, name)) for each in ignored)
            )
            for name in sorted(names):
                if any(fnmatch(name, pattern) for pattern in patterns):
                    yield Path(folder, name)
