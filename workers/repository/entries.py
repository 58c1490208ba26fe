"""Catalog entries of the models of a repository: one for each version that the model's policy chooses.

An entry is made from the files without opening a program. Whatever is wrong with a model becomes the `error` of its
entries, with which their load fails; so one bad model does not keep others away.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec

from ipc.catalog.entries import AdapterSource, DirectorySource
from ipc.catalog.ids import NO_VERSION, id_of
from ipc.catalog.model_config import ModelConfig, TensorConfig, VersionPolicy
from ipc.catalog.repository import (
    EVERY_WORKER,
    MOST_CONFIG_NBYTES,
    VersionEntry,
    Wish,
    model_directories,
)
from ipc.errors import InvalidInput, ModelLoadFailed
from ipc.protos import model_config_pb2 as schema
from ipc.settings import Repository
from ipc.store.wishes import Wishes
from workers.repository import configuration, layout
from workers.repository.layout import PROGRAMS, ModelRefused

log = logging.getLogger(__name__)

CONFIG = "config"
"""The name in messages of a configuration that a load brought."""


class RepositoryEntry(VersionEntry, frozen=True, kw_only=True):
    """One version of a repository model as a worker loads it; the entry's source is the version's directory.

    `program` is the file in the source's directory, `directory` that of the model. `batch_stated` tells that the
    configuration has a `max_batch_size`, be it 0. `default_batch` is the largest batch where the program has to tell.
    """

    directory: str
    program: str = ""
    batch_stated: bool = False
    default_batch: int = 0

    @property
    def infers_batch(self) -> bool:
        """Whether the configuration leaves `max_batch_size`, inputs and outputs to the program."""
        return not (self.batch_stated or self.config.inputs or self.config.outputs)

    def told(self) -> VersionEntry:
        """The part of the entry that frontends need, without paths."""
        facts = {name: getattr(self, name) for name in VersionEntry.__struct_fields__}
        # NOTE: an error may quote the name of a file, which need not be text.
        error = self.error.encode("utf-8", "replace").decode()
        return VersionEntry(**facts | {"source": AdapterSource(), "error": error})


def read(
    repository: Repository, wishes: Wishes | None = None, taken: Container[str] = ()
) -> list[RepositoryEntry]:
    """The entries of all models, with what `wishes` bring in the place of the models on disk.

    A model that only a load brought is left out when its name is `taken`.

    Raises `ConfigError` for a missing directory or a model that is in two of them.
    """
    brought = wishes.brought() if wishes is not None else {}
    entries = {
        model: _of_model(model, directory.parent, repository, brought.get(model), wishes)
        for model, directory in model_directories(repository.dirs).items()
    }
    for model, wish in brought.items():
        if wish.files and model not in entries:
            if model in taken:
                log.error("model %a, which a load brought, is left out: a catalog model has its name", model)
            else:
                entries[model] = _of_model(model, None, repository, wish, wishes)
    return [entry for versions in entries.values() for entry in versions]


def refuse_draft(repository: Repository, wishes: Wishes, model: str, draft: Wish) -> None:
    """Raise the mistake that the load of a wish would find in the files, before the wish is in force.

    Raises `InvalidInput` with the mistake, and `ModelLoadFailed` for a configuration of a model that no repository has.
    """
    root = next((root for root in map(Path, repository.dirs) if (root / model).is_dir()), None)
    if not (root or draft.files):
        raise ModelLoadFailed("the repository has no such model")
    versions = _of_model(model, root, repository, draft, wishes)
    if all(entry.error for entry in versions):
        raise InvalidInput(versions[-1].error)


def _of_model(
    model: str, root: Path | None, repository: Repository, wish: Wish | None, wishes: Wishes | None
) -> list[RepositoryEntry]:
    """The entries of a model in the repository `root`, or of the files that its wish brings."""
    if wish is not None and wish.files:
        assert wishes is not None
        root = wishes.root_of(wish)
    assert root is not None
    return list(_entries(root, root / model, repository, wish))


def _entries(
    root: Path, directory: Path, chosen: Repository, wish: Wish | None = None
) -> Iterator[RepositoryEntry]:
    """The entries of one model, at least one."""
    name, batch_stated, problem = directory.name, False, ""
    config = ModelConfig(name)
    try:
        layout.inside(root, directory, chosen.follow_links)
        message = _message(root, directory, chosen, wish)
        if message is not None:
            batch_stated, config = message.HasField("max_batch_size"), configuration.convert(message, name)
            config = with_labels(config, root, directory, chosen.follow_links)
    except ModelRefused as error:
        problem = str(error)
    except OSError as error:
        problem = _unreadable(error)
    versions = _chosen(directory, config.version_policy)
    problem = problem or _missing(config.version_policy) * (not versions)
    for version in versions or (NO_VERSION,):
        entry = RepositoryEntry(
            id=id_of(name, version),
            source=DirectorySource(str(directory / str(version))),
            model=name,
            version=version,
            config=config,
            batch_stated=batch_stated,
            directory=str(directory),
            inputs=(),
            outputs={},
            replicas=EVERY_WORKER,
            preload=chosen.control == "none" or name in chosen.models,
            code=layout.stamp(directory, version) + (wish.digest if wish is not None else ""),
            default_batch=chosen.default_max_batch_size,
        )
        yield _refused(entry, problem) if problem else _with_program(entry, root, chosen)


def _message(root: Path, directory: Path, chosen: Repository, wish: Wish | None) -> schema.ModelConfig | None:
    """The configuration of a model, None where there is none. Raises `ModelRefused`."""
    if wish is not None and wish.config is not None:
        return configuration.parse_json(CONFIG, wish.config.encode())
    file = configuration.read(root, directory, chosen.follow_links)
    return None if file is None else file[1]


def _with_program(entry: RepositoryEntry, root: Path, chosen: Repository) -> RepositoryEntry:
    place = Path(entry.directory) / str(entry.version)
    try:
        layout.inside(root, place, chosen.follow_links)
        backend, file = layout.program_file(place, entry.config.backend, entry.config.default_model_filename)
        layout.inside(root, place / file, chosen.follow_links)
        configuration.check_decoupled(entry.config, backend)
    except ModelRefused as error:
        return _refused(entry, str(error))
    except OSError as error:
        return _refused(entry, _unreadable(error))
    config = msgspec.structs.replace(entry.config, backend=backend, platform=entry.config.platform or backend)
    entry = msgspec.structs.replace(entry, adapter=backend, program=file, config=config)
    if backend == "python_model" and not chosen.allow_python:
        return _refused(entry, f"{file} is not run (repository.allow_python is off)")
    return entry


def _unreadable(error: OSError) -> str:
    return f"the files cannot be read: {error.strerror or type(error).__name__}"


def _refused(entry: RepositoryEntry, problem: str) -> RepositoryEntry:
    log.warning("repository model %s cannot be loaded: %s", entry.id, problem)
    return msgspec.structs.replace(entry, adapter=entry.config.backend or next(iter(PROGRAMS)), error=problem)


def _chosen(directory: Path, policy: VersionPolicy) -> tuple[int, ...]:
    """The versions that are there and that the policy chooses, ascending."""
    try:
        versions = layout.versions(directory)
    except OSError:
        return ()
    if policy.kind == "specific":
        absent = sorted(set(policy.specific) - set(versions))
        if absent:
            log.warning("repository model %s has no version %s", directory.name, ", ".join(map(str, absent)))
        return tuple(version for version in versions if version in policy.specific)
    return versions if policy.kind == "all" else versions[-policy.latest :]


def _missing(policy: VersionPolicy) -> str:
    if policy.kind == "specific":
        return f"none of the versions {list(policy.specific)} is there"
    return "there is no version: no directory with a number for a name"


MOST_LABELS = 100_000


def with_labels(config: ModelConfig, root: Path, directory: Path, follow_links: bool) -> ModelConfig:
    """The configuration with the labels that its outputs name. Raises `ModelRefused`."""
    if not any(output.label_filename for output in config.outputs):
        return config
    outputs = tuple(_labelled(output, root, directory, follow_links) for output in config.outputs)
    return msgspec.structs.replace(config, outputs=outputs)


def _labelled(output: TensorConfig, root: Path, directory: Path, follow_links: bool) -> TensorConfig:
    if not output.label_filename:
        return output
    field = f"output {output.name[:200]!a}: label_filename"
    path = layout.named_file(directory, output.label_filename, field)
    labels = read_labels(layout.inside(root, path, follow_links))
    return msgspec.structs.replace(output, labels=labels)


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels of a file, without white space around them. Raises `ModelRefused` naming file and line."""
    lines = configuration.read_bounded(path, MOST_CONFIG_NBYTES).split(b"\n")
    if lines[-1].strip() == b"":
        lines.pop()
    if len(lines) > MOST_LABELS:
        raise ModelRefused(f"{path.name}: {len(lines)} lines; the limit is {MOST_LABELS}")
    labels = []
    for number, line in enumerate(lines, 1):
        try:
            labels.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{path.name}:{number}: no UTF-8") from error
    return tuple(labels)
