"""`make dist`: wheel and sdist in `dist/`, the same bytes for the same tree, under a version that is told everywhere.

1. `ipc/version.py` states the version. CHANGELOG.md and docs/upgrading.md need a section of that name, and a tag `v...`
   on the commit must be that version.
2. hatchling builds both files. Their entries have fixed times, owners and modes.
3. Names, sizes and SHA-256 sums are printed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ipc.version import VERSION
from tools.source_tree import ROOT, Finding, report

PLACE = "dist"
_TOLD_IN = ("CHANGELOG.md", "docs/upgrading.md")


def mistakes(root: Path, version: str, tags: list[str]) -> Iterator[Finding]:
    """Places of the tree at `root` that contradict the version, or do not tell the version."""
    for name in _TOLD_IN:
        path = Path(name)
        if not re.search(
            rf"^## {re.escape(version)}$", (root / path).read_text(encoding="utf-8"), re.MULTILINE
        ):
            yield Finding(path, 1, f"has no section `## {version}`, which ipc/version.py states")
    for tag in tags:
        if tag.startswith("v") and tag != f"v{version}":
            yield Finding(Path("ipc/version.py"), 1, f"states {version}, the tag of this commit is {tag}")


def tags_of(root: Path) -> list[str]:
    """Tags of the commit that is checked out; none in a tree without git."""
    command = ["git", "-C", str(root), "tag", "--points-at", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split()


def build(root: Path, place: Path) -> list[Path]:
    """Wheel and sdist of the tree at `root`, in `place`, without a network. Raises `CalledProcessError`."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    return sorted(place.glob(f"penstock_server-{VERSION}[-.]*"))


def main() -> int:
    """Check the version, build, print the sums; returns the exit code."""
    if found := report("version", mistakes(ROOT, VERSION, tags_of(ROOT))):
        return found
    for path in build(ROOT, ROOT / PLACE):
        data = path.read_bytes()
        print(f"{hashlib.sha256(data).hexdigest()}  {PLACE}/{path.name}  {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
