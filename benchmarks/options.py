"""The command line that all benchmarks share."""

from __future__ import annotations

import argparse
import os


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--full`; quick mode is the default."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--full", action="store_true", help="more rounds and more data; quick mode is the default"
    )
    return result


def add_threads(result: argparse.ArgumentParser) -> None:
    """Add `--threads`, the torch threads of every engine and server; all cores by default."""
    result.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads of every contestant"
    )


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [name for name in text.split(",") if name]
