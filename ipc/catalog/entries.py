"""The entries of models, and the catalog of those that are served (`ipc.catalog.reading` reads both from files).

A model names its source (hub id, directory, or installed package), its adapter, its outputs, and its profiles.
Every non-default profile is also a model of its own, `<id>:<profile>`, and so is every LoRA adapter of a model that
generates text. Unknown keys are refused.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ipc import yaml_text
from ipc.catalog import ids
from ipc.catalog.ids import is_repository, split_id
from ipc.errors import ConfigError, ModelNotFound

Files = frozenset[tuple[str, int, int, int]]
"""(path, size, time in nanoseconds, inode) of files."""
ENCODE_OUTPUTS = ("dense", "sparse", "multivector")
MOST_DIFFERENCE, MOST_COMPARED = 8, 100
"""Of names that are compared with an unknown one: difference in characters, and how many."""
LORA_PART = "[A-Za-z0-9._-]{1,64}"
ID = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}(:[A-Za-z0-9._-]{1,64})?\Z"
_FIELD = re.compile(r"^[\w.-]+(?=: )")
ADAPTER_FILE = ".py:"
"""What tells an adapter in a file, `adapter.py:Class`, from one in a module."""
DEFAULT_SIMILARITY = {"dense": "cosine", "sparse": "dot", "multivector": "maxsim"}


GgufName = Annotated[str, msgspec.Meta(pattern=r"^\Z|^(?!/)(?!.*\.\./).+\.gguf\Z")]
"""A file of a model's directory, with the folders before the file, or empty."""


class HubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hub"):
    """A repository on the model hub, by id and optional commit, branch or tag.

    `files` names further files that the family reads, such as heads in a format of their own; `tokenizer_repo` is the
    repository whose configuration and tokenizer the model borrows; `gguf` is the GGUF file that holds the model.
    """

    repo: str
    revision: str | None = None
    files: tuple[str, ...] = ()
    tokenizer_repo: str | None = None
    gguf: GgufName = ""


class DirectorySource(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="directory"
):
    """A directory on this machine; a relative path is taken from the catalog file.

    `gguf` is the GGUF file in the directory that holds the model, of a model in parts the first.
    """

    path: str
    gguf: GgufName = ""


class PackageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="package"):
    """A directory inside an installed Python package; `gguf` as in `DirectorySource`."""

    package: str
    path: str = "model"
    gguf: GgufName = ""


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="adapter"):
    """The adapter needs no files of weights, or finds them by itself; `path` is the directory that the adapter gets."""

    path: str = "."


Source = HubSource | DirectorySource | PackageSource | AdapterSource
LoraSource = HubSource | DirectorySource


def gguf_of(entry: ModelEntry) -> str:
    """The GGUF file of a model in its directory; empty for a model in another format."""
    return "" if isinstance(entry.source, AdapterSource) else entry.source.gguf


Similarity = Literal["cosine", "dot", "maxsim"]
QUANTIZED = ("int8", "int4", "fp8")
"""Precisions of the weights of linear layers alone, of models that generate text."""
Precision = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]
ServedName = Annotated[str, msgspec.Meta(pattern=ids.SERVED_NAME)]
Count = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
"""A positive number that messages can tell."""
Tokens = Count


TEXT = "chat"
"""The output of models that generate text."""


class OutputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of a model: its width and how two of them are compared."""

    dims: Count | None = None
    similarity: Similarity | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named variation of a model. A non-empty `runtime` or `loadtime` replaces the parent's whole map.

    `adapter`, `precision` and `max_batch_tokens` are the parent's, then the model's, where they are absent;
    `similarity` says by output how two of this profile are compared where that differs from the model.
    """

    extends: str | None = None
    output_types: tuple[str, ...] = ()
    runtime: dict[str, Any] = {}
    loadtime: dict[str, Any] = {}
    precision: Precision | None = None
    adapter: str | None = None
    similarity: dict[str, Similarity] = {}
    max_batch_tokens: Tokens | None = None


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model as the operator describes it.

    `proof` is the text of the canned inference after a load, `fingerprint` the first values of its first output, which
    every load must give. `replicas` is the number of workers that have the model once one of them has. `loras` are the
    LoRA adapters that requests may name, in PEFT's layout. `adapter` is a family, "package.module:Class", or
    "adapter.py:Class" of a file beside the entry's, whose content `code` stands for. No batch has more than
    `max_batch_tokens`. `preload` false keeps the model out of what `catalog.preload: auto` loads. `served_name` is a
    further name of the model, or several. With `replaces` the entry takes the place of the entry with this id in an
    earlier catalog directory. `error` says for clients why the model cannot be loaded, where its file is wrong.
    """

    id: Annotated[str, msgspec.Meta(pattern=ID)]
    source: Source
    adapter: str = "dense"
    inputs: tuple[str, ...] = ("text",)
    outputs: dict[str, OutputSpec] = msgspec.field(default_factory=lambda: {"dense": OutputSpec()})
    max_sequence_length: Count | None = None
    max_batch_tokens: Tokens | None = None
    precision: Precision | None = None
    runtime: dict[str, Any] = {}
    loadtime: dict[str, Any] = {}
    profiles: dict[str, Profile] = {}
    dimensions: tuple[Count, ...] = ()
    proof: str = "hello world"
    fingerprint: tuple[float, ...] = ()
    replicas: Count | None = None
    loras: dict[str, LoraSource] = {}
    served: bool = True
    preload: bool = True
    # NOTE: a `ServedName` here, beside another type, makes msgspec 0.22 crash at the end of the process.
    served_name: str | tuple[ServedName, ...] = ()
    replaces: bool = False
    code: str = ""
    error: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for one name of another form; names in a list are checked by their type."""
        if isinstance(self.served_name, str):
            try:
                msgspec.convert(self.served_name, ServedName)
            except msgspec.ValidationError as error:
                raise ValueError(f"served_name: {error}") from None

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model besides its id."""
        return (self.served_name,) if isinstance(self.served_name, str) else self.served_name

    @property
    def text_loras(self) -> tuple[str, ...]:
        """LoRA adapters of a model that generates text, each a variant of the model as profiles are."""
        names = self.loras if TEXT in self.outputs else ()
        return tuple(name for name in names if name not in self.profiles)

    @property
    def encode_outputs(self) -> tuple[str, ...]:
        """Outputs of the encode operation, in the contract's order."""
        return tuple(name for name in ENCODE_OUTPUTS if name in self.outputs)

    @property
    def default_outputs(self) -> tuple[str, ...]:
        """Outputs used when the request names none and a profile does not either."""
        chosen = self.profiles["default"].output_types if "default" in self.profiles else ()
        return chosen or (("dense",) if "dense" in self.outputs else self.encode_outputs)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The model's adapter and those that profiles name, each once."""
        named = (profile.adapter for profile in self.profiles.values())
        return tuple(dict.fromkeys((self.adapter, *(name for name in named if name))))


class BadFile(ConfigError):
    """What is wrong with one catalog file, with its place.

    `text` is for clients too. `entry` stands for the model of the file, without options, and has `text` as its error;
    None where the file names no model.
    """

    def __init__(self, path: Path, line: int, text: str, entry: ModelEntry | None) -> None:
        super().__init__(f"{path}:{line}: {text}")
        self.path, self.text = path, text
        self.entry = None if entry is None else _without_options(entry, text)


def _without_options(entry: ModelEntry, error: str) -> ModelEntry:
    """The entry of a bad file: no message can tell options that are no JSON, and they may be the mistake."""
    profiles = {
        name: msgspec.structs.replace(profile, runtime={}, loadtime={})
        for name, profile in entry.profiles.items()
    }
    return msgspec.structs.replace(
        entry, error=error, runtime={}, loadtime={}, profiles=profiles, served_name=()
    )


