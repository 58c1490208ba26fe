"""Which models of the catalog may share one set of weights: a model and the variants of its profiles.

They share when all that matters for a load is equal: source, adapter, precision, length, loadtime options, and
those runtime options that are not resolved for each call, by the frontends or by the family (`AdapterSpec.per_call`).
A family that cannot be imported shares nothing else that differs; its load will say why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ipc.catalog.entries import Catalog, ModelEntry
from workers.adapters.registry import resolve

_PER_REQUEST = ("instruction", "overflow_policy", "lora", "lora_id")
"""Runtime options that frontends resolve into each call, for all families."""


def _load_facts(entry: ModelEntry, runtime: dict[str, Any]) -> bytes:
    base = entry.id.partition(":")[0]
    facts = (
        base,
        entry.source,
        entry.adapter,
        entry.precision,
        entry.max_sequence_length,
        entry.code,
        entry.error,
        entry.loadtime,
        runtime,
    )
    return msgspec.json.encode((*facts, entry.proof, entry.fingerprint), order="deterministic")


def _per_call(adapter: str) -> tuple[str, ...]:
    try:
        return resolve(adapter).spec.per_call
    except Exception:
        return ()


def groups(catalog: Catalog | Iterable[ModelEntry]) -> dict[bytes, list[ModelEntry]]:
    """The entries by what their load depends on, in the order given."""
    entries = list(catalog.values() if isinstance(catalog, Catalog) else catalog)
    alike: dict[bytes, list[ModelEntry]] = {}
    for entry in entries:
        alike.setdefault(_load_facts(entry, {}), []).append(entry)
    found: dict[bytes, list[ModelEntry]] = {}
    for members in alike.values():
        differing = any(entry.runtime != members[0].runtime for entry in members)
        free = (*_PER_REQUEST, *_per_call(members[0].adapter)) if differing else ()
        for entry in members:
            bound = {name: value for name, value in entry.runtime.items() if name not in free}
            found.setdefault(_load_facts(entry, bound), []).append(entry)
    return found
