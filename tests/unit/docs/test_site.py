"""The site that `make docs` builds: every page stands in one group, and the pages that the site shows are laid out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import yaml

from tools.docs import SITE, lay_out
from tools.source_tree import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PLACES = Counter(page for group in CONFIG["nav"] for pages in group.values() for page in pages)


def test_every_page_stands_in_exactly_one_group() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    names = {str(page.relative_to(ROOT)) for page in pages}
    assert {name: PLACES[name] for name in names if PLACES[name] != 1} == {}
    assert {name: count for name, count in PLACES.items() if count != 1} == {}


def test_every_page_of_a_group_is_laid_out(tmp_path: Path) -> None:
    lay_out(tmp_path)
    lay_out(tmp_path)
    assert [name for name in PLACES if not (tmp_path / name).is_file()] == []
    assert [name for name in SITE if not (tmp_path / name).exists()] == []
