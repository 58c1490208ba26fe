"""`penstock keys new | list | check | revoke`: API keys and the file that `server.keys_file` names.

- `new`: the entry goes to standard output, to be appended to the file. The key goes to standard error, so that a
  redirection does not write the key into the file. Neither is stored.
- `check`: the key comes from standard input or from the environment variable PENSTOCK_KEY, never from the command line.
- `revoke`: the file without the lines of one entry takes the place of the file; comments, owner and mode stay.

The server takes a changed file in on SIGHUP. Exit codes: 0 fine, 1 for a key or name that the file lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import yaml

from frontend.access import api_keys
from ipc.errors import ConfigError
from ipc.settings import Settings
from penstock import target, terminal

_HEAD = ("NAME", "ID", "SCOPES", "REQUESTS/S", "BURST", "SHARE")


def add_parser(commands: Any, add_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `keys ...`; `add_flags` adds the flags that name settings, among them the file."""
    parser = commands.add_parser("keys", help="make, list, check and revoke API keys")
    terminal.with_examples(
        parser,
        ("keys new web", "makes a key and its entry"),
        ("keys list --file keys.json", "the keys of a file"),
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="print a fresh key (on standard error, once) and its entry for server.keys_file"
    )
    new.add_argument("name", metavar="NAME", help="shown in logs and metrics; letters, digits and ._@-")
    new.add_argument(
        "--scope", action="append", choices=("infer", "admin"), help="may repeat (default: infer)"
    )
    new.add_argument("--requests-per-s", type=float, metavar="N", help="rate (default: no limit)")
    new.add_argument(
        "--burst", type=int, metavar="N", help="requests at once (default: what one second gives)"
    )
    new.add_argument("--share", type=float, metavar="W", help="weight against other keys (default: 1)")
    terminal.with_json(new, "print the entry as JSON")
    terminal.with_examples(
        new,
        ("keys new search >> /etc/penstock/keys.yaml", "append the entry; the key is shown on the terminal"),
        ("keys new ops --scope infer --scope admin", "a key for administration, too"),
    )
    listing = actions.add_parser("list", help="the keys of the file, without anything secret")
    check = actions.add_parser(
        "check", help="say whose a key is; the key comes from standard input or PENSTOCK_KEY"
    )
    revoke = actions.add_parser("revoke", help="take a key out of the file")
    revoke.add_argument("name", metavar="NAME", help="name or public id of the key")
    for action in (listing, check, revoke):
        action.add_argument("--file", metavar="FILE", help="keys file (default: server.keys_file)")
        terminal.with_json(action)
        add_flags(action)
    file = "--file /etc/penstock/keys.yaml"
    terminal.with_examples(listing, (f"keys list {file} --json", "for scripts"))
    terminal.with_examples(check, (f"keys check {file} < key", "the key in the file `key`"))
    terminal.with_examples(revoke, (f"keys revoke search {file}", "then: systemctl reload penstock-frontend"))


def run(options: argparse.Namespace, config: Settings) -> int:
    """Run `list`, `check` or `revoke`; returns the exit code. Raises `ConfigError`."""
    name = options.file or config.server.keys_file
    if not name:
        raise ConfigError("keys: no file is named: neither --file nor server.keys_file")
    path = Path(name)
    entries = api_keys.read(path)
    if options.action == "list":
        return _list(entries, as_json=options.json)
    if options.action == "check":
        return _check(entries, as_json=options.json)
    return _revoke(path, entries, options)


def new(options: argparse.Namespace) -> int:
    """Print a fresh key and its entry; returns 0. Raises `ConfigError` for an entry that no server would take."""
    key = api_keys.fresh()
    given = {
        "requests_per_s": options.requests_per_s,
        "burst": options.burst,
        "share": options.share,
    }
    fields = {
        "name": options.name,
        "hash": api_keys.hashed(key),
        "scopes": list(dict.fromkeys(options.scope or ["infer"])),
        **{field: value for field, value in given.items() if value is not None},
    }
    try:
        msgspec.convert(fields, api_keys.KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"keys new{api_keys.told(error)}") from None
    sys.stdout.write(terminal.as_json(fields) + "\n" if options.json else entry_of(fields))
    sys.stderr.write(f"the key of {options.name}, shown only now: {key}\n")
    return 0


