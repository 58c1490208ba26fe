"""Where the files of a LoRA adapter lie: named by the model's catalog entry, or below a directory of the operator.

A name that a request brings is only ever looked up. It is a key of the entry's `loras`, or one or two plain path parts
below a directory of `catalog.lora_dirs`; whatever leads out of that directory, also by a link, does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ipc.catalog.entries import DirectorySource, HubSource, LoraSource, ModelEntry, is_lora_name
from workers.adapters.shared.peft_layout import CONFIG, FILES
from workers.loading.source import SourceError, snapshot

Files = tuple[tuple[int, int] | None, ...]
"""Size and time of each file, None where there is none; empty for a repository."""


def find(entry: ModelEntry, dirs: Iterable[str], name: str) -> LoraSource | None:
    """Where the adapter of that name is, or None when there is none."""
    if name in entry.loras:
        return entry.loras[name]
    if not is_lora_name(name):
        return None
    found = (_below(Path(root), name) for root in dirs)
    return next((DirectorySource(str(path)) for path in found if path is not None), None)


def _below(root: Path, name: str) -> Path | None:
    """The directory `name` below `root`, if it holds an adapter and neither it nor its files lie elsewhere."""
    try:
        root = root.resolve(strict=True)
        directory = (root / name).resolve(strict=True)
        files = [(directory / file).resolve() for file in FILES]
    except (OSError, RuntimeError):
        return None
    inside = all(path.is_relative_to(root) for path in (directory, *files))
    return directory if inside and directory != root and files[0].is_file() else None


def state_of(source: LoraSource) -> Files:
    """What the files look like now, to see whether they changed."""
    if isinstance(source, HubSource):
        return ()
    return tuple(_stat(Path(source.path) / file) for file in FILES)


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def fetch(source: LoraSource) -> Path:
    """Local directory of the adapter; a repository is downloaded into the hub cache unless it is there.

    Raises SourceError for a missing file, and DownloadFailed.
    """
    if isinstance(source, DirectorySource):
        directory = Path(source.path)
    else:
        directory = snapshot(source.repo, source.revision, allow_patterns=list(FILES))
    missing = [file for file in FILES if not (directory / file).is_file()]
    if missing:
        kept = CONFIG not in missing and any(directory.glob("adapter_model.*"))
        more = "; weights in another format are not loaded" if kept else ""
        raise SourceError(f"the LoRA adapter has no {missing[0]}{more}")
    return directory
