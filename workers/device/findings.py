"""Facts that loads have found out on this machine, kept for later loads.

1. A finding is a small JSON file of its own. The file is named by a digest of all facts on which the finding depends:
   those of the caller, and those of the machine (`machine_facts`). Other facts mean another file, so a new torch,
   another processor or another number of threads never meets an old finding.
2. A file is written beside its place and renamed, so two workers may write the same finding at once.
3. A file that is torn, too large, a link, owned by another user or writable for others is as good as none.
4. Of each kind the `MOST_FILES` files that were read or written last are kept. A write deletes the others.

A finding never replaces a check of the numbers: the code that reads a finding says which work the finding spares. The
finding of a `Proof` brings the values that the proven load gave, for the loads that skip the proof to compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from ipc.decoding import learnt
from ipc.processes.paths import make_private
from ipc.version import VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")
Values = dict[str, list[float]]
"""Values of the canned inferences of a load by `operation.output`."""

MOST_FILES = 512
"""Most files of one kind. A machine whose versions and models do not change has a few dozen."""
_MOST_NBYTES = 64 << 10
_PROCESSORS = Path("/proc/cpuinfo")
_PROCESSOR_FIELDS = ("vendor_id", "model name", "stepping", "microcode", "flags", "CPU part", "Features")
_TUNED_BY = ("ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_", "ATEN_", "TORCH_", "PYTORCH_", "CUBLAS_", "NVIDIA_")
"""Beginnings of environment variables that change how torch computes."""


class Findings:
    """The findings in one directory. Without a directory nothing is remembered."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def read(self, kind: str, facts: Any, choices: Sequence[str], count: int) -> list[str] | None:
        """The finding of `kind` by these facts: exactly `count` words of `choices`. None where there is none."""
        words = self.read_as(kind, facts, list[str])
        return words if words and len(words) == count and set(words) <= set(choices) else None

    def read_as(self, kind: str, facts: Any, form: type[T]) -> T | None:
        """The finding of `kind` by these facts in another form than words. None where there is none."""
        if self._root is None:
            return None
        path = self._path(self._root, kind, facts)
        try:
            return msgspec.json.decode(read_small(path), type=learnt(form))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.info("the finding %s is not read, and is made anew: %s", path.name, error)
            return None

    def write(self, kind: str, facts: Any, finding: Any) -> None:
        """Keep a finding in one step; where that fails the next load finds the same again."""
        if self._root is None:
            return
        path = self._path(self._root, kind, facts)
        try:
            write_small(self._root, path, msgspec.json.encode(finding))
        except OSError as error:
            log.debug("the finding %s is not kept: %s", path.name, error)

    @staticmethod
    def _path(root: Path, kind: str, facts: Any) -> Path:
        whole = msgspec.json.encode((facts, machine_facts(), torch.get_num_threads()), order="deterministic")
        return root / kind / f"{hashlib.blake2b(whole, digest_size=16).hexdigest()}.json"


class Proven(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The finding of a proof, and the values that the load of the proof gave."""

    found: str
    values: Values


class Proof:
    """The proof of one load, for later loads by the same facts to skip.

    1. `earlier` gives the finding of an earlier proof. `values` are then the values that this load must give again.
    2. `succeed` notes a proof that this load has made.
    3. `keep` remembers the proof, with the values of this load, once all other checks of the load have succeeded.
    """

    def __init__(self, findings: Findings | None = None) -> None:
        self._findings = findings or Findings()
        self._proof: tuple[str, Any, str] | None = None
        self.values: Values | None = None
        """The values of the proven load; None where this load has skipped no proof."""

    def earlier(self, kind: str, facts: Any, choices: Sequence[str]) -> str | None:
        """The finding of an earlier proof, one of `choices`; None where there was no proof."""
        proven = self._findings.read_as(kind, facts, Proven)
        if proven is None or proven.found not in choices or not proven.values:
            return None
        self.values = proven.values
        return proven.found

    def succeed(self, kind: str, facts: Any, finding: str) -> None:
        """The proof has been made and has found `finding`."""
        self._proof = (kind, facts, finding)

    def keep(self, values: Mapping[str, list[float]]) -> None:
        """The load has succeeded with these values. Without values later loads have nothing to compare, and prove."""
        if self._proof and values:
            kind, facts, finding = self._proof
            self._findings.write(kind, facts, Proven(finding, dict(values)))


def read_small(path: Path, most_nbytes: int = _MOST_NBYTES) -> bytes:
    """The bytes of a small file of ours, which counts as used now. Raises OSError for anything else."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_nbytes:
            raise OSError("no small file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError("others can write to the file")
        with contextlib.suppress(OSError):
            os.utime(handle)
        return stream.read(most_nbytes)


def write_small(root: Path, path: Path, content: bytes) -> None:
    """Write a file below `root` in one step, and delete the files beside it above `MOST_FILES`. Raises OSError."""
    make_private(root, path.parent)
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    _prune(path.parent)


def _prune(directory: Path) -> None:
    """Delete the files above `MOST_FILES` that were used longest ago, among them drafts of processes that died."""
    with os.scandir(directory) as files:
        paths = [file.path for file in files]
    if len(paths) <= MOST_FILES:
        return
    used = dict[str, float]()
    for path in paths:
        # NOTE: another worker may delete the same files at the same time.
        with contextlib.suppress(FileNotFoundError):
            used[path] = os.lstat(path).st_mtime
    for path in sorted(used, key=lambda path: used[path])[:-MOST_FILES]:
        Path(path).unlink(missing_ok=True)


@cache
def machine_facts() -> tuple[Any, ...]:
    """The processor, the cards, the versions of the libraries that compute, and the variables that tune them."""
    tuned = sorted(item for item in os.environ.items() if item[0].startswith(_TUNED_BY))
    cards = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return (
        VERSION,
        platform.machine(),
        _processor(),
        cards,
        str(torch.__version__),
        torch.__config__.show(),
        tuned,
    )


def _processor() -> list[str]:
    """The lines of /proc/cpuinfo that tell one kind of processor from another."""
    try:
        lines = _PROCESSORS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {line for line in lines if line.partition(":")[0].strip() in _PROCESSOR_FIELDS}
    return sorted(facts) or [platform.processor()]
