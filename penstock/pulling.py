"""`penstock models pull`: bring a model's files from the hub onto this machine."""

from __future__ import annotations

import sys

from ipc.catalog.entries import HubSource, ModelEntry
from penstock.presence import directory_of, located, nbytes
from workers.loading import failure


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
