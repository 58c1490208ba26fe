"""Where the files of a model are on this machine, and `penstock models pull`, which brings them here."""

from __future__ import annotations

import sys
from pathlib import Path

from ipc.catalog.entries import AdapterSource, DirectorySource, HubSource, ModelEntry
from workers.loading import failure, source


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


class ProgressLine:
    """Shows how far a download has come: one line that moves on a terminal, else a line every tenth."""

    def __init__(self, name: str) -> None:
        self._name, self._shown = name, -1

    def __call__(self, phase: str, fraction: float) -> None:
        """`fraction` (0 to 1) of `phase` is done."""
        tenths = int(fraction * 10)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self._name}: {phase} {fraction:4.0%}" + ("\n" if fraction >= 1 else ""))
            sys.stderr.flush()
        elif tenths != self._shown:
            print(f"{self._name}: {phase} {tenths * 10} %", file=sys.stderr)
        self._shown = tenths


def pull(entry: ModelEntry) -> int:
    """Fetch the files that the loaders read; 0 when the whole model is here afterwards, else 1."""
    if not (entry.error or isinstance(entry.source, HubSource)):
        return _not_from_the_hub(entry)
    try:
        directory = located(entry, ProgressLine(entry.id))
    except Exception as error:
        found = failure.classify(error)
        print(f"penstock: {entry.id}: {found.error_class}: {found.message}", file=sys.stderr)
        return 1
    print(f"{entry.id}: {nbytes(directory) / 1e6:.0f} MB in {directory}")
    return 0


def _not_from_the_hub(entry: ModelEntry) -> int:
    directory = directory_of(entry)
    if directory is None:
        print(f"penstock: {entry.id}: not from the hub, and its files are not here", file=sys.stderr)
        return 1
    print(f"{entry.id}: not from the hub, {nbytes(directory) / 1e6:.0f} MB in {directory}")
    return 0
