"""What a name on the command line means when the catalog lacks the name: a directory, or a repository of the hub.

1. `./x`, `../x`, `/x`, `~/x`, and any other name of a directory that exists, is that directory. A file `x.gguf` is a
   model too.
2. `organisation/name` is a repository. Its list of files and its small files are fetched; weights are not.
   `organisation/name:TAG` is one of its GGUF files.
3. Anything else is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ipc import extras, yaml_text
from ipc.catalog import ids
from ipc.catalog.entries import ADAPTER_FILE, BadFile, DirectorySource, ModelEntry
from ipc.catalog.reading import read_entry
from penstock.own_models import gguf
from penstock.own_models.description import Description, Told
from penstock.own_models.files import (
    DESCRIBING,
    MOST_BYTES,
    MOST_FILES,
    CannotTell,
    ModelFiles,
    shown,
)
from penstock.own_models.fitting import refuse_unfitting, refuse_unfitting_quantized
from penstock.own_models.programs import FILES as PROGRAMS
from penstock.own_models.readers import describe
from workers.loading import stored_files
from workers.loading.gguf_file import SUFFIX, parts_of, stem_of

OWN_ENTRY = "penstock.yaml"
"""The catalog entry that `penstock models pull --to` writes beside the files of a model."""
_PATH = re.compile(r"^(\.{0,2}/|~)|^\.{1,2}$")
_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
_MOST_ENTRY_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin")
_VOCABULARIES = ("tokeniz*", "*vocab*", "*.model", "*.tiktoken", "*.spm", "tekken*")
"""Patterns of the names of files, one of which a tokenizer has."""


def yaml_of(entry: Mapping[str, Any]) -> str:
    """A catalog file of plain values, in the order given."""
    return yaml.safe_dump(
        dict(entry), sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000
    )


class NotFetched(CannotTell):
    """The hub does not give what describes a repository, so its model cannot be fetched either."""


class Own(NamedTuple):
    """A model that the catalog lacks: its entry as in a catalog file, and the lines for the operator.

    `complete`: the directory brings the whole entry, with its id.
    """

    name: str
    entry: dict[str, Any]
    told: list[Told]
    complete: bool = False

    @property
    def text(self) -> str:
        """The catalog file."""
        return yaml_of(self.entry)

    @property
    def lines(self) -> str:
        """What was chosen, and where each choice was read."""
        source = self.entry["source"]
        head = f"{self.name} is served as {self.entry['id']}, from {source.get('path') or source.get('repo')}"
        return "\n".join([head, *(f"  {t.what:14s} {t.value}   [{t.where}]" for t in self.told)])


def is_repository(name: str) -> bool:
    """Whether a name that is no directory has the form of an id of the hub."""
    return _REPOSITORY.match(name) is not None and _existing(name) is None


def find(name: str, alias: str = "", stated: Mapping[str, Any] | None = None) -> Own:
    """The model that `name` means; `alias` is the id of a directory's model. Raises `CannotTell`."""
    if _is_file(name) and name.lower().endswith(SUFFIX):
        return _gguf_file(name, alias, stated or {})
    place = _existing(name)
    if place is None and (_is_file(name) or _PATH.match(name)):
        kind = "file" if name.lower().endswith((SUFFIX, ".onnx")) else "directory"
        raise CannotTell(
            f"{name[:200]}: {_file_told(name) if _is_file(name) else f'there is no such {kind}'}"
        )
    if place is not None:
        # NOTE: a link gives the id of a model, and may lead elsewhere at the next load.
        root = place.resolve() if ".." in place.parts else place.absolute()
        return _directory(name, root, alias, stated or {})
    repo, tag = gguf.split_tag(name)
    if not is_repository(repo):
        raise CannotTell(
            f"{name[:200]!a} is no model of the catalog, no directory, and no id of the hub (organisation/name)"
        )
    return _repository(repo, tag, stated or {})


def _existing(name: str) -> Path | None:
    """The directory of that name, None where there is none."""
    try:
        place = Path(name).expanduser()
        return place if name and place.is_dir() else None
    except (OSError, RuntimeError):
        return None


def _is_file(name: str) -> bool:
    """Whether a name leads to a file."""
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError):
        return False


