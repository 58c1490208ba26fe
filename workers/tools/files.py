"""The work directory of a sandbox: files put in, and files that a call left.

Whatever lies there was made by hostile code, and processes of the sandbox may change the tree while the host looks at
it. Every step goes by a descriptor of a directory and follows no link. Only regular files with one link count, and the
host hands out copies, never the files themselves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ipc.processes.paths import remove_tree
from ipc.wire.tools import MAX_FILE_NBYTES, MAX_PRODUCED, NOT_PRODUCED, Produced, Wanted

MAX_DEPTH = 32
"""Levels of folders that a look enters."""
MAX_TOTAL_NBYTES = 512 << 20
"""Bytes of all files that one call produces."""
_FOLDERS = frozenset(
    ("skills", "__pycache__", "node_modules", "target", "tmp", "temp", "cache", "venv", "env")
)
_ENDINGS = frozenset(("pyc", "pyo", "o", "so", "dylib", "dll", "rlib", "rmeta", "d", "class"))
_CLOSED = "has folders that are closed to the host"
_DEEP = f"has more than {MAX_DEPTH} levels of folders"
_MAX_NAME_NBYTES = 255
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_NBYTES = 8 << 20
_BLOCK_NBYTES = 512


class Seen(NamedTuple):
    """A regular file at one look."""

    nbytes: int
    changed_ns: int
    inode: int


class Snapshot(NamedTuple):
    """All files of the tree that may be produced, by path, and the disk space of everything."""

    files: dict[str, Seen]
    used_nbytes: int
    unseen: str
    """Why the look has not seen everything; empty if the look has."""


class Refused(Exception):
    """A path or a file that cannot be what is asked for; the text is a word of `Produced.error`."""


def parts_of(path: str) -> list[str]:
    """The names of a relative path. Raises `Refused` for a path that leaves the directory or is no plain name."""
    parts = path.split("/")
    if len(parts) > MAX_DEPTH or not all(map(_is_plain, parts)):
        raise Refused("refused")
    return parts


def _is_plain(name: str) -> bool:
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return (
        name not in ("", ".", "..") and nbytes <= _MAX_NAME_NBYTES and name.isprintable() and "/" not in name
    )


def excess(seen: Snapshot, most_nbytes: int) -> str:
    """Why a work directory breaks its limits, or cannot be counted; empty if nothing is wrong."""
    if seen.used_nbytes > most_nbytes:
        return f"takes {seen.used_nbytes} bytes, agent.max_workdir_bytes allows {most_nbytes}"
    return seen.unseen


class WorkDir:
    """One work directory. A `shared` one is the operator's and is never removed."""

    def __init__(self, path: Path, shared: bool) -> None:
        """Create the directory, mode 0700. Raises `OSError`."""
        path.mkdir(parents=True, exist_ok=shared, mode=0o700)
        self.path, self.shared = path, shared
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Remove the directory; its processes have ended."""
        os.close(self._fd)
        if not self.shared:
            remove_tree(self.path)

    def empty(self) -> None:
        """Remove all files; processes have ended. A shared directory stays as it is. Raises `OSError`."""
        if not self.shared:
            remove_tree(self.path)
            self.path.mkdir(exist_ok=True, mode=0o700)
            # With `dup2` a directory is open also where this step fails.
            fresh = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.dup2(fresh, self._fd, inheritable=False)
            os.close(fresh)

    def look(self, limit: int) -> Snapshot:
        """A snapshot of at most `limit` entries. A file with several links takes its disk space once."""
        files: dict[str, Seen] = {}
        linked: set[int] = set()
        used = 0
        unseen = ""
        for prefix, name, status in self._walk(limit):
            if isinstance(status, str):
                unseen = unseen or status
                continue
            if status.st_nlink == 1 or status.st_ino not in linked:
                used += status.st_blocks * _BLOCK_NBYTES
            if status.st_nlink > 1:
                linked.add(status.st_ino)
            if prefix is not None and stat.S_ISREG(status.st_mode) and _is_offered(name):
                files[f"{prefix}{name}"] = Seen(status.st_size, status.st_mtime_ns, status.st_ino)
        return Snapshot(files, used, unseen)

    def _walk(self, limit: int) -> Iterator[tuple[str | None, str, os.stat_result | str]]:
        """(path of the directory, name, status) of each entry; None as the path below folders that are left out.

        For a folder that is not entered, and once beyond `limit`, the status is a text that says why. Only the folders
        from the top to the current one are open, however many there are.
        """
        most, stack = limit, list[_Folder]()
        try:
            try:
                stack.append(_opened(".", self._fd, ""))
            except OSError:
                yield None, "", _CLOSED
            while stack:
                fd, entries, prefix = stack[-1]
                entry = next(entries, None)
                if entry is None:
                    _close(stack.pop())
                    continue
                limit -= 1
                if limit < 0:
                    yield None, "", f"has more than {most} files and folders (agent.max_workdir_files)"
                    return
                try:
                    status = entry.stat(follow_symlinks=False)
                    yield prefix, entry.name, status
                    if stat.S_ISDIR(status.st_mode):
                        if len(stack) > MAX_DEPTH:
                            yield None, entry.name, _DEEP
                            continue
                        stack.append(_opened(entry.name, fd, _below(prefix, entry.name)))
                except FileNotFoundError:
                    continue
                except OSError:
                    yield None, entry.name, _CLOSED
        finally:
            for folder in stack:
                _close(folder)

    def put(self, source: int, path: str) -> None:
        """Copy the regular file behind `source` to `path`, in place of what is there. Raises `OSError`, `Refused`."""
        *folders, name = parts_of(path)
        if not stat.S_ISREG(os.fstat(source).st_mode):
            raise Refused("refused")
        with self._folder(folders, create=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                _copy(source, target, os.fstat(source).st_size)
            finally:
                os.close(target)

    @contextlib.contextmanager
    def _folder(self, names: Sequence[str], create: bool = False) -> Iterator[int]:
        fd = os.dup(self._fd)
        try:
            for name in names:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                inner = os.open(name, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def produce(self, paths: Iterable[str]) -> tuple[list[Produced], list[int], int]:
        """Copies of files: what each is, the descriptors of those without error, and how many more were left out."""
        produced: list[Produced] = []
        fds: list[int] = []
        left = total = 0
        for path in paths:
            if len(produced) >= MAX_PRODUCED:
                left += 1
                continue
            try:
                fd, nbytes = self._copy_of(path, MAX_TOTAL_NBYTES - total)
            except Refused as error:
                produced.append(Produced(path, 0, str(error)))
            else:
                fds.append(fd)
                total += nbytes
                produced.append(Produced(path, nbytes))
        return produced, fds, left

    def _copy_of(self, path: str, room: int) -> tuple[int, int]:
        """A descriptor of a copy without a name, and its size. Raises `Refused`."""
        try:
            *folders, name = parts_of(path)
            with self._folder(folders) as folder:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                source = os.open(name, flags, dir_fd=folder)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            raise Refused(NOT_PRODUCED if missing else "refused") from error
        copy = -1
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise Refused("refused")
            if status.st_size > min(room, MAX_FILE_NBYTES):
                raise Refused("too_large")
            # Beside the file: the folder above a shared work directory need not be writable.
            copy = os.open(".", os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            nbytes = _copy(source, copy, status.st_size)
            os.lseek(copy, 0, os.SEEK_SET)
        except BaseException as error:
            if copy >= 0:
                os.close(copy)
            if isinstance(error, OSError):
                raise Refused("unreadable") from error
            raise
        finally:
            os.close(source)
        return copy, nbytes


class _Folder(NamedTuple):
    """A folder on the way of a look; `prefix` is its path with a slash, None for what is never produced."""

    fd: int
    entries: os._ScandirIterator[str]
    prefix: str | None


def _opened(name: str, above: int, prefix: str | None) -> _Folder:
    """Open a folder of the folder `above`. Raises `OSError`."""
    fd = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        return _Folder(fd, os.scandir(fd), prefix)
    except BaseException:
        os.close(fd)
        raise


def _close(folder: _Folder) -> None:
    folder.entries.close()
    os.close(folder.fd)


def _below(prefix: str | None, name: str) -> str | None:
    if prefix is None or name.startswith(".") or name in _FOLDERS or not _is_plain(name):
        return None
    return f"{prefix}{name}/"


def _is_offered(name: str) -> bool:
    return not name.startswith(".") and name.rpartition(".")[2] not in _ENDINGS and _is_plain(name)


def _copy(source: int, target: int, nbytes: int) -> int:
    """Copy at most `nbytes` from the beginning of `source`; how many there were."""
    done = 0
    while done < nbytes:
        data = os.pread(source, min(_COPY_NBYTES, nbytes - done), done)
        if not data:
            break
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        done += len(data)
    return done


def changed(before: Snapshot, after: Snapshot, wanted: Sequence[Wanted]) -> list[str]:
    """Paths of files that are new or different, the wanted ones first, also those that are missing."""
    names = dict.fromkeys(each.name.removeprefix("./") for each in wanted)
    fresh = (path for path, seen in sorted(after.files.items()) if before.files.get(path) != seen)
    return list(names | dict.fromkeys(fresh))
