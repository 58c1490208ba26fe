"""The rows of a box in the bucket of models: what its workers have told this bridge."""

from __future__ import annotations

from frontend.bridge.configs import ConfiguredModels
from frontend.engine.interface import Models, WorkerView
from frontend.tensors.models import VersionStates
from ipc.catalog.ids import model_of
from ipc.catalog.repository import VersionEntry
from ipc.settings import Settings
from ipc.wire.cluster import KINDS, VERSION
from ipc.wire.cluster_names import row_key
from ipc.wire.cluster_rows import MOST_SLOTS, BoxRow, ModelRow, Row, WorkerRow
from ipc.wire.messages import ModelStatus


def versions_of(settings: Settings, models: Models) -> VersionStates:
    """States of the versions of this box, which knows of no loads by name yet."""
    return VersionStates(models, settings.repository.control, lambda model: None)


def rows_of(
    settings: Settings, life: str, models: Models, configured: ConfiguredModels, versions: VersionStates
) -> dict[str, Row]:
    """All rows of a box by key."""
    cluster = settings.cluster
    box = cluster.box_name
    workers = models.workers()
    catalog = models.catalog
    rows: dict[str, Row] = {}
    by_worker = {worker.name: _by_entry(worker) for worker in workers}
    for entry in catalog.sources:
        versioned = isinstance(entry, VersionEntry)
        chosen = models.chosen(entry.id.rpartition("@")[0]) if versioned else ()
        states = {worker: found[entry.id] for worker, found in by_worker.items() if entry.id in found}
        rows[row_key(box, entry.id)] = ModelRow(
            VERSION,
            life,
            None if versioned else entry,
            entry if isinstance(entry, VersionEntry) else None,
            states,
            chosen,
            configured.gives(entry.id),
            configured.document(entry.id),
            versions.wished(model_of(entry.id)),
        )
    rows[box] = BoxRow(
        VERSION,
        box,
        life,
        cluster.pool,
        cluster.bundle,
        [_row(worker) for worker in workers],
        models.is_told,
        [entry.id for entry in catalog.sources],
        (settings.server.machine_profile or settings.server.gpu_type).lower(),
        configured.told(),
        KINDS,
        min(settings.worker_count, MOST_SLOTS),
        settings.repository.control != "none",
    )
    return rows


def _by_entry(worker: WorkerView) -> dict[str, list[ModelStatus]]:
    """States of a worker's models by the id of their entry, beside which its variants have states of their own."""
    found: dict[str, list[ModelStatus]] = {}
    for name, status in worker.models.items():
        found.setdefault(name.partition(":")[0], []).append(status)
    return found


def _row(worker: WorkerView) -> WorkerRow:
    return WorkerRow(
        worker.name,
        worker.number,
        worker.state,
        worker.responsive,
        worker.preloaded,
        worker.device,
        worker.threads,
    )