def _file_told(name: str) -> str:
    """What to do with a file that is no GGUF."""
    suffix = Path(name).suffix.lower()
    if suffix not in PROGRAMS:
        return "this is a file and no GGUF; name the directory of the model"
    return f"this is a program, {_as_program(name)}"


def _as_program(file: str) -> str:
    """How a program is served. A name that a shell would read in another way stands in quotes."""
    return (
        f"which has no catalog entry: penstock serve {shlex.quote(file)} serves its named tensors. A repository gives "
        "a program a configuration (docs/repository.md)"
    )


def _directory(name: str, root: Path, alias: str, stated: Mapping[str, Any]) -> Own:
    _refuse_unprintable(name, root)
    if (root / OWN_ENTRY).is_file() and not stated:
        return _with_own_entry(name, root, alias)
    model = _id_of(name, alias or root.name)
    files = ModelFiles.of_directory(root)
    if (root / "snapshots").is_dir() and not files.names:
        raise CannotTell(
            f"{name}: a repository in the hub cache; name a directory below {name}/snapshots, or its id"
        )
    own = _own(
        name, model, {"kind": "directory", "path": str(root)}, files, stated, f"{name.rstrip('/')}/{{}}"
    )
    if "gguf" not in own.entry["source"]:
        _refuse_damaged(name, root)
        refuse_unfitting(name, files)
        if own.entry["adapter"] == "causal":
            refuse_unfitting_quantized(name, files)
    return own


def _gguf_file(name: str, alias: str, stated: Mapping[str, Any]) -> Own:
    """The model in a GGUF file, or in the parts of which the file is one."""
    path = Path(name).expanduser().absolute()
    _refuse_unprintable(name, path)
    first = parts_of(path.name)[0]
    model = _id_of(name, alias or stem_of(first))
    source = {"kind": "directory", "path": str(path.parent)}
    return _own(name, model, source, ModelFiles(path.parent, [first]), stated)


def _refuse_unprintable(name: str, place: Path) -> None:
    # NOTE: bytes that are no UTF-8 are no text either. A catalog file and the title of a process are text.
    if not str(place).isprintable():
        raise CannotTell(f"{name[:200]!a}: a path must be printable text; make a link with another name")


def _id_of(name: str, model: str) -> str:
    """`model`, if a model may have this id. Raises `CannotTell`."""
    if not re.fullmatch(ids.SERVED_NAME, model):
        raise CannotTell(
            f"{name}: {model[:200]!a} is no id for a model; give one behind the path: {name}=my-model"
        )
    return model


def _refuse_damaged(name: str, root: Path, *, whole: bool = True) -> None:
    """Raise `CannotTell` for files that a load would refuse, as far as no model library is needed to see them.

    Files that are not `whole` may lack weights, which are still to be downloaded.
    """
    try:
        if whole:
            stored_files.check_whole(root)
        stored_files.check_tokenizer(root)
    except (stored_files.DamagedWeightsError, stored_files.DamagedTokenizerError) as error:
        raise CannotTell(f"{name}: {error}") from error
    except OSError as error:
        raise CannotTell(f"{name}: the weights cannot be read: {error.strerror}") from error


def _with_own_entry(name: str, root: Path, alias: str) -> Own:
    """The model of a directory that brings its catalog entry. Raises `CannotTell` for an entry with other files."""
    try:
        raw = _bounded_yaml(root / OWN_ENTRY)
        entry = read_entry(root / OWN_ENTRY)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CannotTell(f"{name}: {OWN_ENTRY}: {shown(error)}") from error
    except BadFile as error:
        raise CannotTell(error.message) from error
    _refuse_reaching_out(entry, root)
    gguf_name = entry.source.gguf if isinstance(entry.source, DirectorySource) else ""
    raw["source"] = {"kind": "directory", "path": str(root), **({"gguf": gguf_name} if gguf_name else {})}
    raw |= {"id": alias} if alias else {}
    return Own(name, raw, [Told("everything", entry.adapter, OWN_ENTRY)], complete=not alias)


def _bounded_yaml(path: Path) -> dict[str, Any]:
    """The map in a catalog file that may come from anybody.

    Raises `ValueError` for a file that is large, or that names a part twice: such parts may multiply without bound.
    """
    with path.open("rb") as stream:
        data = stream.read(_MOST_ENTRY_BYTES + 1)
    if len(data) > _MOST_ENTRY_BYTES:
        raise ValueError(f"larger than {_MOST_ENTRY_BYTES} bytes")
    content = yaml_text.decode(data)
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(data)):
        raise ValueError("aliases (*name) are not allowed")
    if not isinstance(content, dict):
        raise ValueError("expected a map")
    return content


