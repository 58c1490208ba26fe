"""The file of vectors, which grows row by row and survives an interruption.

1. Rows go to `OUT.part`, a .npy file whose header has room for any number of rows.
2. `OUT.part.json` (`Progress`) says which rows are on the disk, written with a rename after the rows were synced.
3. `finish` completes the header and renames `OUT.part` to `OUT`, or writes a Parquet file in row groups.

A resumed run takes the rows that `Progress` names and cuts the others off. A lock on `OUT.part` keeps a second run out.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ipc.errors import ConfigError

GROUP_NBYTES = 32 << 20
"""Bytes of vectors in a row group of a Parquet file."""


class Progress(msgspec.Struct):
    """What is done: `rows` of the input up to byte `offset` with `digest`; `failed` rows have no vector.

    `asked` are the flags that decide the vectors.
    """

    asked: dict[str, Any]
    rows: int = 0
    offset: int = 0
    digest: str = ""
    dtype: str = ""
    width: int = 0
    failed: list[int] = msgspec.field(default_factory=list)


class Output:
    """The vectors of one run. A row without a vector is NaN in float types and zero in others."""

    def __init__(self, path: Path, asked: dict[str, Any], *, restart: bool, force: bool) -> None:
        """Raises `ConfigError` where the file is there, belongs to a run with other flags, or is being written."""
        if path.suffix not in (".npy", ".parquet"):
            raise ConfigError(f"embed: {path} must end in .npy or .parquet")
        if path.suffix == ".parquet":
            _parquet()
        if path.exists() and not force:
            raise ConfigError(f"embed: {path} exists; --force replaces the file")
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._sidecar = path.with_name(path.name + ".part.json")
        self._file = _locked(self._part)
        self.progress = self._resumed(asked, restart=restart)
        self._header_nbytes = 0
        if self.progress.width:
            self._begin(self.progress.rows)

    def _resumed(self, asked: dict[str, Any], *, restart: bool) -> Progress:
        try:
            known = msgspec.json.decode(self._sidecar.read_bytes(), type=Progress)
        except FileNotFoundError:
            return Progress(asked)
        except (msgspec.DecodeError, OSError) as error:
            raise ConfigError(
                f"embed: {self._sidecar} cannot be read: {error}; --restart begins anew"
            ) from None
        if restart:
            return Progress(asked)
        if known.asked != asked:
            other = ", ".join(
                f"{name} {value}" for name, value in known.asked.items() if asked.get(name) != value
            )
            raise ConfigError(f"embed: {self._part} is of a run with {other}; --restart begins anew")
        return known

    def append(self, vectors: np.ndarray | None, rows: int, failed: list[int]) -> None:
        """Add `rows` rows: `vectors` [rows - failed, width] in their order, and nothing for the places in `failed`."""
        progress = self.progress
        if vectors is not None and not progress.width:
            progress.dtype, progress.width = vectors.dtype.str, vectors.shape[1]
            self._begin(0)
            # Rows that failed before the width was known.
            self._write(self._filled(None, progress.rows, list(range(progress.rows))))
        if progress.width:
            self._write(self._filled(vectors, rows, failed))
        progress.failed += [progress.rows + place for place in failed]
        progress.rows += rows

    def _filled(self, vectors: np.ndarray | None, rows: int, failed: list[int]) -> np.ndarray:
        dtype = np.dtype(self.progress.dtype)
        full = np.full((rows, self.progress.width), np.nan if dtype.kind == "f" else 0, dtype)
        if vectors is not None:
            full[np.setdiff1d(np.arange(rows), failed, assume_unique=True)] = vectors
        return full

    def _begin(self, rows: int) -> None:
        """Write the header, and go behind the first `rows` rows, which are on the disk. Raises `ConfigError`."""
        self._file.seek(0)
        self._write_header(0)
        self._header_nbytes = self._file.tell()
        end = self._header_nbytes + rows * self._row_nbytes
        if self._file.seek(0, os.SEEK_END) < end:
            raise ConfigError(
                f"embed: {self._part} is shorter than {self._sidecar} says; --restart begins anew"
            )
        self._file.truncate(end)
        self._file.seek(end)

    @property
    def _row_nbytes(self) -> int:
        return self.progress.width * np.dtype(self.progress.dtype).itemsize

    def _write_header(self, rows: int) -> None:
        # NOTE: numpy leaves room in the header for the largest number of rows.
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": self.progress.dtype, "fortran_order": False, "shape": (rows, self.progress.width)},
        )

    def _write(self, rows: np.ndarray) -> None:
        self._file.write(rows.tobytes())

    def save(self, offset: int, digest: str) -> None:
        """Sync the rows, then say that they are there. The input was read up to `offset`."""
        self.progress.offset, self.progress.digest = offset, digest
        self._file.flush()
        os.fsync(self._file.fileno())
        fresh = self._sidecar.with_name(self._sidecar.name + ".new")
        fresh.write_bytes(msgspec.json.encode(self.progress))
        fresh.replace(self._sidecar)

    def finish(self) -> None:
        """Make the file of the run, and remove what a resumed run would need. Raises `ConfigError` without a vector."""
        if not self.progress.width:
            raise ConfigError("embed: no line has a vector, so there is nothing to write")
        self._file.seek(0)
        self._write_header(self.progress.rows)
        assert self._file.tell() == self._header_nbytes
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._path.suffix == ".parquet":
            self._write_parquet()
            self._part.unlink()
        else:
            self._part.replace(self._path)
        self._sidecar.unlink(missing_ok=True)

    def _write_parquet(self) -> None:
        """Columns `line`, from 1, and `embedding`, a list of fixed size; null for a line without a vector."""
        pa, parquet = _parquet()
        progress = self.progress
        shape = (progress.rows, progress.width)
        vectors = np.memmap(self._part, np.dtype(progress.dtype), "r", self._header_nbytes, shape)
        failed = np.zeros(len(vectors), bool)
        failed[self.progress.failed] = True
        kind = pa.list_(pa.from_numpy_dtype(vectors.dtype), self.progress.width)
        schema = pa.schema([("line", pa.int64()), ("embedding", kind)])
        fresh = self._path.with_name(self._path.name + ".new")
        step = max(1, GROUP_NBYTES // max(1, self._row_nbytes))
        with parquet.ParquetWriter(fresh, schema) as writer:
            for first in range(0, len(vectors), step):
                rows = np.ascontiguousarray(vectors[first : first + step])
                column = pa.FixedSizeListArray.from_arrays(
                    pa.array(rows.reshape(-1)), type=kind, mask=pa.array(failed[first : first + step])
                )
                lines = pa.array(np.arange(first + 1, first + len(rows) + 1))
                writer.write_table(pa.table([lines, column], schema=schema))
        fresh.replace(self._path)

    def close(self) -> None:
        """Let another run write. A part of which nothing was saved is removed."""
        if not self._sidecar.exists():
            self._part.unlink(missing_ok=True)
        self._file.close()


def _locked(path: Path) -> BinaryIO:
    """The file, open for reading and writing, which no other run may write meanwhile."""
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


def _parquet() -> tuple[Any, Any]:
    """pyarrow and its module of Parquet. Raises `ConfigError` where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("embed: a .parquet file needs the package pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
