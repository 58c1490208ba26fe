"""The local directory of a model: from the hub, from a directory, or from an installed package.

1. Each `from_*` returns a local directory that holds a config and whole safetensors weights, or raises. Only files that
   the loaders read are downloaded: configs, tokenizers, safetensors, and files that the caller names. Pickled weights
   are downloaded only if a repository has no others. `progress(phase, fraction)` reports the share of the bytes. With
   `gguf` the model is that GGUF file, of a model in parts the first, and no other file is read.
2. Weight files are checked without building a model. A safetensors file is 8 bytes of header length (little-endian), a
   JSON header with the byte range of each tensor, and the tensors. So the size alone shows a file that was cut off, or
   a file of another format. Pickled files are used only without others, and only if torch reads them with
   `weights_only`, which runs no code.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ipc import extras
from workers.loading.gguf_file import GgufRefused, parts_of, read_model, refuse_unserved

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

PICKLED = "pytorch_model*.bin"
_WEIGHTED = ("Transformer", "StaticEmbedding", "Dense", "LayerNorm")
"""Ends of the kinds of modules that have weights."""
_KEPT_STEPS = "checkpoint-"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_POINTER = b"version "
_MOST_POINTER_BYTES = 1024
"""First bytes and size of the text file that Git LFS leaves in place of a large file."""

Progress = Callable[[str, float], None]
OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes of all files known so far) of a download."""
CHUNK_BYTES = 8 << 20
_LIST_TIMEOUT_S = 10.0
"""How long the hub may take to list the files of a repository."""
_DESCRIBING = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_CONFIGS = ("config.json", "modules.json", "gliner_config.json")
_UNWANTED = ("onnx/*", "openvino/*", "consolidated*", "original/*")


class DamagedWeightsError(Exception):
    """A weight file is missing, cut off or not in the safetensors format; the message names the file only."""


def weight_files(directory: Path, gguf: str = "") -> list[Path]:
    """All safetensors files under `directory`, and pickled weights of modules that have no others; sorted.

    Files that a trainer kept of its steps, in `checkpoint-...`, are no part of the model. With `gguf` the weight files
    are this file and its other parts.
    """
    if gguf:
        return [directory / name for name in parts_of(gguf)]
    files = sorted(path for path in directory.rglob("*.safetensors") if _belongs(path, directory))
    having = {path.parent for path in files}
    without = [place for place in _module_directories(directory) if place not in having]
    return files + sorted(path for place in without for path in place.glob(PICKLED) if path.is_file())


def _belongs(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts[:-1]
    return path.is_file() and not any(part.startswith(_KEPT_STEPS) for part in parts)


def _module_directories(directory: Path) -> list[Path]:
    """The directories of the modules with weights that modules.json names; `directory` without such modules."""
    stored = directory / "modules.json"
    try:
        listed = _bounded_json(stored) if stored.is_file() else []
        paths = [Path(str(each["path"])) for each in listed if str(each["type"]).endswith(_WEIGHTED)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        paths = []
    inside = [path for path in paths if not path.is_absolute() and ".." not in path.parts]
    return [directory / path for path in dict.fromkeys(inside)] or [directory]


def is_plain(path: Path) -> bool:
    """Whether a pickled file is a map of names to tensors and nothing else."""
    import torch

    try:
        # On the device "meta" tensors have no data, so only what describes them is read.
        stored = torch.load(path, map_location="meta", weights_only=True)
    except Exception:
        return False
    return isinstance(stored, dict) and all(isinstance(value, torch.Tensor) for value in stored.values())


def check_weights(directory: Path) -> None:
    """Raise DamagedWeightsError unless every weight file is whole and every shard of an index exists."""
    files = weight_files(directory)
    pickled = [path for path in files if path.suffix == ".bin"]
    unusable = next((path.name for path in pickled if not is_plain(path)), None)
    if unusable is not None:
        raise DamagedWeightsError(
            f"the model has no safetensors weights; {unusable} is damaged or holds more than tensors and is not loaded"
        )
    check_whole(directory)


def check_whole(directory: Path) -> None:
    """As `check_weights`, without a look into pickled files and without an import of a model library."""
    files = weight_files(directory)
    if not files:
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.h5") for path in directory.glob(pattern))
        more = f"; {other[0]} is in a format that is not loaded" if other else ""
        raise DamagedWeightsError(f"the model has no safetensors weights{more}")
    pickled = {path.parent for path in files if path.suffix == ".bin"}
    indices = [*directory.rglob("*.safetensors.index.json")]
    indices += [path for place in pickled for path in place.glob("*.bin.index.json")]
    for index in indices:
        if _belongs(index, directory):
            _refuse_incomplete(index)
    for path in files:
        if path.suffix != ".bin":
            _refuse_damaged(path)


def _refuse_incomplete(index: Path) -> None:
    """Raise DamagedWeightsError unless every shard of an index exists."""
    try:
        shards = set(_bounded_json(index)["weight_map"].values())
        missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedWeightsError(f"{index.name} is damaged: no map of weights to files") from error
    if missing:
        raise DamagedWeightsError(
            f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]}"
        )


def _bounded_json(path: Path) -> Any:
    """The content of a file about weights. Raises `ValueError` for a file that is no JSON, or larger than any such."""
    with path.open("rb") as stream:
        data = stream.read(_MOST_HEADER_BYTES + 1)
    if len(data) > _MOST_HEADER_BYTES:
        raise ValueError(f"larger than {_MOST_HEADER_BYTES} bytes")
    return json.loads(data)


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a safetensors file, by its header. Raises DamagedWeightsError."""
    header, _ = _read_header(path)
    try:
        return {name: [int(size) for size in entry["shape"]] for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedWeightsError(f"{path.name} is not a safetensors file") from error


def _refuse_damaged(path: Path) -> None:
    """Raise DamagedWeightsError unless the file has the size that its header promises."""
    header, start = _read_header(path)
    try:
        ends = [entry["data_offsets"][1] for entry in header.values()]
        promised, size = start + max(ends, default=0), path.stat().st_size
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedWeightsError(f"{path.name} is not a safetensors file") from error
    if promised != size:
        raise DamagedWeightsError(
            f"{path.name} is damaged: {size} bytes where its header promises {promised}"
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What the header of a safetensors file says of each tensor, and where the tensors begin.

    Raises DamagedWeightsError.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if first == _POINTER and size < _MOST_POINTER_BYTES:
            raise DamagedWeightsError(
                f"{path.name} is a pointer of Git LFS, not a safetensors file: fetch the file with `git lfs pull`"
            )
        if size < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise DamagedWeightsError(f"{path.name} is not a safetensors file")
        if size < _LENGTH_BYTES + length:
            raise DamagedWeightsError(f"{path.name} is cut off inside its header")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise DamagedWeightsError(f"{path.name} is not a safetensors file") from error
    return tensors, _LENGTH_BYTES + length


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
    having = {path.parent for path in weight_files(directory)}
    if having and not (directory / "modules.json").is_file():
        return []
    places = [place for place in _module_directories(directory) if place not in having]
    return [str(place.relative_to(directory) / PICKLED) for place in places]


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
        cached = [path for path in weight_files(root, gguf) if path.is_file()]
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
    if not any(name.endswith((".safetensors", ".bin", ".gguf")) for name in sizes):
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
    files = weight_files(directory, gguf)
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
        check_weights(directory)
    except DamagedWeightsError as error:
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
