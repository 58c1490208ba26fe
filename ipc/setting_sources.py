"""Raw values of settings, each with its place: a line of the file, an environment variable, or a flag.

1. `Sources` takes the file, the environment and the flags in this order; a later source wins.
2. A name that is no setting fails with its place and the nearest valid name.
3. `convert` checks every value by itself: a message names the setting, the value, its place, and what is allowed. Sizes
   may have units, and a list may be one text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from ipc import addresses, yaml_text
from ipc.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_USER = re.compile(r"//[^/\s]*@")
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SHOWN = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def is_size(field: str) -> bool:
    """Whether a field is a number of bytes, by its name."""
    return "bytes" in field.split("_")


def size(text: str) -> int | str:
    """`256MiB`, `1.5 GiB`, `64 kB` or `4096` in bytes; the text itself if the text is no size."""
    match = _SIZE.fullmatch(text)
    unit = (_UNITS | _DECIMAL).get(match[2].lower()) if match else None
    if match is None or unit is None:
        return text
    nbytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    return int(nbytes) if nbytes == int(nbytes) else text


def shown_size(nbytes: int) -> str:
    """A number of bytes with the largest unit that divides it: `256MiB`; a bare number if no unit divides."""
    for unit, factor in _SHOWN:
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def of_text(field: str, kind: Any, text: str) -> Any:
    """The value of a text: the parts of a list, separated by commas, a size in bytes, or the text."""
    if isinstance(inspect.type_info(kind), inspect.VarTupleType):
        return [part.strip() for part in text.split(",") if part.strip()]
    return size(text) if is_size(field) else text


def shown(field: str, value: Any) -> str:
    """A value as messages and pages show the value: JSON, sizes with their unit."""
    if is_size(field) and type(value) is int:
        return shown_size(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return repr(value)


def taken(field: str, kind: Any) -> str:
    """The allowed values of a field of this type (`msgspec.inspect`), in words."""
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.UnionType):
        return " or ".join(taken(field, each) for each in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        word = "whole number" if isinstance(kind, inspect.IntType) else "number"
        bounds = (("above", kind.gt), ("at least", kind.ge), ("below", kind.lt), ("at most", kind.le))
        if is_size(field):
            word = "bytes, or a size like 256MiB"
        return ", ".join(
            [word, *(f"{text} {_bound(field, bound)}" for text, bound in bounds if bound is not None)]
        )
    if isinstance(kind, inspect.StrType):
        lengths = (("at least", kind.min_length), ("at most", kind.max_length))
        limits = [f"{text} {length} characters" for text, length in lengths if length is not None]
        return ", ".join([f"text like `{kind.pattern}`" if kind.pattern else "text", *limits])
    if isinstance(kind, inspect.VarTupleType):
        return f"list of {taken(field, kind.item_type).replace('text', 'texts', 1)}"
    return "map"


def _bound(field: str, bound: float) -> str:
    return shown_size(int(bound)) if is_size(field) else f"{bound:g}"


PREFIX = "PENSTOCK_"
OTHER_VARIABLES = ("PENSTOCK_CONFIG", "PENSTOCK_KEY", "PENSTOCK_NOTIFY_SOCKET", "PENSTOCK_SUPERVISE")
"""Variables that are no settings: the file, an API key in the page's examples, and two between our own processes."""
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT(_\w+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""How the variables end that Kubernetes sets in every container for each service, behind the name of the service."""
_SERVICE_HOST = "SERVICE_HOST"
_ADDRESSES = (("server", "bind"), ("server", "metrics_bind"), ("server", "health_bind"), ("grpc", "bind"))


@cache
def _kinds(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The type of each field by name; msgspec evaluates the annotations of a struct in each call."""
    return {f.name: f.type for f in msgspec.structs.fields(struct)}


class Sources:
    """Values of the settings in `tree`, a struct of sections, as their sources give them."""

    def __init__(self, tree: type[msgspec.Struct]) -> None:
        self._tree = tree
        self._sections = _kinds(tree)
        self._values: dict[str, dict[str, Any]] = {}
        self._places: dict[tuple[str, str], str] = {}

    def put(self, section: str, field: str, value: Any, place: str) -> None:
        """One value. Raises `ConfigError` for a name that is no setting."""
        if section not in self._sections:
            raise ConfigError(f"{place}: unknown section {section!r}{_nearest(section, self._sections)}")
        fields = _kinds(self._sections[section])
        if field not in fields:
            raise ConfigError(f"{place}: unknown setting {section}.{field}{_nearest(field, fields)}")
        if isinstance(value, str):
            value = of_text(field, fields[field], value)
        self._values.setdefault(section, {})[field] = value
        self._places[section, field] = place

    def read_file(self, path: Path) -> None:
        """The settings file. Raises `ConfigError` with the path, and the line where there is one."""
        try:
            raw, lines = yaml_text.decode_with_lines(path.read_bytes())
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        if not isinstance(raw or {}, dict):
            raise ConfigError(f"{path}: expected a map of sections")
        for section, fields in (raw or {}).items():
            if not isinstance(fields, dict):
                raise ConfigError(f"{path}, line {lines[section,]}: section {section!r} must be a map")
            for field, value in fields.items():
                self.put(str(section), str(field), value, f"{path}, line {lines[section, field]}")

    def read_environ(self, environ: Mapping[str, str]) -> None:
        """`PENSTOCK_SECTION__FIELD`. Raises `ConfigError` for any other name that begins as ours do."""
        services = [
            name.removesuffix(_SERVICE_HOST) for name in environ if name.endswith(f"_{_SERVICE_HOST}")
        ]
        for name, value in environ.items():
            if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
                continue
            if any(name.startswith(each) and _KUBERNETES.fullmatch(name, len(each)) for each in services):
                continue
            section, separator, field = name.removeprefix(PREFIX).lower().partition("__")
            if not separator:
                raise ConfigError(f"{name}: unknown variable{_nearest(name, self._variables())}")
            self.put(section, field, value, name)

    def convert(self) -> Any:
        """The whole tree. Raises `ConfigError` for the first value that its field does not take."""
        for (section, field), place in self._places.items():
            self._check(section, field, self._values[section][field], place)
        return msgspec.convert(self._values, self._tree, strict=False)

    def _check(self, section: str, field: str, value: Any, place: str) -> None:
        kind = _kinds(self._sections[section])[field]
        allowed = ""
        try:
            msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError:
            allowed = taken(field, inspect.type_info(kind)).replace("`", "")
        if not allowed and (section, field) in _ADDRESSES and not self._grpc_is_off(section):
            allowed = addresses.check(section, field, str(value))
        if allowed:
            # Addresses may bear a password, which no log line tells.
            written = _USER.sub("//...@", shown(field, value))
            raise ConfigError(f"{section}.{field} = {written} ({place}): expected {allowed}")

    def _grpc_is_off(self, section: str) -> bool:
        return section == "grpc" and str(self._values["grpc"].get("enabled", True)).lower() in ("false", "0")

    def _variables(self) -> list[str]:
        names = [
            f"{PREFIX}{section}__{field}".upper()
            for section, kind in self._sections.items()
            for field in _kinds(kind)
        ]
        return [*names, *OTHER_VARIABLES]


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
