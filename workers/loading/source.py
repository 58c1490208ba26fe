"""The local directory of a model: from the hub, from a directory, or from an installed package.

1. Each `from_*` returns a local directory that holds a config and whole safetensors weights, or raises. Only files that
   the loaders read are downloaded: configs, tokenizers, safetensors, and files that the caller names. Pickled weights
   are downloaded only if a repository has no others. `progress(phase, fraction)` reports the share of the bytes. With
   `gguf` the model is that GGUF file, of a model in parts the first, and no other file is read.
2. `workers.loading.stored_files` checks weights and tokenizer without building a model.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ipc import extras
from workers.loading import stored_files
from workers.loading.gguf_file import SUFFIX, GgufRefused, parts_of, read_model, refuse_unserved

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


Progress = Callable[[str, float], None]
OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes of all files known so far) of a download."""
CHUNK_BYTES = 8 << 20
_LIST_TIMEOUT_S = 10.0
"""How long the hub may take to list the files of a repository."""
_DESCRIBING = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
WEIGHTS = (".safetensors", ".bin")
"""Endings of files of weights that are no GGUF files."""
_CONFIGS = ("config.json", "modules.json", "gliner_config.json")
_UNWANTED = ("onnx/*", "openvino/*", "consolidated*", "original/*")


class SourceError(Exception):
    """The source of a model is unusable. `error_class` is a class of `workers.loading.failure`."""

    def __init__(self, message: str, error_class: str = "NOT_FOUND") -> None:
        """Clients see `message`, so `message` names no path of this machine."""
        super().__init__(message)
        self.error_class = error_class


class DownloadFailed(Exception):
    """A download from the hub failed; the cause is the hub client's error.

    `repo` is the repository, `host` is host and port of the hub or its mirror (HF_ENDPOINT), without credentials.
    """

    def __init__(self, repo: str) -> None:
        from huggingface_hub import constants

        super().__init__(f"{repo} cannot be downloaded")
        address = urlsplit(constants.ENDPOINT)
        self.repo, self.host = repo, address.hostname or "the hub"
        self.host += f":{address.port}" if address.port else ""


def snapshot(repo: str, revision: str | None, **chosen: Any) -> Path:
    """The directory of a repository in the hub cache, downloaded if missing; `chosen` selects the files.

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
    on_bytes: OnBytes | None = None,
    to: Path | None = None,
    gguf: str = "",
) -> Path:
    """The directory of a repository in the hub cache, downloaded if missing; HF_HUB_OFFLINE forbids the network.

    With `to` the files go to that directory in place of the cache. `extra_files` names further files of the repository,
    such as the `.pt` heads of some families. `tokenizer_repo` is another repository, whose configuration and tokenizer
    the model uses. With `cached_only` nothing is downloaded. Raises DownloadFailed, and SourceError for unusable files.
    """

    bar = _byte_bar(progress, on_bytes or ignore_bytes)
    chosen = {"local_files_only": cached_only, "tqdm_class": bar, "ignore_patterns": list(_UNWANTED)}
    if tokenizer_repo is not None:
        snapshot(tokenizer_repo, None, allow_patterns=list(_DESCRIBING), **chosen)
    patterns = [*parts_of(gguf)] if gguf else [*_DESCRIBING, "*.safetensors", *extra_files]
    chosen |= {} if to is None else {"local_dir": to}
    directory = snapshot(repo, revision, allow_patterns=patterns, **chosen)
    if not gguf and (bare := _without_weights(directory)):
        directory = snapshot(repo, revision, allow_patterns=[*patterns, *bare], **chosen)
    if to is not None:
        # The hub's library keeps parts here, with which it could resume a download.
        shutil.rmtree(to / ".cache", ignore_errors=True)
    progress("download", 1.0)
    return _checked(directory, gguf)


def _without_weights(directory: Path) -> list[str]:
    """Patterns of the pickled weights of modules that have no safetensors; empty where all have some."""
    having = {path.parent for path in stored_files.weight_files(directory)}
    if having and not (directory / "modules.json").is_file():
        return []
    places = [place for place in stored_files.module_directories(directory) if place not in having]
    return [str(place.relative_to(directory) / stored_files.PICKLED) for place in places]


def ignore_bytes(done: int, total: int) -> None:
    """Report nothing."""


def size_in_hub(repo: str, revision: str | None, gguf: str = "") -> tuple[int, int]:
    """(bytes of the weights that `from_hub` returns, bytes that are not on this machine yet).

    Raises huggingface_hub's errors if neither the cache nor the hub has the sizes.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached: list[Path] = []
    with suppress(LocalEntryNotFoundError):
        root = Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
        cached = [path for path in stored_files.weight_files(root, gguf) if path.is_file()]
    if cached:
        return sum(path.stat().st_size for path in cached), 0
    ends = parts_of(gguf) if gguf else (".safetensors",)
    files = [file for file in _listed(repo, revision) if file.path.endswith(ends)]
    unwanted = {file.path for file in files for pattern in _UNWANTED if fnmatch(file.path, pattern)}
    nbytes = sum(file.size for file in files if file.path not in unwanted)
    return nbytes, nbytes


