"""Files of models are read into memory, never mapped: after a load nothing that happens to a file changes an answer.

Pages of a mapped file follow the file. A file overwritten in place changes the weights of a running model, and a file
cut short ends the process with SIGBUS, also while a library copies from the mapping.

1. safetensors maps a file unless told to read, and torch does so where its caller wants; libraries (transformers,
   GLiNER and others) offer no setting for either. So `safe_open` and `torch.load` are replaced in this process, for all
   libraries and for adapters of operators, as soon as this module is imported. Tensors are read one by one.
2. `mapped_files` finds the files that a library maps all the same.
3. A load reads many files. `unchanged` makes sure that all are of one version: a difference between the files before
   and after the load is an error (`FilesChanged`), and the load is tried again.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import safetensors.torch  # binds `safetensors.safe_open` too
import torch

from workers.loading.gguf_file import parts_of

_open, _load = safetensors.safe_open, torch.load
_MAPS = Path("/proc/self/maps")
_PATH_COLUMN = 5

Facts = tuple[str, int, int, int, int]
"""Path, bytes, times of the last change of the content and of any change in nanoseconds, inode."""


class FilesChanged(Exception):
    """Files of a model were written while a load read them; `workers.loading.failure` has the load tried again."""


def safe_open(
    filename: str | os.PathLike[str], framework: str, device: Any = "cpu", *, backend: str = ""
) -> Any:
    """As `safetensors.safe_open`; the file is read, whatever the `backend` of the caller."""
    return _File(_open(filename, framework, device, backend="pread"))


class _File:
    """An open safetensors file, whose whole slices are read as tensors.

    PERF: a slice of the library reads into memory of its own and copies from there, a tensor of the library does not.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> _Slice:
        """A tensor that is read when indexed."""
        return _Slice(self._file, name)


class _Slice:
    """One tensor of an open file."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name, self._slice = file, name, file.get_slice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(self._name) if index is ... else self._slice[index]
        return tensor


def load_file(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    with safe_open(path, "pt") as file:
        tensors: dict[str, torch.Tensor] = file.get_tensors()
    return tensors


@functools.wraps(_load)
def torch_load(*arguments: Any, **named: Any) -> Any:
    """As `torch.load`; the file is read, whatever the caller says with `mmap`."""
    return _load(*arguments, **{**named, "mmap": False})


def _replace() -> None:
    """Bind both functions wherever the originals are bound by now; later imports find ours."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, theirs, ours in (("safe_open", _open, safe_open), ("load", _load, torch_load)):
            if names.get(name) is theirs:
                names[name] = ours


_replace()


def mapped_files(directory: Path, gguf: str = "") -> list[Path]:
    """Files of a model that this process maps; a change of such a file changes the model."""
    lines = (line.split(maxsplit=_PATH_COLUMN) for line in os.fsdecode(_MAPS.read_bytes()).splitlines())
    mapped = {columns[_PATH_COLUMN] for columns in lines if len(columns) > _PATH_COLUMN}
    return [path for path in files_of(directory, gguf) if os.path.realpath(path) in mapped]


def files_of(directory: Path, gguf: str = "") -> list[Path]:
    """All files of a model. Hidden files, which belong to the tools that brought the model, and *.md are left out.

    A model in a GGUF file has this file and its parts.
    """
    if gguf:
        return [directory / name for name in parts_of(gguf)]
    paths = (path for path in directory.rglob("*") if path.suffix.lower() != ".md" and path.is_file())
    return sorted(p for p in paths if not any(part[0] == "." for part in p.relative_to(directory).parts))


def facts_of(path: Path) -> Facts:
    """The present facts of a file. A tool that replaces a file can keep its size and time, but not the other facts."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@contextmanager
def unchanged(
    directory: Path, passing: tuple[type[Exception], ...] = (), only: Sequence[str] = (), gguf: str = ""
) -> Iterator[None]:
    """Raise `FilesChanged` where files of the model, or `only` the named ones, differ at the end.

    Files that are half old and half new give any error, or none. So `FilesChanged` takes the place of another error,
    except of the classes `passing`.
    """

    def version() -> frozenset[Facts]:
        return _version([directory / name for name in only] or files_of(directory, gguf))

    before = version()
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        _refuse_changed(before, version(), error)
        raise
    _refuse_changed(before, version())


def _version(files: Iterable[Path]) -> frozenset[Facts]:
    """The facts of all files but missing ones."""
    facts = set()
    for path in files:
        with suppress(FileNotFoundError):
            facts.add(facts_of(path))
    return frozenset(facts)


def _refuse_changed(
    before: frozenset[Facts], now: frozenset[Facts], error: BaseException | None = None
) -> None:
    names = sorted({Path(path).name for path, *_ in before ^ now})
    if names:
        more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
        raise FilesChanged(f"{names[0]}{more} changed while the model was read") from error
