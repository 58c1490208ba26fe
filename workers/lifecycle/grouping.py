"""Which models of the catalog a worker offers, and which of them share one set of weights.

1. A repository model runs on the workers that the instance groups of its configuration name (`offers`). A worker has
   one instance of a model, whatever `count` says. KIND_GPU with `gpus` means the workers of these numbers, KIND_GPU
   without them every worker with a GPU, KIND_CPU the CPU of every worker, and anything else every worker.
2. A model and the variants of its profiles share weights (`groups`) when all that matters for a load is equal: source,
   adapter, precision, length, loadtime options, and those runtime options that are not resolved for each call, by the
   frontends or by the family (`AdapterSpec.per_call`). A family that cannot be imported shares nothing else that
   differs; its load will say why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from ipc.catalog.entries import Catalog, ModelEntry
from workers import foreign
from workers.adapters.registry import resolve
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

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
    except BaseException as raised:
        foreign.error_of(raised)
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


def offers(entry: ModelEntry, slot: int, device: torch.device, workers: int) -> bool:
    """Whether the worker `slot` of so many offers a model; one that no worker can have is refused by all of them."""
    if not isinstance(entry, RepositoryEntry):
        return True
    return slot in entry.config.worker_slots(max(workers, slot + 1), device.type == "cpu")


def check_device(entry: ModelEntry, device: torch.device, workers: int) -> None:
    """Raise `ModelRefused` for a model that this worker offers only because no worker can have it."""
    if not isinstance(entry, RepositoryEntry):
        return
    groups = entry.config.instance_groups
    if groups and all(group.kind == "KIND_GPU" for group in groups) and device.type == "cpu":
        raise ModelRefused("instance_group: KIND_GPU, but the workers run on the CPU")
    gpus = entry.config.gpus
    if device.type != "cpu" and gpus and min(gpus) >= workers:
        raise ModelRefused(f"instance_group: gpus {sorted(gpus)}, but the workers are 0 to {workers - 1}")
