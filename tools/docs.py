"""Write the pages of docs/ that are made from code and configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tools import error_reference, model_reference, settings_reference
from tools.source_tree import ROOT

PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "errors.md": error_reference.render,
    ROOT / "docs" / "models.md": model_reference.render,
    ROOT / "docs" / "settings.md": settings_reference.render,
}


def write() -> int:
    """Write every page; returns the exit code."""
    for path, render in PAGES.items():
        path.write_text(render(), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(write())
