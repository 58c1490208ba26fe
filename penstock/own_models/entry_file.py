"""`penstock models add`: the catalog entry of a model, as the model's own files give it, in a file to be edited.

A model of the catalog gives its entry as it is. Nothing that exists is overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ipc import yaml_text
from ipc.catalog.entries import BadFile, Catalog, ModelEntry, read_entry
from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import terminal
from penstock.own_models import places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `models add`."""
    parser.add_argument(
        "model", metavar="MODEL", help="a directory or an id of the hub; PATH=ID names a directory"
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="file or directory of the entry, - to print it (default: the --catalog DIR)",
    )
    parser.add_argument(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a field that the files leave open, such as loadtime.pooling=mean; may repeat",
    )
    terminal.with_json(parser)
    terminal.with_examples(
        parser,
        ("models add ./my-model --output my-catalog", "writes my-catalog/my-model.yaml"),
        ("models add org/name=short --output -", "prints the entry of a repository, with a further name"),
        (
            "models add ./bert --output c --field adapter=dense --field loadtime.pooling=cls",
            "states what is open",
        ),
    )


def run(options: argparse.Namespace, config: Settings, catalog: Catalog) -> int:
    """Write the entry. Returns 0. Raises `ConfigError` for what cannot be read, told or written."""
    name, _, alias = options.model.partition("=")
    if name in catalog:
        raise ConfigError(
            f"{name}: the catalog has this model; `penstock models show {name}` prints the entry"
        )
    own = places.find(name, alias, _stated(options.field))
    if alias and own.entry["id"] != alias:
        own.entry["served_name"] = alias
    if options.output == "-":
        print(terminal.as_json(_fields(own, None)) if options.json else own.text.rstrip("\n"))
        return 0
    print(own.lines, file=sys.stderr)
    path = _file(options.output, config, str(own.entry["id"]))
    _write(path, own.text)
    if options.json:
        print(terminal.as_json(_fields(own, path)))
        return 0
    print(f"wrote {path}; serve it: penstock serve --catalog {path.parent} --models {own.entry['id']}")
    return 0


def _fields(own: places.Own, path: Path | None) -> dict[str, Any]:
    """What was written, and from where each choice was read."""
    read = [told._asdict() for told in own.told]
    return {
        "id": own.entry["id"],
        "file": None if path is None else str(path),
        "entry": own.entry,
        "read": read,
    }


def _stated(pairs: Sequence[str]) -> dict[str, Any]:
    """`a.b=value` as nested fields; values are YAML. Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *above, last = name.split(".")
        if not equals or not all([*above, last]):
            raise ConfigError(f"--field {pair}: expected NAME=VALUE")
        place = found
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--field {pair}: {part} has a value already")
        try:
            place[last] = yaml_text.decode(text.encode())
        except ValueError as error:
            raise ConfigError(f"--field {pair}: {error}") from error
    try:
        msgspec.convert({"id": "model", "source": {"kind": "directory", "path": "."}, **found}, ModelEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--field: {error}") from error
    return found


def _file(output: str | None, config: Settings, model: str) -> Path:
    """The file to write. Raises `ConfigError` where nothing names a directory."""
    if output is not None and output.endswith((".yaml", ".yml")):
        return Path(output)
    directory = output or next(iter(config.catalog.dirs), None)
    if directory is None:
        raise ConfigError("name a directory for the entry: --output DIR, or --catalog DIR (catalog.dirs)")
    return Path(directory) / f"{model.replace('/', '--')}.yaml"


def _write(path: Path, text: str) -> None:
    """Put a catalog file in its place in one step, if the catalog can read the file. Raises `ConfigError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        read_entry(draft)
        os.link(draft, path)
    except BadFile as error:
        raise ConfigError(f"the entry would be refused: {error.text}") from error
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already: remove the file, or name another place with --output"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
