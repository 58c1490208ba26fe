"""Which models are served: one YAML file per model, read from one or more directories.

A model names its source (hub id, directory, or installed package), its adapter, its outputs, and its profiles.
Every non-default profile is also a model of its own, `<id>:<profile>`. Unknown keys are refused. A file in SIE's own
layout (`ipc.catalog.sie_layout`) may lie beside ours.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ipc import yaml_text
from ipc.catalog import ids, sie_layout
from ipc.catalog.ids import is_repository, split_id
from ipc.catalog.option_names import FAMILY_OPTIONS, SHARED_OPTIONS
from ipc.errors import ConfigError, ModelNotFound
from ipc.processes.paths import asset
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository

Files = frozenset[tuple[str, int, int, int]]
"""(path, size, time in nanoseconds, inode) of files."""
ENCODE_OUTPUTS = ("dense", "sparse", "multivector")
ALL = "*"
AUTO = "auto"
MOST_LEVELS = 32
"""Nesting of options in a catalog file."""
MOST_DIFFERENCE, MOST_COMPARED = 8, 100
"""Of names that are compared with an unknown one: difference in characters, and how many."""
LORA_PART = "[A-Za-z0-9._-]{1,64}"
ID = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}(:[A-Za-z0-9._-]{1,64})?$"
ID_LINE = re.compile(rb"^(?:sie_)?id:[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)
_FIELD = re.compile(r"^[\w.-]+(?=: )")
_UNLISTED = (
    "; only `penstock serve` finds a model by its path or hub id, `penstock models add` writes its entry"
)
ADAPTER_FILE = ".py:"
"""What tells an adapter in a file, `adapter.py:Class`, from one in a module."""
DEFAULT_SIMILARITY = {"dense": "cosine", "sparse": "dot", "multivector": "maxsim"}


GgufName = Annotated[str, msgspec.Meta(pattern=r"^$|^(?!/)(?!.*\.\./).+\.gguf$")]
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
Precision = Literal["float32", "bfloat16", "float16"]
ServedName = Annotated[str, msgspec.Meta(pattern=ids.SERVED_NAME)]
Count = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
"""A positive number that messages can tell."""
Tokens = Count


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
        return _bad(self.places[name], text, self.entries[name])


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
        kept = [good.get(entry.id, entry) if entry.id in bad else entry for entry in self.sources]
        if any(file.entry is None for file in bad_files):
            there = {entry.id for entry in self.sources}
            kept += [entry for name, entry in good.items() if name not in there]
        return Catalog(kept, self.files, self.reading, self.read_ns, self.names)

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


def _aliases(entries: Iterable[ModelEntry]) -> Iterable[tuple[str, str]]:
    """(further name, id) of models, and of their profiles."""
    for entry in entries:
        for name in entry.served_names:
            yield name, entry.id
            others = (profile for profile in entry.profiles if profile != "default")
            yield from ((f"{name}:{profile}", f"{entry.id}:{profile}") for profile in others)


def _versions(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for name in names:
        if is_repository(name):
            model, version = split_id(name)
            found.setdefault(model, []).append(version)
    return {model: tuple(sorted(versions)) for model, versions in found.items()}


def is_lora_name(name: str) -> bool:
    """Whether a LoRA adapter may have this name. Such a name never leads out of a directory."""
    parts = name.split("/")
    return len(parts) <= 2 and all(re.fullmatch(LORA_PART, part) and part.strip(".") for part in parts)


def _variants(entry: ModelEntry) -> Iterable[ModelEntry]:
    default = entry.profiles.get("default", Profile())
    yield msgspec.structs.replace(
        entry,
        runtime=default.runtime or entry.runtime,
        loadtime=default.loadtime or entry.loadtime,
        precision=default.precision or entry.precision,
        adapter=default.adapter or entry.adapter,
        max_batch_tokens=default.max_batch_tokens or entry.max_batch_tokens,
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
            adapter=profile.adapter or parent.adapter or entry.adapter,
            max_batch_tokens=profile.max_batch_tokens or parent.max_batch_tokens or entry.max_batch_tokens,
            profiles={"default": Profile(output_types=profile.output_types, similarity=profile.similarity)},
        )


def _check(entry: ModelEntry, own_layout: bool) -> None:
    """Raise `ValueError` that begins with the field, for a value that fits its type and is wrong all the same."""
    for name in ("code", "error"):
        if getattr(entry, name):
            raise ValueError(f"{name}: unknown field")
    for name, profile in entry.profiles.items():
        parent = entry.profiles.get(profile.extends) if profile.extends else None
        if profile.extends and (parent is None or parent.extends or profile.extends == name):
            raise ValueError(f"profiles: profile {name!r} must extend one existing profile that extends none")
        made = {"dense"} if profile.runtime.get("muvera") is not None else set()
        unknown = {*profile.output_types, *profile.similarity} - {*entry.outputs, *made}
        if unknown:
            raise ValueError(f"profiles: profile {name!r} names outputs the model lacks: {sorted(unknown)}")
    for name in entry.loras:
        if not is_lora_name(name):
            raise ValueError(f"loras: {name!r} is no name of one or two parts of {LORA_PART}")
    owners: dict[str, ModelEntry | Profile] = {"": entry}
    owners |= {f"profiles.{name}.": profile for name, profile in entry.profiles.items()}
    for place, owner in owners.items():
        for field in ("runtime", "loadtime"):
            options = getattr(owner, field)
            check_plain(options, f"{place}{field}")
            if set(entry.adapters) <= set(FAMILY_OPTIONS):
                known = (FAMILY_OPTIONS[family] for family in entry.adapters)
                check_names(options, f"{place}{field}", set().union(*known), own_layout)


def check_names(options: Iterable[str], field: str, known: Collection[str], own_layout: bool = True) -> None:
    """Raise `ValueError` for an option that is neither `known` nor shared by all families.

    In SIE's layout options that only SIE's adapters have are passed over, but not nearly the name of one that is known.
    """
    names = {*known, *SHARED_OPTIONS}
    elsewhere = set().union(*FAMILY_OPTIONS.values())
    for name in options:
        if name in names or (name in elsewhere and not own_layout):
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6 if own_layout else 0.85)
        if close or own_layout:
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(names))}"
            raise ValueError(f"{field}.{name[:64]}: unknown option; {hint}")


def read_entry(path: Path) -> ModelEntry:
    """One catalog file. Raises `BadFile`, which names the file, the line and the field."""
    data, raw, entry = b"", None, None
    try:
        data = path.read_bytes()
        raw = yaml_text.decode(data)
        own_layout = not (isinstance(raw, dict) and sie_layout.KEY in raw)
        entry = msgspec.convert(raw if own_layout else sie_layout.translate(raw), ModelEntry)
        _check(entry, own_layout)
        loras = {name: _beside(path, source) for name, source in entry.loras.items()}
        entry = msgspec.structs.replace(entry, source=_beside(path, entry.source), loras=loras)
        return _with_code(path, entry)
    except OSError as error:
        text = f"the file cannot be read: {error.strerror}"
    except RecursionError:
        text = "nested too deeply"
    except (ValueError, OverflowError) as error:
        text = " ".join(str(error).split())
    raise _bad(path, text, entry or _stand_in(data, raw))


def _bad(path: Path, text: str, entry: ModelEntry | None) -> BadFile:
    """The mistake `text` with the line of its field."""
    told = re.findall(r"\bline (\d+)", text)
    try:
        line = int(told[-1]) if told else yaml_text.line_of(path.read_bytes(), _place_of(text))
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


def _stand_in(data: bytes, raw: Any) -> ModelEntry | None:
    """An entry with the name that a bad file gives, for requests of every kind; None where the file gives none."""
    stated = raw if isinstance(raw, dict) else {}
    found = ID_LINE.search(data)
    name = (
        stated.get("id")
        or stated.get(sie_layout.KEY)
        or (found[1].decode("ascii", "replace") if found else "")
    )
    if not (isinstance(name, str) and re.fullmatch(ID, name)):
        return None
    served, outputs = stated.get("served") is not False, dict.fromkeys((*ENCODE_OUTPUTS, "score", "json"))
    return ModelEntry(
        name,
        AdapterSource(),
        inputs=("text", "image"),
        outputs={output: OutputSpec() for output in outputs},
        served=served,
        preload=sie_layout.KEY not in stated,
    )


def _with_code(path: Path, entry: ModelEntry) -> ModelEntry:
    """The entry with the files of its adapters found beside `path`, and a digest of their content."""
    places = {name: _adapter_beside(path, name) for name in entry.adapters}
    files = sorted({place.rpartition(":")[0] for place in places.values() if ADAPTER_FILE in place})
    content = hashlib.sha256()
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"adapter: the file {Path(file).name} does not exist")
        try:
            content.update(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(
                f"adapter: the file {Path(file).name} cannot be read: {error.strerror}"
            ) from error
    profiles = {
        name: msgspec.structs.replace(profile, adapter=places[profile.adapter] if profile.adapter else None)
        for name, profile in entry.profiles.items()
    }
    code = content.hexdigest() if files else ""
    return msgspec.structs.replace(entry, adapter=places[entry.adapter], profiles=profiles, code=code)


def _adapter_beside(path: Path, name: str) -> str:
    file, _, class_name = name.rpartition(":")
    return f"{(path.parent / file).resolve()}:{class_name}" if ADAPTER_FILE in name else name


def check_plain(options: Any, field: str, levels: int = MOST_LEVELS) -> None:
    """Raise `ValueError` for options that are no JSON: other types, names that are no strings, or too many levels."""
    if levels < 0:
        raise ValueError(f"{field}: nested deeper than {MOST_LEVELS} levels, or within itself")
    if isinstance(options, dict):
        strange = next((name for name in options if not isinstance(name, str)), None)
        if strange is not None:
            raise ValueError(f"{field}: the name {str(strange)[:64]!a} is no string")
    elif not isinstance(options, list):
        if not isinstance(options, str | int | float | None) or not -(2**63) <= _whole(options) < 2**64:
            raise ValueError(
                f"{field}: {str(options)[:64]!a} is no text, number of 64 bits, truth value or null"
            )
        return
    for value in options.values() if isinstance(options, dict) else options:
        check_plain(value, field, levels - 1)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _beside(path: Path, source: Any) -> Any:
    """A source whose relative directory is taken from the catalog file `path`."""
    if isinstance(source, DirectorySource | AdapterSource) and not Path(source.path).is_absolute():
        return msgspec.structs.replace(source, path=str((path.parent / source.path).resolve()))
    return source


def files_below(root: Path, endings: tuple[str, ...] = (".yaml",)) -> list[Path]:
    """Files below a directory with one of these endings, sorted; directories that vanish are passed over."""
    found: list[Path] = []
    # NOTE: Path.rglob raises when a directory vanishes between being listed and being opened.
    for directory, _, names in os.walk(root):
        found += [Path(directory, name) for name in names if name.endswith(endings)]
    return sorted(found)


def read_entries(dirs: Iterable[str]) -> Reading:
    """Every `*.yaml` below `dirs` (empty: the shipped catalog).

    The model of a bad file is there with its error, and so is one that two files define, unless the file of a later
    directory `replaces` the other. Raises `ConfigError` for a missing directory.
    """
    roots = [Path(d) for d in dirs] or [asset("config/models")]
    found = Reading({}, {}, [])
    entries, places, bad = found
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"catalog directory {root} does not exist")
        for path in files_below(root):
            try:
                entry = read_entry(path)
            except BadFile as error:
                bad.append(error)
                if error.entry is None:
                    continue
                entry = error.entry
            replacing = entry.replaces and not places.get(entry.id, root).is_relative_to(root)
            if entry.id in entries and not replacing:
                for place in (places[entry.id], path):
                    bad.append(_bad(place, f"id: {entry.id!r} is defined in two files", entry))
                entry = bad[-1].entry or entry
            places[entry.id] = path if replacing else places.get(entry.id, path)
            entries[entry.id] = entry
    return found


def _check_known(names: Iterable[str], known: Collection[str], setting: str, otherwise: str = "") -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else otherwise
            raise ConfigError(f"{setting}: unknown model {name!r}{hint}")


def load_catalog(
    dirs: Collection[str], models: Sequence[str] = (), serve_all: bool = False, vanished_ok: bool = False
) -> Catalog:
    """The models to serve: the models in `models`, else all without `served: false`. `serve_all` takes all models.

    A name in `models` may bring a further name of the model, `ID=NAME`. Raises `ConfigError` as `read_entries` does,
    for an id that no model has (unless `vanished_ok`: a file may be taken away while the server runs; or a bad file may
    be that of the model), for a further name that another model has, and when nothing is left to serve.
    """
    began_ns, reading = time.monotonic_ns(), read_entries(dirs)
    entries, bad, named = reading.entries, reading.bad, ids.split_served(models)
    if not vanished_ok and all(file.entry is not None for file in bad):
        _check_known(named, entries, "catalog.models", _UNLISTED)
    served = [entry for entry in entries.values() if entry.served or serve_all]
    chosen = [entries[name] for name in named if name in entries] if any(models) and not serve_all else served
    if not (chosen or bad):
        raise ConfigError("the catalog serves no model")
    return Catalog(_with_names(chosen, named, reading), reading=reading, read_ns=began_ns)


def _with_names(
    chosen: Iterable[ModelEntry], named: Mapping[str, tuple[str, ...]], reading: Reading
) -> list[ModelEntry]:
    """The entries with the names that `catalog.models` adds.

    An entry whose file states a name of another model is a mistake of `reading`. Raises `ConfigError` for such a name
    in `catalog.models`.
    """
    found = [
        msgspec.structs.replace(entry, served_name=(*entry.served_names, *more))
        if (more := named.get(entry.id))
        else entry
        for entry in chosen
    ]
    wrong = ids.shadowing({entry.id: entry.served_names for entry in found})
    for model, text in wrong.items():
        if named.get(model):
            raise ConfigError(f"catalog.models: {text}")
        reading.bad.append(reading.mistake(model, f"served_name: {text}"))
    refused = {file.entry.id: file.entry for file in reading.bad if file.entry is not None}
    return [refused[entry.id] if entry.id in wrong else entry for entry in found]


def load_served(chosen: CatalogSettings, repository: Repository, vanished_ok: bool = False) -> Catalog:
    """The models of the catalog's files that the settings name. Raises as `load_catalog` does.

    With a repository the shipped catalog is left out unless the section `catalog` asks for it.
    """
    if repository.dirs and not (chosen.dirs or any(chosen.models) or chosen.serve_all):
        return Catalog(())
    return load_catalog(chosen.dirs, chosen.models, chosen.serve_all, vanished_ok)


def check_lora_dirs(dirs: Iterable[str]) -> None:
    """Raise `ConfigError` for a directory of `catalog.lora_dirs` that does not exist."""
    for root in dirs:
        if not Path(root).is_dir():
            raise ConfigError(f"catalog.lora_dirs: directory {root} does not exist")


def check_lists(catalog: Catalog, preload: Iterable[str], pinned: Iterable[str]) -> None:
    """Raise `ConfigError` for a name in `catalog.preload` or `catalog.pinned` that no served model has."""
    ids = list(catalog)
    _check_known((name for name in preload if name not in (ALL, AUTO)), ids, "catalog.preload")
    _check_known((name for name in pinned if name != ALL), ids, "catalog.pinned")


def preloaded_names(
    catalog: Catalog, preload: Iterable[str], models: Sequence[str], serve_all: bool
) -> list[str]:
    """Ids of the models that are loaded at the start, in the catalog's order; variants of profiles go with their model.

    `auto` means all of `catalog.models`, or every served model without such a list, but none with `catalog.serve_all`
    and none whose entry says `preload: false`. Of repository models their own section of the settings decides.
    """
    wanted = set(preload)
    if AUTO in wanted:
        wanted |= ids.split_served(models).keys()
    if ALL in wanted:
        wanted |= set(catalog)
    if AUTO in wanted and not any(models) and not serve_all:
        wanted |= {name for name, entry in catalog.items() if entry.preload}
    own = {name for name, entry in catalog.items() if entry.preload}
    return [n for n in catalog if (n in own if "@" in n else n in wanted or n.partition(":")[0] in wanted)]
