"""The inputs that are kept in git: `corpus/<target>/`, valid ones under a name, findings as `found-<digest>`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Part = TypeVar("Part")
ROOT = Path(__file__).with_name("corpus")


def files(target: str, root: Path = ROOT) -> list[Path]:
    """The inputs of a target, sorted by name."""
    return sorted(path for path in (root / target).glob("*") if path.is_file())


def inputs(target: str, root: Path = ROOT) -> list[bytes]:
    """Their contents; one empty input where there is none."""
    return [path.read_bytes() for path in files(target, root)] or [b""]


def keep(target: str, data: bytes, root: Path = ROOT) -> Path:
    """Write a finding; returns its file."""
    path = root / target / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def reduced(parts: list[Part], fails: Callable[[list[Part]], bool], tries: int = 200) -> list[Part]:
    """The fewest parts found in so many tries that still fail: ever smaller runs of them are left out."""
    size = len(parts) // 2
    while size:
        at = 0
        while at < len(parts) and tries > 0:
            less = parts[:at] + parts[at + size :]
            tries -= 1
            if less and fails(less):
                parts = less
            else:
                at += size
        size //= 2
    return parts
