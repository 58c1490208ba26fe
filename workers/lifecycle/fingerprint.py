"""Fingerprints: the values that a model gave at its first load here, against which each later load is compared.

The first load of a model writes the first values of its canned inferences into a file; later loads compare. The file
is named by what the values depend on: all files of the model (name, size, time), be they weights, configuration,
tokenizer or heads; the catalog entry, precision, kind of device and the versions of the libraries. So changed files get
a new fingerprint, and the same files that give other values are a fault: of the memory, the disk or the driver. A
catalog entry may state the values itself. As of findings, the files that were used last are kept
(`workers.device.findings`).

The identity of a loaded model (`identity_of`) stands for the same facts and is told to frontends, which keep vectors by
the identity. A tool may keep the time of a file that it replaces, so an identity also has the file's number and the
time of its last change of any kind, which no tool can set. The code beside the adapter belongs to an identity too.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from ipc.catalog.entries import QUANTIZED, ModelEntry, gguf_of
from ipc.version import VERSION
from workers.device.findings import read_small, write_small
from workers.loading.reading import facts_of, files_of

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""The largest `distance` of equal fingerprints, by the type in which the model computes."""
FINDINGS = "extraction"
VARYING = (FINDINGS, "sparse.values")
"""Names of the results whose number of values is not fixed; their highest values come first."""

_MOST_NBYTES = 64 << 20
"""Size of a fingerprint file at most. A program has values of each output of each run of its warm-up."""


class FingerprintMismatch(Exception):
    """A model gives other values than before or than its catalog entry states."""


def distance(expected: Sequence[float], values: Sequence[float]) -> float:
    """Euclidean distance over the length of `expected`; infinite when they differ in number."""
    if len(expected) != len(values):
        return math.inf
    length = math.sqrt(sum(value * value for value in expected))
    return math.dist(expected, values) / max(length, 1e-6)


def check(entry: ModelEntry, values: Mapping[str, list[float]], dtype: torch.dtype, path: Path) -> None:
    """Compare with the catalog entry and with the file at `path`, which is written when there is none.

    `values` are by `operation.output`. Of findings and of terms only as many are compared as there are on both sides:
    a finding whose score lies at a threshold comes and goes with the rounding.

    Raises `FingerprintMismatch`.
    """
    if entry.fingerprint:
        flat = [value for output in values.values() for value in output]
        _compare(entry.fingerprint, flat[: len(entry.fingerprint)], dtype, "its catalog entry states")
    stored = _read(path)
    if stored is not None:
        compare(stored, values, dtype, "the same files gave before")
    else:
        _write(path, values)


def compare(
    expected: Mapping[str, list[float]], values: Mapping[str, list[float]], dtype: torch.dtype, who: str
) -> None:
    """Compare values by `operation.output`; `who` gave the expected ones. Raises `FingerprintMismatch`."""
    _compare(*_aligned(expected, values), dtype, who)


def _aligned(
    stored: Mapping[str, list[float]], values: Mapping[str, list[float]]
) -> tuple[list[float], list[float]]:
    """The values of both in the same order, findings and terms cut to the shorter of the two."""
    left: list[float] = []
    right: list[float] = []
    for name in sorted(stored.keys() | values.keys()):
        before, now = stored.get(name, []), values.get(name, [])
        most = min(len(before), len(now)) if name.partition(".")[2] in VARYING else None
        left += before[:most]
        right += now[:most]
    return left, right


def _compare(expected: Sequence[float], values: Sequence[float], dtype: torch.dtype, who: str) -> None:
    apart, limit = distance(expected, values), TOLERANCE.get(dtype, 1e-1)
    if not apart <= limit:
        raise FingerprintMismatch(
            f"the canned inference differs from what {who}: distance {apart:.3g}, the limit is {limit:g}"
        )


def path_of(root: Path, entry: ModelEntry, directory: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """The file of a model's fingerprint under `root`."""
    files = [_facts(path, directory) for path in files_of(directory, gguf_of(entry))]
    return root / "fingerprints" / f"{_digest(files, entry, dtype, device)}.json"


def identity_of(
    entry: ModelEntry, directory: Path, adapter: type, dtype: torch.dtype, device: torch.device
) -> str:
    """Stands for all that decides the numbers of a model with these files and this class of adapter.

    All workers of a host that load the same files to the same kind of device have the same identity.
    """
    # NOTE: the module of an adapter that is a file beside its catalog entry is not kept; `entry.code` has its content.
    module = getattr(sys.modules.get(adapter.__module__), "__file__", None)
    code = sorted(Path(module).parent.glob("*.py")) if module else []
    return _digest([*map(facts_of, (*files_of(directory, gguf_of(entry)), *code))], entry, dtype, device)


def _digest(files: list[Any], entry: ModelEntry, dtype: torch.dtype, device: torch.device) -> str:
    facts = (files, _relevant(entry), str(dtype), device.type, _versions())
    return hashlib.blake2b(msgspec.json.encode(facts, order="deterministic"), digest_size=16).hexdigest()


def _facts(path: Path, directory: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.relative_to(directory)), status.st_size, status.st_mtime_ns


def _relevant(entry: ModelEntry) -> tuple[Any, ...]:
    kinds = (entry.inputs, entry.outputs)
    limits = (entry.max_sequence_length, entry.runtime, entry.loadtime, entry.proof)
    quantized = (entry.precision,) if entry.precision in QUANTIZED else ()
    return (entry.id, entry.source, entry.adapter, entry.code, *kinds, *limits, *quantized)


@cache
def _versions() -> list[str]:
    versions = [VERSION]
    for name in ("torch", "transformers"):
        try:
            versions.append(version(name))
        except PackageNotFoundError:
            versions.append("")
    return versions


def _read(path: Path) -> dict[str, list[float]] | None:
    try:
        return msgspec.json.decode(read_small(path, _MOST_NBYTES), type=dict[str, list[float]])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the fingerprint %s cannot be read and is written anew: %s", path.name, error)
        return None


def _write(path: Path, values: Mapping[str, list[float]]) -> None:
    """Write a fingerprint in one step. The model is served even if the file cannot be written."""
    try:
        write_small(path.parents[1], path, msgspec.json.encode(dict(values)))
    except OSError as error:
        log.warning("the fingerprint %s cannot be kept: %s", path.name, error)
