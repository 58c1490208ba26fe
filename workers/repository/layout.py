"""Directories and files of a repository, and how they may be named.

1. Every directory in a repository that is not hidden is a model; every directory in it with a number for a name is a
   version, the number written without leading zeros.
2. A name from a configuration leads to a file below the model's directory, or nowhere.
3. A symbolic link may lead anywhere inside the repository; out of it only with `repository.follow_links`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ipc.catalog.repository import MOST_LEVELS

PROGRAMS = {
    "torch_export": "model.pt2",
    "torchscript": "model.pt",
    "onnx": "model.onnx",
    "python_model": "model.py",
}
"""Backends, which are families of adapters too, and the name of the file of their programs."""
Facts = tuple[str, int, int, int]
_DIRECTORY = (0, 0, 0)
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")


class ModelRefused(Exception):
    """A model of a repository that cannot be served. The message names file and field, and no directory."""


def versions(directory: Path) -> tuple[int, ...]:
    """Versions of a model, ascending. Raises `OSError`."""
    with os.scandir(directory) as entries:
        names = [each.name for each in entries if _VERSION.fullmatch(each.name) and each.is_dir()]
    return tuple(sorted(map(int, names)))


def inside(root: Path, path: Path, follow_links: bool) -> Path:
    """`path`, once it is clear that no link leads out of the repository `root`. Raises `ModelRefused`."""
    try:
        real, home = os.path.realpath(path, strict=True), os.path.realpath(root, strict=True)
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be opened") from error
    if not (real == home or real.startswith(f"{home.rstrip('/')}/") or follow_links):
        raise ModelRefused(f"{path.name} is a link out of the repository (repository.follow_links is off)")
    return path


def named_file(directory: Path, name: str, field: str) -> Path:
    """The file that a configuration names, below `directory`. Raises `ModelRefused`."""
    parts = Path(name).parts
    if not parts or "\0" in name or Path(name).is_absolute() or ".." in parts:
        raise ModelRefused(f"{field}: {name[:200]!a} is no path below the model's directory")
    path = directory / name
    if not path.is_file():
        raise ModelRefused(f"{field}: there is no file {name[:200]!a}")
    return path


def program_file(place: Path, backend: str, named: str) -> tuple[str, str]:
    """(backend, file name) of the program in the directory of a version; "" stands for a name that is not configured.

    Raises `ModelRefused`.
    """
    where = f"version {place.name}"
    if named:
        if Path(named).name != named or named in (".", ".."):
            raise ModelRefused(f"default_model_filename: {named[:200]!a} is no file name")
        endings = {Path(file).suffix: known for known, file in PROGRAMS.items()}
        backend = backend or endings.get(Path(named).suffix, "")
        if not backend:
            raise ModelRefused(
                f"default_model_filename: {named[:200]!a} does not tell the platform; state it"
            )
        candidates = {backend: named}
    else:
        candidates = {backend: PROGRAMS[backend]} if backend else PROGRAMS
    programs = [(known, file) for known, file in candidates.items() if (place / file).is_file()]
    if not programs:
        raise ModelRefused(f"{where} has no program; looked for {', '.join(candidates.values())}")
    if len(programs) > 1:
        raise ModelRefused(
            f"{where} has {' and '.join(file for _, file in programs)}; state platform or backend"
        )
    return programs[0]


def stamp(directory: Path, version: int) -> str:
    """Stands for the files of a version and for the files of the model beside all versions; changes with any file."""
    own, start = str(version), len(str(directory)) + 1
    facts = [
        (path[start:], *state)
        for path, *state in _walk(str(directory), MOST_LEVELS - 1, only=own)
        if tuple(state) != _DIRECTORY
    ]
    return hashlib.blake2b(repr(sorted(facts)).encode(), digest_size=16).hexdigest()


def look(root: Path) -> Iterator[Facts]:
    """Every file of a repository that counts as part of a model, and every directory; see `CatalogWatch`."""
    return _walk(str(root), MOST_LEVELS)


def _walk(root: str, levels: int, only: str = "") -> Iterator[Facts]:
    """(path, size, time in nanoseconds, inode) of all files down to so many levels; zeros for directories.

    Hidden files and vanishing files are left out, and with `only` all other versions of a model.
    """
    places = [(root, levels)]
    while places:
        place, left = places.pop()
        yield place, *_DIRECTORY
        try:
            with os.scandir(place) as entries:
                for each in entries:
                    if each.name[0] == "." or each.name == "__pycache__":
                        continue
                    if not each.is_dir():
                        yield each.path, *_state(each)
                    elif left and not (only and place == root and _is_other(each.name, only)):
                        places.append((each.path, left - 1))
        except OSError:
            continue


def _is_other(name: str, version: str) -> bool:
    return name != version and _VERSION.fullmatch(name) is not None


def _state(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return _DIRECTORY
    return status.st_size, status.st_mtime_ns, status.st_ino
