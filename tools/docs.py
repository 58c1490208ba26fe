"""Write the pages of docs/ that are made from code and configuration, and lay out the pages of the site.

1. The pages of `PAGES` are rendered into docs/.
2. `build/pages` gets links to the files of `SITE`, each at the place that the file has in the tree. mkdocs reads the
   pages there.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tools import card_reference, error_reference, model_reference, settings_reference
from tools.source_tree import ROOT

PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "cards.md": card_reference.render,
    ROOT / "docs" / "errors.md": error_reference.render,
    ROOT / "docs" / "models.md": model_reference.render,
    ROOT / "docs" / "settings.md": settings_reference.render,
}
SITE = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
    "config/server.yaml",
    "docs",
    "tests/fuzz/README.md",
)
"""Files and directories that the site shows or links to."""


def write() -> int:
    """Write every page; returns the exit code."""
    for path, render in PAGES.items():
        path.write_text(render(), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def lay_out(place: Path) -> None:
    """Make `place` anew, with links to the files of the site."""
    shutil.rmtree(place, ignore_errors=True)
    for name in SITE:
        link = place / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / name)


if __name__ == "__main__":
    lay_out(ROOT / "build" / "pages")
    sys.exit(write())
