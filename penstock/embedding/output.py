"""The file of vectors, which grows row by row and survives an interruption.

1. Rows go to `OUT.part`, a .npy file whose header has room for any number of rows (`Rows`). The scales of int8
   vectors go to a second file.
2. `OUT.part.json` (`Progress`) says which rows are on the disk, written with a rename after the rows were synced.
3. `finish` completes the headers and renames each part to its file, or writes a Parquet file in row groups.

A resumed run takes the rows that `Progress` names and cuts the others off. A lock on `OUT.part` keeps a second run out.
A run that was killed between the two renames of `finish` finishes again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ipc.errors import ConfigError

GROUP_NBYTES = 32 << 20
"""Bytes of vectors in a row group of a Parquet file."""


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
        self._path, self._scale_path = path, path.with_suffix(".scale.npy")
        self._rows_part = path.with_name(path.name + ".part")
        self._scale_part = self._scale_path.with_name(self._scale_path.name + ".part")
        self._sidecar = path.with_name(path.name + ".part.json")
        scaled = asked.get("dtype") == "int8"
        for each in (path, self._scale_path) if scaled and path.suffix == ".npy" else (path,):
            if each.is_dir():
                raise ConfigError(f"embed: {each} is a directory")
            if each.exists() and not force and not (each is self._scale_path and self._finishing):
                raise ConfigError(f"embed: {each} exists; --force replaces the file")
        self._rows = Rows(self._rows_part)
        if scaled and not restart and self._finishing:
            self._scale_path.replace(self._scale_part)
        self._scales = Rows(self._scale_part) if scaled else None
        self.progress = self._resumed(asked, restart=restart)
        self.saved_rows = self.progress.rows
        if self.progress.width:
            self._begin(self.progress.rows)

    @property
    def _finishing(self) -> bool:
        """Whether an earlier run has renamed its scales and not yet its vectors."""
        parts = self._sidecar.exists() and self._rows_part.exists() and not self._scale_part.exists()
        return parts and self._scale_path.is_file()

    @property
    def _files(self) -> list[Rows]:
        return [self._rows] if self._scales is None else [self._scales, self._rows]

    def _resumed(self, asked: dict[str, Any], *, restart: bool) -> Progress:
        if restart:
            # NOTE: an old note beside new rows would be believed after an interruption.
            self._sidecar.unlink(missing_ok=True)
        try:
            known = msgspec.json.decode(self._sidecar.read_bytes(), type=Progress)
        except FileNotFoundError:
            return Progress(asked)
        except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(
                f"embed: {self._sidecar} cannot be read: {error}; --restart begins anew"
            ) from None
        if known.asked != asked:
            other = ", ".join(
                f"{name} {value}" for name, value in known.asked.items() if asked.get(name) != value
            )
            raise ConfigError(f"embed: {self._rows.path} is of a run with {other}; --restart begins anew")
        return known

    def append(
        self, vectors: np.ndarray | None, rows: int, failed: list[int], scales: np.ndarray | None = None
    ) -> None:
        """Add `rows` rows: `vectors` [rows - failed, width] in their order, and nothing for the places in `failed`.

        `scales` [rows - failed] belong to int8 vectors.
        """
        progress = self.progress
        if vectors is not None and not progress.width:
            progress.dtype, progress.width = vectors.dtype.str, vectors.shape[1]
            self._begin(0)
            # Rows that failed before the width was known.
            for file in self._files:
                file.append(None, progress.rows, list(range(progress.rows)))
        if progress.width:
            self._rows.append(vectors, rows, failed)
            if self._scales is not None:
                self._scales.append(scales, rows, failed)
        progress.failed += [progress.rows + place for place in failed]
        progress.rows += rows

    def _begin(self, rows: int) -> None:
        """Go behind the first `rows` rows, which are on the disk. Raises `ConfigError`."""
        self._rows.begin(self.progress.dtype, (self.progress.width,), rows)
        if self._scales is not None:
            self._scales.begin("<f4", (), rows)

    def save(self, offset: int, digest: str) -> None:
        """Sync the rows, then say that they are there. The input was read up to `offset`."""
        self.progress.offset, self.progress.digest = offset, digest
        for file in self._files:
            file.sync()
        fresh = self._sidecar.with_name(self._sidecar.name + ".new")
        fresh.write_bytes(msgspec.json.encode(self.progress))
        fresh.replace(self._sidecar)
        self.saved_rows = self.progress.rows

    def finish(self) -> None:
        """Make the file of the run, and remove what a resumed run would need."""
        for file in self._files:
            file.finish(self.progress.rows)
        if self._path.suffix == ".parquet":
            self._write_parquet()
            for file in self._files:
                file.path.unlink()
        else:
            # NOTE: the vectors come last, so that they never stand there without their scales.
            if self._scales is not None:
                self._scales.path.replace(self._scale_path)
            self._rows.path.replace(self._path)
        self._sidecar.unlink(missing_ok=True)

    def _write_parquet(self) -> None:
        """Columns `line`, from 1, `embedding`, a list of fixed size, null for a line without a vector, and `scale`."""
        pa, parquet = _parquet()
        count, width = self.progress.rows, self.progress.width
        vectors = self._rows.mapped(count)
        scales = None if self._scales is None else self._scales.mapped(count)
        failed = np.zeros(count, bool)
        failed[self.progress.failed] = True
        kind = pa.list_(pa.from_numpy_dtype(vectors.dtype), width)
        fields = [("line", pa.int64()), ("embedding", kind)]
        schema = pa.schema(fields if scales is None else [*fields, ("scale", pa.float32())])
        fresh = self._path.with_name(self._path.name + ".new")
        step = max(1, GROUP_NBYTES // max(1, self._rows.row_nbytes))
        with parquet.ParquetWriter(fresh, schema) as writer:
            for first in range(0, count, step):
                group = slice(first, min(first + step, count))
                values = pa.array(np.ascontiguousarray(vectors[group]).reshape(-1))
                columns = [
                    pa.array(np.arange(group.start + 1, group.stop + 1)),
                    pa.FixedSizeListArray.from_arrays(values, type=kind, mask=pa.array(failed[group])),
                ]
                if scales is not None:
                    columns.append(pa.array(scales[group], mask=failed[group]))
                writer.write_table(pa.table(columns, schema=schema))
        fresh.replace(self._path)

    def close(self) -> None:
        """Let another run write. A part of which nothing was saved is removed."""
        for file in self._files:
            if not self._sidecar.exists():
                file.path.unlink(missing_ok=True)
            # A full disk fails here again; the error was told.
            with contextlib.suppress(OSError):
                file.close()


def _parquet() -> tuple[Any, Any]:
    """pyarrow and its module of Parquet. Raises `ConfigError` where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("embed: a .parquet file needs the package pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