def _refuse_reaching_out(entry: ModelEntry, root: Path) -> None:
    """Raise `CannotTell` for an entry of a model's directory that names files elsewhere, or code."""
    if not isinstance(entry.source, DirectorySource) or Path(entry.source.path).resolve() != root.resolve():
        raise CannotTell(f"{OWN_ENTRY}: source: expected this directory")
    if entry.loras or any(":" in name or ADAPTER_FILE in name for name in entry.adapters):
        raise CannotTell(
            f"{OWN_ENTRY}: an entry with code or LoRA adapters is read from a catalog directory only"
        )


def _own(
    name: str,
    model: str,
    source: dict[str, Any],
    files: ModelFiles,
    stated: Mapping[str, Any],
    how: str = "",
    tag: str = "",
) -> Own:
    """The model of `files`. A `tag` chooses one of several GGUF files; `how` tells the operator to choose one."""
    try:
        stored = gguf.chosen(files.names, tag, how) if tag or not _has_weights(files) else ""
        if stored:
            description = gguf.describe(files, stored, stated)
            source = source | {"gguf": stored}
        else:
            description = _described(files, stated)
    except CannotTell as error:
        raise CannotTell(f"{name}: {error.message}") from error
    # NOTE: a directory borrows no tokenizer; its library looks for one in the hub cache.
    borrowed = description.source if source["kind"] == "hub" else {}
    entry = {"id": model, "source": source | borrowed, **description.fields}
    return Own(name, entry, description.told)


def _has_weights(files: ModelFiles) -> bool:
    return any(name.endswith(_WEIGHTS) for name in files.names)


def _described(files: ModelFiles, stated: Mapping[str, Any]) -> Description:
    """The description of a model in safetensors or pickled weights. Raises `CannotTell`."""
    if not _has_weights(files):
        programs = sorted(name for name in files.names if name.lower().endswith(".onnx"))
        if programs:
            program = files.root / programs[0]
            file = str(program) if program.exists() else programs[0]
            more = f" ({len(programs)} of them)" if len(programs) > 1 else ""
            raise CannotTell(f"the weights are a program{more}, {_as_program(file)}")
        raise CannotTell("there are no weights: neither *.safetensors nor pytorch_model*.bin nor *.gguf")
    description = describe(files, stated)
    _refuse_without_tokenizer(description)
    return description


def _refuse_without_tokenizer(model: Description) -> None:
    if "text" not in model.fields["inputs"] or "tokenizer_repo" in model.source:
        return
    names = {name.rpartition("/")[2] for name in model.files.names}
    if not any(fnmatch(name, pattern) for name in names for pattern in _VOCABULARIES):
        raise CannotTell(
            "there is no tokenizer, such as tokenizer.json. Save the tokenizer of the model beside the weights: "
            "tokenizer.save_pretrained(directory)"
        )


def _repository(repo: str, tag: str, stated: Mapping[str, Any]) -> Own:
    from workers.loading import failure, source

    if not extras.has_worker():
        raise CannotTell(f"{repo}: a model of the hub needs {extras.needed('worker')}")
    try:
        sizes = source.files_in_hub(repo, MOST_FILES)
        files_needed = [
            name
            for name, nbytes in sizes.items()
            if nbytes <= MOST_BYTES and any(fnmatch(name, pattern) for pattern in DESCRIBING)
        ]
        root = source.fetch_files(repo, files_needed)
    except source.DownloadFailed as error:
        failure_class = failure.classify(error)
        kind = CannotTell if failure_class.error_class == "UNKNOWN" else NotFetched
        raise kind(f"{repo}: {failure_class.error_class}: {failure_class.message}") from error
    files = ModelFiles(root, sizes)
    own = _own(repo, repo, {"kind": "hub", "repo": repo}, files, stated, f"{repo}:{{}}", tag)
    if "gguf" not in own.entry["source"]:
        # What an earlier start has downloaded lies beside the small files.
        _refuse_damaged(repo, root, whole=False)
        refuse_unfitting(repo, files)
    return own
