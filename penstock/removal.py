"""`penstock rm MODEL`: delete the files of models, as ollama's verb does.

1. A model of the hub goes out of the hub cache: all revisions of its repository, or of a repository with a GGUF model
   and others the files of the GGUF model that is named.
2. A model in a directory goes with its directory, or a GGUF file alone, where the directory has other files too.
3. A question names what will be deleted and how much; `--yes` answers the question. Nothing is asked where standard
   input is no terminal, and then nothing is deleted without `--yes`.

Files of packages and of operators' own code stay: the message says what deletes them. Exit code 1: a model is not on
this machine, or was not deleted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ipc.catalog.entries import AdapterSource, Catalog, DirectorySource, HubSource, ModelEntry, PackageSource
from ipc.catalog.reading import read_entries
from ipc.errors import ConfigError, PenstockError
from ipc.settings import Settings
from penstock import target, terminal

_WAIT_S = 2.0
_CONFIGS = frozenset(("config.json", "model_index.json"))
"""Files of which one must lie in a directory that is deleted whole, unless weights lie there."""


class NotRemoved(PenstockError):
    """The files of a model stay; the message says why."""


class Removed(msgspec.Struct):
    """What became of one name: the bytes that are deleted, or the reason why nothing is."""

    model: str
    bytes: int = 0
    error: str = ""


class Removal(NamedTuple):
    """What goes for one model: its bytes, a phrase that names the place, and the function that deletes."""

    nbytes: int
    place: str
    carry_out: Callable[[], None]


def add_parser(commands: Any, add_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `rm` to the commands; `add_flags` adds the flags that name settings."""
    parser = commands.add_parser("rm", help="delete the files of models from this machine, after a question")
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="+",
        type=target.text,
        help="id of catalog or hub, directory, GGUF file",
    )
    parser.add_argument("--yes", action="store_true", help="delete without a question")
    add_flags(parser)
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("rm BAAI/bge-m3", "takes a model out of the hub cache"),
        ("rm ./my-model --yes", "deletes a directory without a question"),
    )


def run(options: argparse.Namespace, config: Settings) -> int:
    """Delete what is named; returns the exit code. Raises `ConfigError` where nobody can be asked."""
    # NOTE: imported here, since machines with frontends only have none of the packages of workers.
    from penstock import processes

    if not (options.yes or sys.stdin.isatty()):
        raise ConfigError("rm asks before it deletes, and standard input is no terminal: add --yes")
    catalog = Catalog(read_entries(config.catalog.dirs).entries.values())
    results = []
    for name in dict.fromkeys(options.model):
        result = Removed(name)
        results.append(result)
        try:
            entry = _entry(name, catalog)
            removal = _removal(entry, config.catalog.dirs)
            loaded = processes.loaded(config.paths, config.worker_count, entry.id, _WAIT_S) is not None
            if not (options.yes or _agrees(name, removal, loaded=loaded)):
                raise NotRemoved("nothing is deleted")
            removal.carry_out()
            result.bytes = removal.nbytes
            if not options.json:
                print(f"{name}: {terminal.size(removal.nbytes)} deleted, {removal.place}")
        except (PenstockError, OSError) as error:
            result.error = error.message if isinstance(error, PenstockError) else str(error)
            print(f"penstock: rm {name}: {result.error}", file=sys.stderr)
    if options.json:
        print(terminal.as_json(results))
    return 1 if any(result.error for result in results) else 0


def _agrees(name: str, removal: Removal, *, loaded: bool) -> bool:
    note = "; a running server has the model loaded, and will not be able to load it again" if loaded else ""
    question = f"delete {name}, {terminal.size(removal.nbytes)}, {removal.place}{note}? [y/N] "
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _entry(name: str, catalog: Catalog) -> ModelEntry:
    """The entry of a model, whether or not its files say what the model is. Raises `NotRemoved`."""
    from penstock.own_models import gguf, places

    if name in catalog:
        return catalog[name]
    path = Path(name)
    if path.is_symlink():
        raise NotRemoved("a link; delete the link itself, or name the place that it leads to")
    if path.is_dir():
        return ModelEntry(name, DirectorySource(str(path.absolute())))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise NotRemoved("a file that is no model; a directory or a GGUF file can be named")
        return ModelEntry(name, DirectorySource(str(path.absolute().parent), path.name))
    repo, tag = gguf.split_tag(name)
    if not places.is_repository(repo):
        near = catalog.absence(name)
        raise NotRemoved(
            f"no model of the catalog, no directory, and no id of the hub{f'; {near}' if near else ''}"
        )
    return ModelEntry(name, HubSource(repo, gguf=tag and _cached_gguf(repo, tag)))


def _cached_gguf(repo: str, tag: str) -> str:
    """The GGUF file of the hub cache that a tag means. Raises `NotRemoved`."""
    from penstock.own_models import gguf
    from penstock.own_models.files import CannotTell

    names = {file.file_path.relative_to(each.snapshot_path).as_posix() for each, file in _files(repo)}
    try:
        return gguf.chosen(names, tag, f"{repo}:{{}}")
    except CannotTell as error:
        raise NotRemoved(f"not in the hub cache: {error.message}") from error


