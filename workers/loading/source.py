"""Bring the files of a model onto this machine: from the hub, from a directory, from an installed package.

Each `from_*` returns a local directory that holds a config and whole safetensors weights, or raises.  Only files
that the loaders read are downloaded: configs, tokenizers, safetensors.  Pickled weights are only where a repository
has no others, and files that the caller names.  `progress(phase, fraction)` hears how far the bytes have come.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm  # type: ignore[import-untyped]

from workers.loading.weights import DamagedWeightsError, check_weights, weight_files

Progress = Callable[[str, float], None]

CHUNK_BYTES = 8 << 20
_DESCRIBING = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_CONFIGS = ("config.json", "modules.json", "gliner_config.json")
_PICKLED = "pytorch_model*.bin"
_UNWANTED = ("onnx/*", "openvino/*", "consolidated*", "original/*")


class SourceError(Exception):
    """A model cannot be had from its source.  `error_class` is one of `workers.loading.failure`."""

    def __init__(self, message: str, error_class: str = "NOT_FOUND") -> None:
        """`message` is shown to clients: it names no path of this machine."""
        super().__init__(message)
        self.error_class = error_class


class DownloadFailed(Exception):
    """A repository of the hub could not be had; the cause is the hub client's error.

    `repo` is the repository, `host` the hub or its mirror (HF_ENDPOINT), without what else its address may hold.
    """

    def __init__(self, repo: str) -> None:
        from huggingface_hub import constants

        super().__init__(f"{repo} cannot be downloaded")
        address = urlsplit(constants.ENDPOINT)
        self.repo, self.host = repo, address.hostname or "the hub"
        self.host += f":{address.port}" if address.port else ""


def snapshot(repo: str, revision: str | None, **chosen: Any) -> Path:
    """The directory of a repository in the hub cache, downloaded unless it is there; `chosen` says which files.

    Raises `DownloadFailed` with the hub client's error as the cause.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, **chosen))
    except Exception as error:
        raise DownloadFailed(repo) from error


def from_hub(
    repo: str,
    revision: str | None,
    progress: Progress,
    *,
    extra_files: Sequence[str] = (),
    tokenizer_repo: str | None = None,
    cached_only: bool = False,
) -> Path:
    """Download a repository into the hub cache, or find it there; HF_HUB_OFFLINE forbids the network.

    `extra_files` names further files of the repository, such as the `.pt` heads of some families; `tokenizer_repo` is
    another repository whose configuration and tokenizer the model borrows; `cached_only` leaves the network alone.
    Raises DownloadFailed, and SourceError for unusable files.
    """
    if tokenizer_repo is not None:
        _snapshot(tokenizer_repo, None, progress, (), cached_only)
    wanted = ("*.safetensors", *extra_files)
    directory = _snapshot(repo, revision, progress, wanted, cached_only)
    if not weight_files(directory):
        directory = _snapshot(repo, revision, progress, (*wanted, _PICKLED), cached_only)
    progress("download", 1.0)
    return _checked(directory)


def _snapshot(
    repo: str, revision: str | None, progress: Progress, wanted: Sequence[str], cached_only: bool
) -> Path:
    """The configuration and tokenizer files of a repository and those that match `wanted`, in the hub cache."""

    class Bar(_ByteBar):
        """A bar that reports to this download."""

        report = staticmethod(progress)

    return snapshot(
        repo,
        revision,
        allow_patterns=[*_DESCRIBING, *wanted],
        ignore_patterns=list(_UNWANTED),
        local_files_only=cached_only,
        tqdm_class=Bar,
    )


def size_in_hub(repo: str, revision: str | None) -> tuple[int, int]:
    """(bytes of the weights that `from_hub` brings, those of them that this machine does not have).

    Raises huggingface_hub's errors where neither its cache nor the hub says it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    found: list[Path] = []
    with suppress(LocalEntryNotFoundError):
        found = weight_files(
            Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
        )
    if found:
        return sum(path.stat().st_size for path in found), 0
    listed = HfApi().list_repo_tree(repo, recursive=True, revision=revision)
    files = [file for file in listed if isinstance(file, RepoFile) and file.path.endswith(".safetensors")]
    unwanted = {file.path for file in files for pattern in _UNWANTED if fnmatch(file.path, pattern)}
    nbytes = sum(file.size for file in files if file.path not in unwanted)
    return nbytes, nbytes


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
    if not any((directory / name).is_file() for name in _CONFIGS):
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