class Reading(NamedTuple):
    """What catalog directories hold: all entries by id, served or not, the files of each, and the bad files."""

    entries: dict[str, ModelEntry]
    places: dict[str, Path]
    bad: list[BadFile]

    def mistake(self, name: str, text: str) -> BadFile:
        """A mistake of the entry `name` with its place; `text` begins with the field."""
        return bad_file(self.places[name], text, self.entries[name])


class Catalog(Mapping[str, ModelEntry]):
    """All models that may be served, by id; variants of profiles included.

    A look-up also finds a model by its other names (`aliases`: name to id), which iterating leaves out.
    `files` is what they were read from, at `read_ns` (CLOCK_MONOTONIC); `sources` are the entries as they were read,
    without variants. `versions` are those of each model of a repository, ascending; `<name>@<version>` is the id of one
    (`ipc.catalog.repository`). `reading` is what the catalog's directories hold, where the process read them, and
    `names` the ids of the entries there, served or not.
    """

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        files: Files = frozenset(),
        reading: Reading | None = None,
        read_ns: int = 0,
        names: Collection[str] | None = None,
    ) -> None:
        self.files, self.sources = files, tuple(entries)
        self.reading = reading or Reading({}, {}, [])
        self.read_ns = read_ns or time.monotonic_ns()
        self.names = frozenset(self.reading.entries if names is None else names)
        self._entries = {variant.id: variant for entry in self.sources for variant in _variants(entry)}
        self.aliases = dict(_aliases(self.sources))
        self._named = {name: self._entries[model] for name, model in self.aliases.items()} | self._entries
        self.versions = _versions(self._entries)

    @property
    def entries(self) -> list[ModelEntry]:
        """All of them at one moment; safe in any thread, as iterating is not while the catalog may be replaced."""
        return list(self._entries.values())

    def replace(self, other: Catalog) -> None:
        """Serve the entries of `other` from now on; every holder of this catalog sees the change."""
        self._entries, self.files, self.sources = other._entries, other.files, other.sources
        self._named, self.aliases = other._named, other.aliases
        self.versions, self.reading = other.versions, other.reading
        self.read_ns, self.names = other.read_ns, other.names

    def keeping(self, before: Iterable[ModelEntry]) -> Catalog:
        """This catalog where models of bad files go on as `before`, the sources served so far, has them.

        A bad file that names no model may describe any model that is missing now, so no missing model goes.
        """
        bad_files = self.reading.bad
        if not bad_files:
            return self
        good = {e.id: e for e in before if not e.error and "@" not in e.id}
        bad = {file.entry.id for file in bad_files if file.entry is not None}
        sources = [good.get(entry.id, entry) if entry.id in bad else entry for entry in self.sources]
        if any(file.entry is None for file in bad_files):
            there = {entry.id for entry in self.sources}
            sources += [entry for name, entry in good.items() if name not in there]
        return Catalog(sources, self.files, self.reading, self.read_ns, self.names)

    def __getitem__(self, name: str) -> ModelEntry:
        return self._named[name]

    def __contains__(self, name: object) -> bool:
        # PERF: every request asks. `Mapping.__contains__` would look the entry up and catch a KeyError.
        return name in self._named

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def id_of(self, name: str) -> str:
        """The id of the model of that name; a name that no model has is given back."""
        return self.aliases.get(name, name)

    def find(self, name: str) -> ModelEntry:
        """The entry of that exact name. Raises `ModelNotFound` with `absence`."""
        entry = self._named.get(name)
        if entry is None:
            why = self.absence(name)
            raise ModelNotFound(f"Model {name[:200]!a} not found" + (f"; {why}" if why else ""))
        return entry

    def absence(self, name: str) -> str:
        """Why no model of that name is served, or which name is near, for clients; empty when nothing is known."""
        model = name[:200].partition(":")[0]
        known = {*self.names, *self._named, *self.versions}
        whole = model if model in known else next((n for n in known if n.rpartition("/")[2] == model), None)
        # PERF: frontends ask in their event loop, and comparing two long names takes tens of microseconds.
        alike = [n for n in known if abs(len(n) - len(model)) <= MOST_DIFFERENCE and "@" not in n][
            :MOST_COMPARED
        ]
        near = whole or next(iter(difflib.get_close_matches(model, alike, n=1)), None)
        if near is None:
            return ""
        unserved = near not in self._named and near not in self.versions
        how = f"this server does not serve {near!r}: start it with --models {near} (catalog.models), or all of them "
        how += "with catalog.serve_all"
        if near == model:
            return f"the catalog has the model, but {how}" if unserved else ""
        return f"did you mean {near!r}?" + (f" {how[0].upper()}{how[1:]}" if unserved else "")


