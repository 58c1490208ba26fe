"""Which models are served: one YAML file per model, read from one or more directories.

A model names its source (hub id, directory, or installed package), its adapter, what it outputs, and its profiles.
Every non-default profile is also a model of its own, `<id>:<profile>`. Unknown keys are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ipc.errors import ConfigError, ModelNotFound
from ipc.paths import asset

ENCODE_OUTPUTS = ("dense", "sparse", "multivector")
DEFAULT_SIMILARITY = {"dense": "cosine", "sparse": "dot", "multivector": "maxsim"}


class HubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hub"):
    """A repository on the model hub, by id and optional commit, branch or tag."""

    repo: str
    revision: str | None = None


class DirectorySource(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="directory"
):
    """A directory on this machine; a relative path is taken from the catalog file."""

    path: str


class PackageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="package"):
    """A directory inside an installed Python package."""

    package: str
    path: str = "model"


Source = HubSource | DirectorySource | PackageSource


class OutputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of a model: its width and how two of them are compared."""

    dims: Annotated[int, msgspec.Meta(gt=0)] | None = None
    similarity: Literal["cosine", "dot", "maxsim"] | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named variation of a model. A non-empty `runtime` or `loadtime` replaces the parent's whole map."""

    extends: str | None = None
    output_types: tuple[str, ...] = ()
    runtime: dict[str, Any] = {}
    loadtime: dict[str, Any] = {}
    precision: Literal["float32", "bfloat16", "float16"] | None = None


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model as the operator describes it."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}(:[A-Za-z0-9._-]{1,64})?$")]
    source: Source
    adapter: str = "dense"
    inputs: tuple[str, ...] = ("text",)
    outputs: dict[str, OutputSpec] = msgspec.field(default_factory=lambda: {"dense": OutputSpec()})
    max_sequence_length: Annotated[int, msgspec.Meta(gt=0)] | None = None
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    runtime: dict[str, Any] = {}
    loadtime: dict[str, Any] = {}
    profiles: dict[str, Profile] = {}
    dimensions: tuple[int, ...] = ()
    proof: str = "hello world"
    served: bool = True
    description: str = ""

    @property
    def encode_outputs(self) -> tuple[str, ...]:
        """Outputs of the encode operation, in the contract's order."""
        return tuple(name for name in ENCODE_OUTPUTS if name in self.outputs)

    @property
    def default_outputs(self) -> tuple[str, ...]:
        """Outputs used when the request names none and a profile does not either."""
        chosen = self.profiles["default"].output_types if "default" in self.profiles else ()
        return chosen or (("dense",) if "dense" in self.outputs else self.encode_outputs)


class Catalog(Mapping[str, ModelEntry]):
    """All models that may be served, by id; variants of profiles included."""

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self._entries = {variant.id: variant for entry in entries for variant in _variants(entry)}

    def __getitem__(self, name: str) -> ModelEntry:
        return self._entries[name]

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> ModelEntry:
        """The entry of that exact name. Raises `ModelNotFound` with the nearest known name."""
        entry = self._entries.get(name)
        if entry is None:
            shown = ascii(name[:200])
            close = difflib.get_close_matches(name[:200], self._entries, n=1)
            raise ModelNotFound(
                f"Model {shown} not found" + (f"; did you mean '{close[0]}'?" if close else "")
            )
        return entry


def _variants(entry: ModelEntry) -> Iterable[ModelEntry]:
    default = entry.profiles.get("default", Profile())
    yield msgspec.structs.replace(
        entry,
        runtime=default.runtime or entry.runtime,
        loadtime=default.loadtime or entry.loadtime,
        precision=default.precision or entry.precision,
    )
    for name, profile in entry.profiles.items():
        if name == "default":
            continue
        parent = entry.profiles.get(profile.extends or "", Profile())
        yield msgspec.structs.replace(
            entry,
            id=f"{entry.id}:{name}",
            runtime=profile.runtime or parent.runtime or entry.runtime,
            loadtime=profile.loadtime or parent.loadtime or entry.loadtime,
            precision=profile.precision or parent.precision or entry.precision,
            profiles={"default": Profile(output_types=profile.output_types)},
        )


def _check(entry: ModelEntry, path: Path) -> None:
    for name, profile in entry.profiles.items():
        parent = entry.profiles.get(profile.extends) if profile.extends else None
        if profile.extends and (parent is None or parent.extends or profile.extends == name):
            raise ConfigError(f"{path}: profile {name!r} must extend one existing profile that extends none")
        unknown = set(profile.output_types) - set(entry.outputs)
        if unknown:
            raise ConfigError(f"{path}: profile {name!r} names outputs the model lacks: {sorted(unknown)}")


def read_entry(path: Path) -> ModelEntry:
    """One catalog file. Raises `ConfigError` that names the file and the field."""
    try:
        entry = msgspec.yaml.decode(path.read_bytes(), type=ModelEntry)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _check(entry, path)
    if isinstance(entry.source, DirectorySource) and not Path(entry.source.path).is_absolute():
        source = DirectorySource(str((path.parent / entry.source.path).resolve()))
        entry = msgspec.structs.replace(entry, source=source)
    return entry


def load_catalog(dirs: Iterable[str], models: Iterable[str] = ()) -> Catalog:
    """Read every `*.yaml` below `dirs` (empty: the shipped catalog); `models` filters by id.

    Raises `ConfigError` for an unreadable file, a duplicate id, a missing directory, or a filter that names no model.
    """
    roots = [Path(d) for d in dirs] or [asset("config/models")]
    entries: dict[str, ModelEntry] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"catalog directory {root} does not exist")
        for path in sorted(root.rglob("*.yaml")):
            entry = read_entry(path)
            if entry.id in entries:
                raise ConfigError(f"{path}: model {entry.id!r} is defined twice")
            entries[entry.id] = entry
    wanted = list(models)
    for name in wanted:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1)
            raise ConfigError(
                f"catalog.models: unknown model {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    chosen = [entries[name] for name in wanted] if wanted else [e for e in entries.values() if e.served]
    if not chosen:
        raise ConfigError("the catalog serves no model")
    return Catalog(chosen)