def entry_of(fields: dict[str, Any]) -> str:
    """One entry of the list, as YAML."""
    # JSON values are YAML.
    lines = [f"{field}: {json.dumps(value)}" for field, value in fields.items()]
    return "- " + "\n  ".join(lines) + "\n"


def _fields(entry: api_keys.KeyEntry) -> dict[str, Any]:
    """What may be shown of a key: all but the hash."""
    return {
        "name": entry.name,
        "id": entry.id,
        "scopes": list(entry.scopes),
        "requests_per_s": entry.requests_per_s,
        "burst": entry.allowed_burst if entry.requests_per_s else 0,
        "share": entry.share,
    }


def _list(entries: tuple[api_keys.KeyEntry, ...], *, as_json: bool) -> int:
    shown = [_fields(entry) for entry in entries]
    print(terminal.as_json(shown) if as_json else "\n".join(terminal.table([_HEAD, *map(_cells, shown)])))
    return 0


def _cells(fields: dict[str, Any]) -> tuple[str, ...]:
    rate, burst = fields["requests_per_s"], fields["burst"]
    limits = (f"{rate:g}", str(burst)) if rate else ("no limit", "-")
    return (fields["name"], fields["id"], ",".join(fields["scopes"]), *limits, f"{fields['share']:g}")


def _check(entries: tuple[api_keys.KeyEntry, ...], *, as_json: bool) -> int:
    """Look up the key, which is never printed."""
    key = _line().strip() or os.environ.get(target.KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(f"keys check: no key on standard input nor in {target.KEY_VARIABLE}")
    public = api_keys.id_of(key)
    if public is None:
        print("penstock: this text has not the form of a key", file=sys.stderr)
        return 1
    entry = next((each for each in entries if each.id == public), None)
    if entry is None or not secrets.compare_digest(entry.digest, api_keys.digest(key)):
        why = "the file has no key with this id" if entry is None else "the secret is not that of the file"
        print(f"penstock: id {public}: {why}", file=sys.stderr)
        return 1
    return _list((entry,), as_json=as_json)


def _line() -> str:
    """The first line of standard input; empty where that is a terminal or closed."""
    stream: TextIO | None = sys.stdin
    if stream is None or stream.isatty():
        return ""
    try:
        return stream.readline(4096)
    except UnicodeDecodeError:
        return "no text"


def _revoke(path: Path, entries: tuple[api_keys.KeyEntry, ...], options: argparse.Namespace) -> int:
    """Write the file again without one entry."""
    found = next(
        (number for number, each in enumerate(entries) if options.name in (each.name, each.id)), None
    )
    if found is None:
        print(
            f"penstock: {path} has no key with the name or id {api_keys.redact(options.name)!r}",
            file=sys.stderr,
        )
        return 1
    if len(entries) == 1:
        raise ConfigError(
            f"keys revoke: {path} has no other key; to switch authentication off, leave server.keys_file empty"
        )
    text = without_entry(path.read_text(), found)
    if text is None:
        raise ConfigError(f"keys revoke: {path} is no list with an entry a line; take the entry out by hand")
    _replace(path, text, [entry for number, entry in enumerate(entries) if number != found])
    fields = _fields(entries[found])
    if options.json:
        print(terminal.as_json(fields))
    else:
        print(f"{fields['name']} is out of {path}; the server takes the file in on SIGHUP")
    return 0


def without_entry(text: str, number: int) -> str | None:
    """The text of a YAML list in block style without the lines of one entry; None for a list in another style."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.SequenceNode) or root.flow_style:
        return None
    lines = text.splitlines(keepends=True)
    first, last = root.value[number].start_mark.line, root.value[number].end_mark.line
    # NOTE: the end of a block mapping is the beginning of what follows, so comments and empty lines between stay.
    while last > first + 1 and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return "".join(lines[:first] + lines[max(last, first + 1) :])


def _replace(path: Path, text: str, expected: list[api_keys.KeyEntry]) -> None:
    """Put `text` in the place of a file in one step, with owner and mode of the file, if `text` holds `expected`."""
    status, target = path.stat(), path.resolve()
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, status.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        if list(api_keys.read(fresh)) != expected:
            raise ConfigError(
                f"keys revoke: {path} is written in a style that cannot be edited; edit it by hand"
            )
        fresh.replace(target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
