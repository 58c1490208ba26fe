"""`penstock models pull`: the files of models, in the hub cache or as a copy for a machine without a network.

A copy is a directory `<DIR>/<id>` with the files that a load reads, and the catalog entry beside them. The entry is
written last, so a copy with an entry is whole.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc.catalog.entries import Catalog, HubSource, ModelEntry, Profile, gguf_of
from ipc.errors import ConfigError, ModelNotFound
from penstock import terminal
from penstock.files import directory_of, located, nbytes
from penstock.own_models import places
from penstock.own_models.files import CannotTell
from workers.loading import failure, source
from workers.loading.stored_files import weight_files


class ProgressLine:
    """Shows how far a download has come: one line that moves on a terminal, else a line every tenth."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells the time in seconds."""
        self._name, self._clock, self._shown = name, clock, -1
        self._began: tuple[float, int] | None = None
        self._told = ""

    def count(self, done: int, total: int) -> None:
        """`done` of the `total` bytes known so far are there. The next line of progress tells both."""
        now = self._clock()
        began, before = self._began = self._began or (now, done)
        parts = [f"{terminal.size(done)} of {terminal.size(total)}"]
        if now > began and done > before:
            rate = (done - before) / (now - began)
            parts += [f"{terminal.size(rate)}/s", f"{terminal.span((total - done) / rate)} left"]
        self._told = ", " + ", ".join(parts)

    def __call__(self, phase: str, fraction: float) -> None:
        """`fraction` (0 to 1) of `phase` is done."""
        tenths = int(fraction * 10)
        amount = self._told if fraction < 1 else ""
        if sys.stderr.isatty():
            end = "\n" if fraction >= 1 else ""
            terminal.redraw(f"{self._name}: {phase} {fraction:4.0%}{amount}", end)
        elif tenths != self._shown:
            print(f"{self._name}: {phase} {tenths * 10} %{amount}", file=sys.stderr)
        self._shown = tenths


class Pulled(msgspec.Struct, kw_only=True):
    """A model that is on this machine now, or the reason why not. `from_hub`: its source is the hub."""

    model: str
    directory: str = ""
    bytes: int = 0
    from_hub: bool = True
    error: str = ""


class NotPulled(Exception):
    """A model cannot be had; the message says why."""


def run(names: Sequence[str], catalog: Catalog, to: str | None, *, as_json: bool = False) -> int:
    """Fetch the models, or copy them below the directory `to`. Returns 0 when all are there, else 1.

    Raises `ConfigError` for a directory that cannot be one.
    """
    if to:
        try:
            Path(to).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"models pull: --to {to} cannot be a directory: {error.strerror}") from error
    pulled_models = []
    for name in names:
        try:
            entry = entry_of(name.partition(":")[0] if to else name, catalog, source_alone=True)
            pulled = _copy(entry, Path(to)) if to else _pull(entry)
        except (ModelNotFound, NotPulled) as error:
            print(f"penstock: {error}", file=sys.stderr)
            pulled = Pulled(model=name, error=str(error))
        else:
            if not as_json:
                print(_line(pulled, copied=bool(to)))
        pulled_models.append(pulled)
    if as_json:
        print(terminal.as_json(pulled_models))
    return 1 if any(pulled.error for pulled in pulled_models) else 0


def _line(pulled: Pulled, *, copied: bool) -> str:
    source = "" if pulled.from_hub or copied else "not from the hub, "
    then = f"; serve it: penstock serve {pulled.directory}" if copied else ""
    return f"{pulled.model}: {source}{pulled.bytes / 1e6:.0f} MB in {pulled.directory}{then}"


def entry_of(name: str, catalog: Catalog, *, source_alone: bool = False) -> ModelEntry:
    """The entry of the catalog, else of the model that `name` means. Raises `ModelNotFound`.

    With `source_alone` a repository that does not say what its model is has an entry of its source alone, and the
    reason is printed.
    """
    if name in catalog:
        return catalog[name]
    try:
        return msgspec.convert(places.find(name).entry, ModelEntry)
    except CannotTell as error:
        near = catalog.absence(name)
        reason = error.message + (f"; {near}" if near else "")
        if not (source_alone and places.is_repository(name)) or isinstance(error, places.NotFetched):
            raise ModelNotFound(reason) from error
    print(f"penstock: {reason}", file=sys.stderr)
    return ModelEntry(name, HubSource(name), adapter="")


