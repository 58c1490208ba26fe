"""Notices that the files of the catalog changed: one look a second, and a change counts once it has settled.

1. A look is the set of all `*.yaml` files below the catalog's directories, of the Python files (adapters) among them,
   and of all files and directories of the model repositories, with their size and time, and of what loads by name
   brought (`ipc.store.wishes`), which settles at once.
2. A look that differs from the one before only starts the waiting; an editor may still be writing.
3. Two equal looks that differ from the last reading mean that the catalog is to be read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ipc.catalog.entries import Files, files_below
from ipc.processes.paths import asset
from ipc.store.wishes import Wishes
from workers.repository import layout

EVERY_S = 1.0
_BROUGHT = "brought "


def look(dirs: Iterable[str], repositories: Iterable[str] = (), wishes: Wishes | None = None) -> Files:
    """(path, size, time in nanoseconds, inode) of every file that decides on models; a vanishing file is left out.

    Directories of repositories are there too, with zeros. What a load brought is a path that no file has.
    """
    roots = [Path(d) for d in dirs] or [asset("config/models")]
    paths = (path for root in roots for path in files_below(root, (".yaml", ".py")))
    catalog = frozenset(found for path in paths if (found := _facts(path)))
    brought = wishes.brought() if wishes is not None else {}
    wished = ((f"{_BROUGHT}{model} {wish.digest}", 0, 0, 0) for model, wish in brought.items())
    return catalog.union(wished, *(layout.look(Path(root)) for root in repositories))


def _facts(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_size, found.st_mtime_ns, found.st_ino


class CatalogWatch:
    """Looks at the files of one catalog; `read` is what they were when the catalog was read."""

    def __init__(
        self,
        dirs: Iterable[str],
        read: Files | None = None,
        repositories: Iterable[str] = (),
        wishes: Wishes | None = None,
    ) -> None:
        self._places = tuple(dirs), tuple(repositories), wishes
        self._read = self._last = look(*self._places) if read is None else read

    def changed(self) -> bool:
        """Whether the files differ from those read last and have settled; says so once for each change."""
        now = look(*self._places)
        # A wish is put in force in one step, so a difference by wishes alone has settled.
        before, self._last = self._last, now
        settled = all(path.startswith(_BROUGHT) for path, *_ in now ^ before)
        if not settled or now == self._read:
            return False
        self._read = now
        return True

    def differs(self) -> bool:
        """Whether the files differ from those read last, settled or not."""
        return look(*self._places) != self._read

    def was_read(self, files: Files) -> None:
        """The catalog has been read since, from these files, which may have been others than at the last look.

        Without this, a change that was read between two looks and taken back before the second would not be noticed.
        """
        self._read = files
