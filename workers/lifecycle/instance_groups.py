"""On which workers a repository model runs, by the instance groups of its configuration.

A worker has one instance of a model, whatever `count` says. KIND_GPU with `gpus` means the workers of these numbers,
KIND_GPU without them every worker with a GPU, KIND_CPU the CPU of every worker, and anything else every worker.
"""

from __future__ import annotations

import torch

from ipc.catalog.entries import ModelEntry
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import ModelRefused


def takes(entry: ModelEntry, slot: int, device: torch.device, workers: int) -> bool:
    """Whether the worker `slot` of so many offers a model; one that no worker can have is refused by all of them."""
    if not isinstance(entry, RepositoryEntry) or device.type == "cpu":
        return True
    gpus = _gpus(entry)
    return not gpus or slot in gpus or min(gpus) >= workers


def check(entry: ModelEntry, device: torch.device, workers: int) -> None:
    """Raise `ModelRefused` for a model that this worker offers only because no worker can have it."""
    if not isinstance(entry, RepositoryEntry):
        return
    groups = entry.config.instance_groups
    if groups and all(group.kind == "KIND_GPU" for group in groups) and device.type == "cpu":
        raise ModelRefused("instance_group: KIND_GPU, but the workers run on the CPU")
    gpus = _gpus(entry)
    if device.type != "cpu" and gpus and min(gpus) >= workers:
        raise ModelRefused(f"instance_group: gpus {sorted(gpus)}, but the workers are 0 to {workers - 1}")


def _gpus(entry: RepositoryEntry) -> set[int]:
    """Numbers that all groups together name; empty when one of them leaves the choice open."""
    groups = entry.config.instance_groups
    if any(not group.gpus for group in groups):
        return set()
    return {gpu for group in groups for gpu in group.gpus}