def _aliases(entries: Sequence[ModelEntry]) -> Iterable[tuple[str, str]]:
    """(further name, id) of models, of their profiles, and of LoRA adapters that one model alone has.

    A LoRA adapter goes by its own name unless a model has the name.
    """
    bases: dict[str, list[str]] = {}
    for entry in entries:
        for lora in entry.text_loras:
            bases.setdefault(lora, []).append(entry.id)
    yield from ((lora, f"{models[0]}:{lora}") for lora, models in bases.items() if len(models) == 1)
    for entry in entries:
        for name in entry.served_names:
            yield name, entry.id
            others = (*(profile for profile in entry.profiles if profile != "default"), *entry.text_loras)
            yield from ((f"{name}:{other}", f"{entry.id}:{other}") for other in others)


def _versions(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    by_model: dict[str, list[int]] = {}
    for name in names:
        if is_repository(name):
            model, version = split_id(name)
            by_model.setdefault(model, []).append(version)
    return {model: tuple(sorted(versions)) for model, versions in by_model.items()}


def is_lora_name(name: str) -> bool:
    """Whether a LoRA adapter may have this name. Such a name never leads out of a directory."""
    parts = name.split("/")
    return len(parts) <= 2 and all(re.fullmatch(LORA_PART, part) and part.strip(".") for part in parts)


def _variants(entry: ModelEntry) -> Iterable[ModelEntry]:
    default = entry.profiles.get("default", Profile())
    model = msgspec.structs.replace(
        entry,
        runtime=default.runtime or entry.runtime,
        loadtime=default.loadtime or entry.loadtime,
        precision=default.precision or entry.precision,
        adapter=default.adapter or entry.adapter,
        max_batch_tokens=default.max_batch_tokens or entry.max_batch_tokens,
    )
    yield model
    for name in entry.text_loras:
        runtime = {**model.runtime, "lora": name}
        yield msgspec.structs.replace(model, id=f"{entry.id}:{name}", runtime=runtime, profiles={})
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
            adapter=profile.adapter or parent.adapter or entry.adapter,
            max_batch_tokens=profile.max_batch_tokens or parent.max_batch_tokens or entry.max_batch_tokens,
            profiles={"default": Profile(output_types=profile.output_types, similarity=profile.similarity)},
        )


def bad_file(path: Path, text: str, entry: ModelEntry | None) -> BadFile:
    """The mistake `text` with the line of its field."""
    stated = re.findall(r"\bline (\d+)", text)
    try:
        line = int(stated[-1]) if stated else yaml_text.line_of(path.read_bytes(), _place_of(text))
    except OSError:
        line = 1
    return BadFile(path, line, text, entry)


def _place_of(text: str) -> list[str]:
    """The field that the text of a mistake is about, as msgspec or this module names it."""
    stated = re.search(r"`\$([^`]*)`", text)
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if stated or unknown:
        # NOTE: msgspec says [...] for the key of a map; the line of the map is shown then.
        parts = re.findall(r"[\w-]+", stated[1].partition("[")[0]) if stated else []
        hidden = stated is not None and "[" in stated[1]
        return [*parts, *([unknown[1]] if unknown and not hidden else [])]
    field = _FIELD.match(text)
    return field[0].split(".") if field else []
