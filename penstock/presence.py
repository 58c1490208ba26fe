"""Where the files of a model are on this machine."""

from __future__ import annotations

from pathlib import Path

from ipc.catalog.entries import AdapterSource, DirectorySource, HubSource, ModelEntry
from workers.loading import source


def located(entry: ModelEntry, progress: source.Progress, *, cached_only: bool = False) -> Path:
    """The directory that holds the whole model, downloaded first if need be and not `cached_only`.

    Raises `SourceError` for a model that is absent, damaged, or wrong in its catalog file, and `DownloadFailed`.
    """
    where = entry.source
    if entry.error:
        raise source.SourceError(entry.error, "UNKNOWN")
    if isinstance(where, AdapterSource):
        return Path(where.path)
    if isinstance(where, DirectorySource):
        return source.from_directory(where.path)
    if not isinstance(where, HubSource):
        return source.from_package(where.package, where.path)
    return source.from_hub(
        where.repo,
        where.revision,
        progress,
        extra_files=where.files,
        tokenizer_repo=where.tokenizer_repo,
        cached_only=cached_only,
    )


def directory_of(entry: ModelEntry) -> Path | None:
    """The directory that holds the whole model, or None; leaves the network alone."""
    try:
        return located(entry, ignore_progress, cached_only=True)
    except (source.SourceError, source.DownloadFailed):
        return None


def ignore_progress(phase: str, fraction: float) -> None:
    """Nobody watches how far a load has come."""


def nbytes(directory: Path) -> int:
    """Size of all files below `directory`."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