def _removal(entry: ModelEntry, catalogs: Iterable[str]) -> Removal:
    """What goes for a model; the directories `catalogs` stay. Raises `NotRemoved`."""
    where = entry.source
    if isinstance(where, HubSource):
        return _from_cache(where)
    if isinstance(where, PackageSource):
        package = where.package.replace("_", "-")
        raise NotRemoved(f"its files belong to the package {package}: `pip uninstall {package}` deletes them")
    if isinstance(where, AdapterSource):
        raise NotRemoved(f"code of your own in {where.path}, which you delete yourself")
    return _from_directory(Path(where.path), where.gguf, [Path(each).resolve() for each in catalogs])


def _files(repo: str) -> Iterable[tuple[Any, Any]]:
    """(revision, file) of a repository in the hub cache."""
    repository = _repository(repo)
    revisions = [] if repository is None else repository.revisions
    return [(each, file) for each in revisions for file in each.files]


def _repository(repo: str) -> Any:
    """A repository of models in the hub cache; None where there is none. Raises `NotRemoved`."""
    try:
        from huggingface_hub import CacheNotFound, constants, scan_cache_dir
    except ImportError:
        raise NotRemoved("without the extra `worker` there is no hub cache") from None
    try:
        cached = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return None
    return next((one for one in cached if one.repo_type == "model" and one.repo_id == repo), None)


def _from_cache(where: HubSource) -> Removal:
    """A repository of the hub cache, or one of its GGUF models where the cache has other models of the repository."""
    from workers.loading.gguf_file import choices, parts_of
    from workers.loading.source import WEIGHTS

    repository = _repository(where.repo)
    if repository is None:
        raise NotRemoved("not in the hub cache, so there is nothing to delete")
    paths = {file.file_path.relative_to(each.snapshot_path).as_posix() for each, file in _files(where.repo)}
    has_others = len(choices(sorted(paths))) > 1 or any(path.endswith((*WEIGHTS, ".onnx")) for path in paths)
    if where.gguf and has_others:
        names = set(parts_of(where.gguf))
        files = [
            (file.file_path.relative_to(each.snapshot_path).as_posix() in names, file)
            for each, file in _files(where.repo)
        ]
        links = [file.file_path for is_named, file in files if is_named]
        if not links:
            raise NotRemoved(f"{where.gguf} is not in the hub cache, so there is nothing to delete")
        # NOTE: a link may lead out of the cache, and files of the same content are one blob.
        shared_blobs = {file.blob_path for is_named, file in files if not is_named}
        root = repository.repo_path.resolve()
        sizes = {
            file.blob_path: file.size_on_disk
            for is_named, file in files
            if is_named
            and file.blob_path not in shared_blobs
            and file.blob_path.parent.resolve().is_relative_to(root)
        }

        def delete() -> None:
            for path in (*links, *sizes):
                path.unlink(missing_ok=True)

        return Removal(sum(sizes.values()), f"{where.gguf} in {repository.repo_path}", delete)
    # NOTE: `delete_revisions` of the library takes commits, and copies of a repository share commits.
    return Removal(
        repository.size_on_disk, f"in {repository.repo_path}", lambda: shutil.rmtree(repository.repo_path)
    )


def _from_directory(root: Path, gguf: str, catalogs: Iterable[Path]) -> Removal:
    """A directory, or a GGUF file where the directory has other files or stays. Raises `NotRemoved`."""
    from workers.loading.gguf_file import parts_of

    if not root.is_dir():
        raise NotRemoved(f"there is no directory {root}, so there is nothing to delete")
    at_top = {path.name for path in root.iterdir()}
    parts = [root / name for name in parts_of(gguf)] if gguf else []
    if gguf and any(not part.is_file() for part in parts):
        raise NotRemoved(f"there is no {root / gguf}, so there is nothing to delete")
    if gguf and (at_top != {part.name for part in parts} or _stays(root, at_top, catalogs)):

        def delete() -> None:
            for part in parts:
                part.unlink(missing_ok=True)

        return Removal(_nbytes(parts), str(parts[0]), delete)
    _refuse_more(root, at_top, catalogs)
    files = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    return Removal(
        _nbytes(files), f"the whole directory {root}, files: {len(files)}", lambda: shutil.rmtree(root)
    )


def _nbytes(files: Iterable[Path]) -> int:
    return sum(path.lstat().st_size for path in files)


def _stays(root: Path, at_top: Collection[str], catalogs: Iterable[Path]) -> bool:
    try:
        _refuse_more(root, at_top, catalogs)
    except NotRemoved:
        return True
    return False


def _refuse_more(root: Path, at_top: Collection[str], catalogs: Iterable[Path]) -> None:
    """Raise `NotRemoved` for a directory that holds more than a model; `at_top` are the names in the directory."""
    from workers.loading.source import WEIGHTS

    if root.is_symlink():
        raise NotRemoved(f"{root} is a link; delete the link itself, or name the place that it leads to")
    real = root.resolve()
    if Path.home().resolve().is_relative_to(real) or Path.cwd().is_relative_to(real):
        raise NotRemoved(f"{root} holds your home or the working directory, and stays")
    if inside := next((each for each in catalogs if each.is_relative_to(real)), None):
        raise NotRemoved(f"{root} holds the catalog directory {inside}, and stays")
    if not (
        _CONFIGS.intersection(at_top) or any(name.endswith((*WEIGHTS, ".gguf", ".onnx")) for name in at_top)
    ):
        raise NotRemoved(f"{root} has no configuration and no weights of a model, and stays")
