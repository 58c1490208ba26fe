"""Resolves the options of a request, by one rule for encode, score and extract.

Options of the request replace the runtime options of the profile (`options.profile`, or the default profile).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frontend.http.fields import check_shared
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.option_names import OVERFLOW_POLICIES
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import IN_PARAMS, FieldNames


@dataclass(frozen=True, slots=True)
class Resolved:
    """The entry to run on, whether its profile was named, and the options that hold for this request."""

    entry: ModelEntry
    explicit: bool
    options: dict[str, Any]
    instruction: str | None
    overflow: str
    lora: str


def typed(options: dict[str, Any], name: str, kind: type, text: str, before: str) -> Any:
    """`options[name]`, or None. Raises `InvalidInput` when it is not a `kind` (called `text` in the message).

    `before` is as in `FieldNames.options`.
    """
    value = options.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise InvalidInput(f"{before}{name}: expected {text}, got {type(value).__name__}")
    return value


def side_of(options: dict[str, Any]) -> bool | None:
    """Whether the items are queries by the option `is_query`, with any truthy value; None where no side is stated."""
    value = options.get("is_query")
    return None if value is None else bool(value)


def resolve(
    entry: ModelEntry,
    given: dict[str, Any] | None,
    instruction: str | None,
    catalog: Catalog,
    items: int,
    limits: Limits,
    names: FieldNames = IN_PARAMS,
) -> Resolved:
    """Resolve the options of a request over `items` items. Raises `InvalidInput` that names the field."""
    request, before = _present(given), names.options
    if not request and not entry.runtime and instruction is None:
        # PERF: most requests have no options, and their models no options of their own.
        return Resolved(entry, ":" in entry.id, {}, None, OVERFLOW_POLICIES["default"], "")
    entry, explicit = _choose(entry, request, catalog, before)
    options = {**entry.runtime, **request}
    options.pop("profile", None)
    if instruction is None:
        instruction = typed(options, "instruction", str, "str", before)
    if instruction is not None:
        check_shared(instruction, f"{before.removesuffix('options.')}instruction", items, limits)
    overflow = _overflow(options, before)
    return Resolved(entry, explicit, options, instruction, overflow, _lora(request, entry.runtime, before))


def check_options(given: dict[str, Any] | None, names: FieldNames = IN_PARAMS) -> None:
    """Raise `InvalidInput` for options that no model could take, by their types and the overflow policy."""
    if not given:
        return
    options, before = _present(given), names.options
    for name in ("profile", "instruction"):
        typed(options, name, str, "str", before)
    _overflow(options, before)
    _lora(options, {}, before)


def _present(given: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None} if given else {}


def target_of(entry: ModelEntry, options: dict[str, Any] | None, catalog: Catalog) -> ModelEntry:
    """The entry that a request will run on: of the profile in `options`, if the model has the profile, else `entry`."""
    profile = (options or {}).get("profile")
    if isinstance(profile, str) and profile != "default" and profile in entry.profiles:
        return catalog.find(f"{entry.id}:{profile}")
    return entry


def _choose(
    entry: ModelEntry, options: dict[str, Any], catalog: Catalog, before: str
) -> tuple[ModelEntry, bool]:
    profile = typed(options, "profile", str, "str", before)
    if profile is None:
        return entry, ":" in entry.id
    known = sorted({"default", *entry.profiles})
    if profile not in known:
        raise InvalidInput(
            f"{before}profile: unknown profile {profile[:64]!r}, available are {', '.join(known)}"
        )
    return (entry if profile == "default" else catalog[f"{entry.id}:{profile}"]), True


def _overflow(options: dict[str, Any], before: str) -> str:
    policy = typed(options, "overflow_policy", str, "str", before)
    if policy is not None and policy not in OVERFLOW_POLICIES:
        known = ", ".join(OVERFLOW_POLICIES)
        raise InvalidInput(f"{before}overflow_policy: {policy[:64]!r} is not one of {known}")
    return OVERFLOW_POLICIES[policy or "default"]


def _lora(request: dict[str, Any], runtime: dict[str, Any], before: str) -> str:
    """The request's LoRA adapter under either name, else the profile's."""
    for options in (request, runtime):
        for name in ("lora", "lora_id"):
            found = typed(options, name, str, "str", before)
            if found is not None:
                return str(found)
    return ""
