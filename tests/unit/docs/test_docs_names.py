"""What the documents name is there: files, pages, settings, metrics, make targets, classes and their methods."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from ipc import settings
from ipc.metrics import cluster as cluster_families
from ipc.metrics import families as metric_families
from tools.settings_reference import CELL_WORDS
from tools.source_tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
SOURCES = (
    "frontend",
    "ipc",
    "workers",
    "penstock",
    "penstock_server",
    "tools",
    "tests",
    "benchmarks",
    "config",
    "deploy",
    "docs",
)
SECTIONS = {
    section.name: {field.name for field in msgspec.structs.fields(section.type)}
    for section in msgspec.structs.fields(settings.Settings)
}
_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w/.{<-])[\w.-]+(?:/[\w.-]+)*\.(?:py|md|ya?ml|conf|cfg|js|css|html)\b(?![.\w/])")
_SETTING = re.compile(rf"(?<![\w/.-])({'|'.join(SECTIONS)})\.([a-z]\w*)\b(?!\.?\()")
_METRIC = re.compile(r"\b(?:penstock|sie)_[a-z_]*[a-z]\b(?!_?\*)")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TARGET = re.compile(r"^make ([a-z-]+)")
_MEMBER = re.compile(r"(?<![\w/.@-])([A-Za-z]\w*)\.([a-z_]\w*)\b")
_FOREIGN_FILES = {"adapter.py", "keys.yaml", "adapter_config.json", "config.yaml"}
"""Files of an operator, of a model, or of another server."""
_FOREIGN_METRICS = {"sie_adaptive_headroom_ms", "sie_id", "sie_server", "sie_layout", "penstock_server"}
"""Metrics of the contract that a page names to say that they are not there, and names that only look like metrics."""
_FOREIGN_CLASSES = {"CrossEncoder"}
"""Classes of libraries."""
_FIELDS = {"options", "model", "response"}
"""Modules whose name, in a page, is that of a field of requests, or the beginning of the name of a file or event."""
_SUFFIXES = {"counter": ("_total", ""), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}


def codes(page: Path) -> list[str]:
    """What stands in backticks on one line, without the fenced blocks."""
    return _CODE.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))


@cache
def files() -> list[str]:
    """All paths of the tree, relative to it, with a slash in front."""
    trees = [file for place in SOURCES for file in (ROOT / place).rglob("*.*") if file.is_file()]
    return [f"/{file.relative_to(ROOT)}" for file in (*trees, *ROOT.glob("*.*"))]


@cache
def members() -> tuple[set[str], set[str]]:
    """(classes, and every class, function and attribute that some file but a test defines or sets)."""
    classes, found = set(), set()
    for path in files():
        if not path.endswith(".py") or "/test_" in path:
            continue
        for node in ast.walk(ast.parse((ROOT / path[1:]).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
                found.add(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return classes, found


@cache
def _headings(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and the site make them."""
    titles = _HEADING.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_files_that_a_page_names_exist(page: Path) -> None:
    paths = {
        path for code in codes(page) if code[0] != "/" and "://" not in code for path in _PATH.findall(code)
    }
    missing = {
        path for path in paths - _FOREIGN_FILES if not any(file.endswith(f"/{path}") for file in files())
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_anchors_of_links_are_headings(page: Path) -> None:
    links = _ANCHOR.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))
    missing = [
        f"{path}#{anchor}"
        for path, anchor in links
        if anchor not in _headings(page.parent / path if path else page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_cells_of_tables_are_short(page: Path) -> None:
    rows = re.findall(r"^\|.*$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    long = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if len(cell.split()) > CELL_WORDS]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    flags = re.findall(r"--set (\S+?)=", page.read_text(encoding="utf-8"))
    named = {pair for text in (*codes(page), *flags) for pair in _SETTING.findall(text)}
    modules = {"py", "md", "yaml"}
    assert {f"{a}.{b}" for a, b in named if b not in SECTIONS[a] | modules} == set()


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    tables = (
        metric_families.FRONTEND,
        metric_families.RUNS,
        metric_families.WORKER,
        metric_families.SUPERVISOR,
        metric_families.TOOLS,
        cluster_families.GATEWAY,
        cluster_families.POOLS,
        cluster_families.BRIDGE,
    )
    families = [family for table in tables for family in table]
    known = {f"{one.name}{suffix}" for one in families for suffix in _SUFFIXES[one.kind]}
    named = {name for code in codes(page) for name in _METRIC.findall(code)}
    assert named - known - _FOREIGN_METRICS == set()


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for code in codes(page) for target in _TARGET.findall(code)}
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_methods_and_functions_that_a_page_names_exist(page: Path) -> None:
    classes, found = members()
    modules = {Path(path).stem for path in files() if path.endswith(".py")} - set(SECTIONS) - _FIELDS
    pairs = {
        pair
        for code in codes(page)
        for pair in _MEMBER.findall(code)
        if not _PATH.search(code.split(":")[-1])
    }
    assert {f"{a}.{b}" for a, b in pairs if (a in classes or a in modules) and b not in found} == set()
    assert {a for a, _ in pairs if a[0].isupper()} - classes - _FOREIGN_CLASSES == set()