def files_in_hub(repo: str, most: int) -> dict[str, int]:
    """Bytes of each file of a repository, by name; of the cached files where the hub must not or cannot be asked.

    Raises `DownloadFailed`, also for a repository of more than `most` files.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        if constants.HF_HUB_OFFLINE:
            return _cached_files(repo)
        listed = list(islice(_listed(repo, None), most + 1))
        if len(listed) > most:
            raise ValueError(f"the repository has more than {most} files")
    except (RepositoryNotFoundError, ValueError) as error:
        raise DownloadFailed(repo) from error
    except Exception as error:
        with suppress(Exception):
            return _cached_files(repo)
        raise DownloadFailed(repo) from error
    return {file.path: file.size for file in listed}


def _listed(repo: str, revision: str | None) -> Iterator[RepoFile]:
    """The files of a repository of the hub, with their sizes. Raises huggingface_hub's errors."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    # NOTE: without a network this call fails at once; the listing tries for half a minute.
    HfApi().model_info(repo, revision=revision or "main", timeout=_LIST_TIMEOUT_S)
    listed = HfApi().list_repo_tree(repo, recursive=True, revision=revision)
    return (file for file in listed if isinstance(file, RepoFile))


def _cached_files(repo: str) -> dict[str, int]:
    """Bytes of each file of a repository in the hub cache, by name.

    Raises huggingface_hub's errors, and FileNotFoundError where the cache has no weights.
    """
    from huggingface_hub import snapshot_download

    root = Path(snapshot_download(repo, allow_patterns=[], local_files_only=True))
    sizes = {str(p.relative_to(root)): p.stat().st_size for p in root.rglob("*") if p.is_file()}
    if not any(name.endswith((*WEIGHTS, SUFFIX)) for name in sizes):
        raise FileNotFoundError(f"the hub cache has no weights of {repo}")
    return sizes


def fetch_files(repo: str, names: Sequence[str]) -> Path:
    """The directory in the hub cache that has these files of a repository. Raises `DownloadFailed`."""
    quiet = _byte_bar(lambda phase, fraction: None, ignore_bytes)
    return snapshot(repo, None, allow_patterns=list(names), tqdm_class=quiet)


def from_directory(path: str | Path, gguf: str = "") -> Path:
    """A directory on this machine. Raises SourceError for a directory without a whole model."""
    directory = Path(path)
    if not directory.is_dir():
        raise SourceError("the model directory does not exist")
    return _checked(directory, gguf)


def from_package(package: str, path: str = "model", gguf: str = "") -> Path:
    """A directory inside an installed package, which is not imported. Raises SourceError."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise SourceError(f"the package {package} is not installed{extras.bringing(package)}", "DEPENDENCY")
    root = Path(places[0]).resolve()
    directory = (root / path).resolve()
    if not directory.is_relative_to(root) or not directory.is_dir():
        raise SourceError(f"the package {package} has no directory {path}")
    return _checked(directory, gguf)


def read_ahead(directory: Path, progress: Progress, gguf: str = "") -> int:
    """Read the weight files once, so that loading finds them in memory; returns the number of bytes read."""
    files = stored_files.weight_files(directory, gguf)
    total = sum(path.stat().st_size for path in files)
    done = 0
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                done += count
                progress("read", min(1.0, done / total))
    return done


def _checked(directory: Path, gguf: str = "") -> Path:
    """`directory`, if it has a config and whole weights, or the whole GGUF file."""
    if gguf:
        _check_gguf(directory / gguf)
        return directory
    if not any((directory / name).is_file() for name in _CONFIGS):
        raise SourceError("the model directory has no config.json")
    try:
        stored_files.check_weights(directory)
        stored_files.check_tokenizer(directory)
    except (stored_files.DamagedWeightsError, stored_files.DamagedTokenizerError) as error:
        raise SourceError(str(error), "UNKNOWN") from error
    return directory


def _check_gguf(path: Path) -> None:
    """Raise SourceError unless the file holds a whole model that is served."""
    if not path.is_file():
        raise SourceError(f"the model directory has no {path.name}")
    try:
        refuse_unserved(read_model(path))
    except GgufRefused as error:
        raise SourceError(str(error), "UNKNOWN") from error


class _Silence:
    """The output of a bar that is not shown."""

    def write(self, text: str) -> int:
        """Drop `text`."""
        return len(text)

    def flush(self) -> None:
        """Nothing to flush."""


def _byte_bar(report: Progress, counted: OnBytes) -> type[Any]:
    """A class of progress bars for huggingface_hub that draw nothing and report bytes."""
    # Imported here: tqdm comes with the hub's library, which a machine with frontends only lacks.
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ByteBar(tqdm):  # type: ignore[misc]  # published without types
        """Any bar; only bars that count bytes report."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": _Silence(), "leave": False})

        def update(self, n: float | None = 1) -> bool | None:
            """Count `n` more and report the share done."""
            drawn: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                counted(int(self.n), int(self.total))
                report("download", min(1.0, self.n / self.total))
            return drawn

    return ByteBar
