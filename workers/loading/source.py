"""Bring the files of a model onto this machine: from the hub, from a directory, from an installed package.

Each `from_*` returns a local directory that holds a config and whole safetensors weights, or raises.  Only files
that the loaders read are downloaded: configs, tokenizers, safetensors.  Pickled weights never are, except files
that the caller names.  `progress(phase, fraction)` hears how far the bytes have come.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from workers.loading.weights import DamagedWeightsError, check_weights, weight_files

Progress = Callable[[str, float], None]

CHUNK_BYTES = 8 << 20
_WANTED = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.safetensors")
_UNWANTED = ("onnx/*", "openvino/*", "consolidated*", "original/*", "*.bin", "*.h5", "*.msgpack", "*.onnx")


class SourceError(Exception):
    """A model cannot be had from its source.  `error_class` is one of `workers.loading.failure`."""

    def __init__(self, message: str, error_class: str = "NOT_FOUND") -> None:
        """`message` is shown to clients: it names no path of this machine."""
        super().__init__(message)
        self.error_class = error_class


def from_hub(repo: str, revision: str | None, progress: Progress, *, extra_files: Sequence[str] = ()) -> Path:
    """Download a repository into the hub cache, or find it there; HF_HUB_OFFLINE forbids the network.

    `extra_files` names further files of the repository, such as the `.pt` heads of some families.  Raises
    huggingface_hub's errors, which `failure.classify` knows, and SourceError for unusable files.
    """
    from huggingface_hub import snapshot_download

    class Bar(_ByteBar):
        """A bar that reports to this download."""

        report = staticmethod(progress)

    directory = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=[*_WANTED, *extra_files],
        ignore_patterns=[pattern for pattern in _UNWANTED if pattern not in extra_files],
        tqdm_class=Bar,
    )
    progress("download", 1.0)
    return _checked(Path(directory))


def from_directory(path: str | Path) -> Path:
    """A directory on this machine; raises SourceError unless it holds a whole model."""
    directory = Path(path)
    if not directory.is_dir():
        raise SourceError("the model directory does not exist")
    return _checked(directory)


def from_package(package: str, path: str = "model") -> Path:
    """A directory inside an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise SourceError(f"the package {package} is not installed", "DEPENDENCY")
    root = Path(places[0]).resolve()
    directory = (root / path).resolve()
    if not directory.is_relative_to(root) or not directory.is_dir():
        raise SourceError(f"the package {package} has no directory {path}")
    return _checked(directory)


def read_ahead(directory: Path, progress: Progress) -> int:
    """Read the weight files once, so that loading finds them in memory; returns the number of bytes read."""
    files = weight_files(directory)
    total = sum(path.stat().st_size for path in files)
    done = 0
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                done += count
                progress("read", min(1.0, done / total))
    return done


def _checked(directory: Path) -> Path:
    """`directory`, if it has a config and whole weights."""
    if not any((directory / name).is_file() for name in ("config.json", "modules.json")):
        raise SourceError("the model directory has no config.json")
    try:
        check_weights(directory)
    except DamagedWeightsError as error:
        raise SourceError(str(error), "UNKNOWN") from error
    return directory


class _Silence:
    """Where the bar's drawing goes."""

    def write(self, text: str) -> int:
        """Drop `text`."""
        return len(text)

    def flush(self) -> None:
        """Nothing to flush."""


class _ByteBar(tqdm):  # type: ignore[misc]  # published without types
    """The progress bar interface of huggingface_hub: draws nothing, reports bytes."""

    report: Progress

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Any bar; those that count bytes report."""
        super().__init__(*args, **{**kwargs, "file": _Silence(), "leave": False})

    def update(self, n: float | None = 1) -> bool | None:
        """Count `n` more and report the share done."""
        drawn: bool | None = super().update(n)
        if self.unit == "B" and self.total:
            self.report("download", min(1.0, self.n / self.total))
        return drawn
