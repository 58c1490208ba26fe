"""Whether the models that `penstock serve` names can be had, before the server starts.

A model of the catalog comes from the hub with its first load. Where the hub cannot be reached, or refuses the model, a
server without any other model would run on and answer nothing.
"""

from __future__ import annotations

import sys

from ipc.catalog import ids
from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.catalog.reading import read_entries
from ipc.errors import PenstockError
from ipc.settings import Settings

_WITHOUT = "docs/hub.md#without-a-network says how models come to a machine without the hub"


class NothingToServe(PenstockError):
    """None of the named models can be had; the message says why."""


def refuse_unreachable(config: Settings) -> None:
    """Raise `NothingToServe` if no named model is on this machine or to be had; tell those that are not."""
    catalog = Catalog(read_entries(config.catalog.dirs).entries.values())
    named = [catalog[name] for name in ids.split_served(config.catalog.models) if name in catalog]
    reasons = {entry.id: reason for entry in named if (reason := _why_not(entry))}
    if not reasons:
        return
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if len(reasons) == len(named):
        raise NothingToServe(f"serve: there is nothing to serve: {told}; {_WITHOUT}")
    print(f"penstock: the server starts without {told}", file=sys.stderr)


def _why_not(entry: ModelEntry) -> str:
    """Why a model of the hub can neither be read nor fetched; "" for one that can, and for models of other sources."""
    where = entry.source
    if entry.error or not isinstance(where, HubSource):
        return ""
    # NOTE: imported here, since only models of the hub need what the extra `worker` brings.
    from penstock.files import directory_of
    from workers.loading import failure, source

    if directory_of(entry) is not None:
        return ""
    try:
        source.size_in_hub(where.repo, where.revision, where.gguf)
    except Exception as error:
        return f"not on this machine, and not to be had from the hub: {failure.classify(error).message}"
    return ""
