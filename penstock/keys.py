"""`penstock keys new NAME`: a fresh API key, and its entry for the file that `server.keys_file` names.

The entry goes to standard output, to be appended to the file. The key goes to standard error, so that a redirection
does not write the key into the file. Neither is stored.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec

from frontend.access import api_keys
from ipc.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add `keys new` to the subcommands of the command line."""
    parser = commands.add_parser("keys", help="make API keys")
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


def run(options: argparse.Namespace) -> int:
    """`keys new`; returns the exit code. Raises `ConfigError` for a value that the file may not have."""
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
        raise ConfigError(f"keys new: {error}") from error
    sys.stdout.write(entry_of(fields))
    sys.stderr.write(f"the key of {options.name}, shown only now: {key}\n")
    return 0


def entry_of(fields: dict[str, Any]) -> str:
    """One entry of the list, as YAML."""
    # JSON values are YAML.
    lines = [f"{field}: {json.dumps(value)}" for field, value in fields.items()]
    return "- " + "\n  ".join(lines) + "\n"