def _pull(entry: ModelEntry) -> Pulled:
    """Fetch the files that the loaders read. Raises `NotPulled` unless the whole model is on this machine."""
    from_hub = bool(entry.error) or isinstance(entry.source, HubSource)
    line = ProgressLine(entry.id)
    if from_hub:
        directory = _attempt(entry, lambda: located(entry, line, on_bytes=line.count))
    elif (here := directory_of(entry)) is not None:
        directory = here
    else:
        raise NotPulled(f"{entry.id}: not from the hub, and its files are not here")
    return Pulled(model=entry.id, directory=str(directory), bytes=nbytes(directory), from_hub=from_hub)


def _attempt(entry: ModelEntry, fetch: Callable[[], Path]) -> Path:
    """What `fetch` gives. Raises `NotPulled`."""
    try:
        return fetch()
    except Exception as error:
        classified = failure.classify(error)
        raise NotPulled(f"{entry.id}: {classified.error_class}: {classified.message}") from error


def _copy(entry: ModelEntry, to: Path) -> Pulled:
    """Copy a model below `to`. Raises `NotPulled` unless the copy is whole."""
    target = to / entry.id
    if not target.resolve().is_relative_to(to.resolve()):
        raise NotPulled(f"{entry.id}: the id leads out of {to}")
    from_hub = isinstance(entry.source, HubSource)
    if isinstance(entry.source, HubSource) and entry.source.tokenizer_repo:
        raise NotPulled(
            f"{entry.id}: borrows the tokenizer of {entry.source.tokenizer_repo} from the hub cache, so a "
            "directory is not enough; copy the cache instead (docs/hub.md)"
        )
    _attempt(entry, lambda: _filled(entry, target))
    if entry.adapter:
        (target / places.OWN_ENTRY).write_text(_entry_text(entry), encoding="utf-8")
    return Pulled(model=entry.id, directory=str(target), bytes=nbytes(target), from_hub=from_hub)


def _filled(entry: ModelEntry, target: Path) -> Path:
    """The directory `target` with the whole model: copied from this machine, else from the hub."""
    (target / places.OWN_ENTRY).unlink(missing_ok=True)
    here = directory_of(entry)
    line = ProgressLine(entry.id)
    if here is None:
        return located(entry, line, on_bytes=line.count, to=target)
    files = [path for path in here.rglob("*") if path.is_file() and path.name != places.OWN_ENTRY]
    if gguf := gguf_of(entry):
        files = weight_files(here, gguf)
    _refuse_links_out(entry.id, here, files)
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        place = target / path.relative_to(here)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
        done += place.stat().st_size
        line.count(done, total)
        line("copy", done / total if total else 1.0)
    return source.from_directory(target, gguf)


def _refuse_links_out(model: str, here: Path, files: Sequence[Path]) -> None:
    """Raise `NotPulled` for a link that leads out of the model: a copy is given away, and the link may name any file.

    In the hub cache the files of a snapshot are links to the blobs of their repository.
    """
    whole = (here.parents[1] if here.parent.name == "snapshots" else here).resolve()
    out = next((path for path in files if not path.resolve().is_relative_to(whole)), None)
    if out is not None:
        raise NotPulled(
            f"{model}: {out.relative_to(here)} is a link out of the model's directory and is not copied; "
            "put the file itself there"
        )


def _entry_text(entry: ModelEntry) -> str:
    """The catalog file of a copy: the entry without what is the default, and the directory as its source."""
    fields = _stated(entry, ModelEntry(entry.id, entry.source)) | {
        "source": {"kind": "directory", "path": ".", **({"gguf": gguf} if (gguf := gguf_of(entry)) else {})}
    }
    profiles = {name: _stated(profile, Profile()) for name, profile in entry.profiles.items()}
    fields |= {"profiles": profiles} if profiles else {}
    ordered = {"id": entry.id, "adapter": entry.adapter, **fields}
    ordered.pop("served", None)
    return places.yaml_of(ordered)


def _stated(value: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    """Fields that differ from those of `default`, as plain values."""
    names = [name for name in value.__struct_fields__ if getattr(value, name) != getattr(default, name)]
    plain = msgspec.json.decode(msgspec.json.encode({name: getattr(value, name) for name in names}))
    return {name: plain[name] for name in names if name not in ("id", "code", "error")}
