"""A .npy file that grows row by row, whose header has room for any number of rows."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ipc.errors import ConfigError


class Rows:
    """The rows of one file. The number of rows is written at the end."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` where the file cannot be written, or is being written by another run."""
        self.path = path
        self._file = _locked(path)
        self._header_nbytes = 0
        self._dtype, self._shape = np.dtype(np.float32), tuple[int, ...]()

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self._dtype.itemsize * int(np.prod(self._shape))

    def begin(self, dtype: str, shape: tuple[int, ...], rows: int) -> None:
        """Go behind the first `rows` rows, each an array of `shape`, which are on the disk. Raises `ConfigError`."""
        self._dtype, self._shape = np.dtype(dtype), shape
        self._file.seek(0)
        self._write_header(0)
        self._header_nbytes = self._file.tell()
        end = self._header_nbytes + rows * self.row_nbytes
        if self._file.seek(0, os.SEEK_END) < end:
            raise ConfigError(f"embed: {self.path} is shorter than it was; --restart begins anew")
        self._file.truncate(end)
        self._file.seek(end)

    def _write_header(self, rows: int) -> None:
        # NOTE: numpy leaves room in the header for the largest number of rows.
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": self._dtype.str, "fortran_order": False, "shape": (rows, *self._shape)},
        )

    def append(self, values: np.ndarray | None, rows: int, failed: list[int]) -> None:
        """Add `rows` rows: `values` in their order, and NaN or zero in the places of `failed`."""
        full = np.full((rows, *self._shape), np.nan if self._dtype.kind == "f" else 0, self._dtype)
        if values is not None:
            full[np.setdiff1d(np.arange(rows), failed, assume_unique=True)] = values
        self._file.write(full.tobytes())

    def sync(self) -> None:
        """Return once the rows are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, rows: int) -> None:
        """Complete the header."""
        self._file.seek(0)
        self._write_header(rows)
        assert self._file.tell() == self._header_nbytes
        self.sync()

    def mapped(self, rows: int) -> np.ndarray:
        """The rows of a file that is finished."""
        return np.memmap(self.path, self._dtype, "r", self._header_nbytes, (rows, *self._shape))

    def close(self) -> None:
        """Let another run write."""
        self._file.close()


def _locked(path: Path) -> BinaryIO:
    """The file, open for reading and writing, which no other run may write meanwhile."""
    if not path.parent.is_dir():
        raise ConfigError(f"embed: the directory {path.parent} does not exist")
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
    except OSError as error:
        raise ConfigError(f"embed: {path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"embed: another run writes {path}") from error
    return file
