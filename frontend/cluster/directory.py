"""The models of all boxes as one gateway knows them: rows of the bucket of models, and signs of life.

1. A bridge puts a row for its box and one for each model. `Rows` keeps the rows of each box by key.
2. A row of a box counts while the box lives, and its models for `SHOWN_S` longer, so that a restart of the only box is
   no 404 but a wait. Boxes may differ in what they serve: a model is served if some box serves it, by the entry of the
   box with the first name.
3. States are those of live boxes. A model that no box has loaded is loaded by a box that offers the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.broker import NO_BROKER
from frontend.cluster.bucket import Rows
from frontend.cluster.sequences import Homes
from frontend.cluster.takers import MOST_REMEMBERED, Takers
from frontend.engine.boxes import BUNDLE, profile_of
from frontend.engine.interface import STATE_ORDER, BoxView, Models, WorkerView, why_failed
from frontend.scope import ANY_BOX, Choice
from ipc import deadline
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.ids import id_of
from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.errors import (
    STATE_GONE,
    DeadlineExceeded,
    DependencyConflict,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
    Provisioning,
    QueueUnavailable,
    SequenceUnknown,
    Unsupported,
    not_begun,
)
from ipc.logs import Seldom
from ipc.wire.cluster import RUN, STEP, BoxHealth
from ipc.wire.cluster_configs import BoxConfigs
from ipc.wire.cluster_rows import BoxRow, ModelRow, Row
from ipc.wire.messages import Credits, ModelStatus, Work
from ipc.wire.stats import Stats

log = logging.getLogger(__name__)

RETRY_PROVISIONING_S = 120
TOLD_S = 2.0
"""Time in which the state of a model that a box has loaded arrives."""


Ensure = Callable[[str, int, Collection[str], Choice], Awaitable[None]]
"""Have a box of a choice load a model or one of others, until a deadline."""


class ClusterModels(Models):
    """The directory of a gateway."""

    def __init__(
        self, catalog: Catalog, boxes: Boxes, wait_s: float, is_up: Callable[[], bool], pool: str = "default"
    ) -> None:
        """A request waits up to `wait_s` seconds for a box that begins; `is_up`: whether this gateway has a broker.

        Requests that choose no pool go to `pool`.
        """
        self.catalog, self._boxes, self._wait_s, self._is_up = catalog, boxes, wait_s, is_up
        self._pool = pool
        self._rows: dict[str, Rows] = {}
        self._seldom = Seldom(log)
        self._figures: dict[str, BoxHealth] = {}
        self._version, self._is_read, self._changed = 0, False, asyncio.Event()
        self._configured: Mapping[str, ModelEntry] = {}
        self._loaded: dict[tuple[str, Choice], ModelStatus] = {}
        """The states of models that requests have found loaded at boxes of their choice."""
        self.families = frozenset(FAMILY_OPTIONS)
        """Adapters that each box has."""
        self.ensure: Ensure | None = None
        """Set before the first request."""
        self.expects: Callable[[str], bool] = lambda pool: False
        """Whether a pool has boxes that may be on their way to it."""
        self.reserved: Callable[[str], str] = lambda box: ""
        """The pool that has reserved a box, empty for none."""
        self.homes = Homes(self._places, self.pool_of)
        boxes.on_change = self._note
        self.takers = Takers(self._live, self._profile, self.pool_of)

    def take(self, key: str, row: Row | None) -> None:
        """Take in one row that was written under `key`, or None for a row that was removed."""
        self._put(key, row)
        self._note()

    def _put(self, key: str, row: Row | None) -> None:
        box = key.partition(".")[0]
        if isinstance(row, BoxRow) != (box == key) and row is not None:
            self._seldom.warning("a row of the bucket of models has the key of another", f"{key:.80}")
        else:
            self._rows.setdefault(box, Rows()).put(key, row)

    def told(self, health: BoxHealth) -> None:
        """The figures of a box have arrived."""
        if self._boxes.is_alive(health.life):
            self._figures[health.box] = health
            self._forget()

    def _stats(self, box: Box) -> Mapping[str, Stats]:
        figures = self._figures.get(box.name)
        return figures.workers if figures is not None and figures.life == box.life else {}

    def _profile(self, box: Box, rows: Rows) -> str:
        """The machine profile of a live box, as pages show it."""
        assert rows.box is not None
        figures = self._stats(box)
        devices = ((worker.device, figures.get(worker.name)) for worker in rows.box.workers)
        return profile_of(rows.box.profile, devices)

    def read(self, rows: dict[str, Row]) -> None:
        """Take in the whole bucket: rows of before that `rows` lacks were removed."""
        self._is_read, self._rows = True, {}
        for key, row in rows.items():
            self._put(key, row)
        self._note()

    def configure(self, entries: Mapping[str, ModelEntry]) -> None:
        """Models that boxes were told to serve, by id: known from now on, also before a box has them."""
        self._configured = entries
        self._note()

    def configured_boxes(self) -> Iterator[tuple[str, str, frozenset[str], BoxConfigs | None]]:
        """(box, bundle, adapters, configurations) of each box that takes work."""
        for box, rows in self._live():
            assert rows.box is not None
            found = (rows.of(model) for model in rows.box.models)
            own = (row.entry.adapters for row in found if row is not None and row.entry is not None)
            yield box.name, rows.box.bundle, self.families.union(*own), rows.box.configs

    def entry_at_boxes(self, model: str, *, own: bool = False) -> ModelEntry | None:
        """The entry of a model at some box that takes work; `own`: from files of the box, not by a configuration."""
        found = (row for _, rows in self._live() if (row := rows.of(model)) is not None)
        return next((row.version or row.entry for row in found if not (own and row.configured)), None)

    def documents(self) -> list[dict[str, Any]]:
        """The documents of all models that boxes have by configurations, once for each box."""
        rows = (row for found in self._rows.values() for row in found.models.values())
        return [row.document for row in rows if row.document is not None]

    def bundles_of(self, model: str) -> list[str]:
        """Bundles of the boxes that take work and have a model."""
        return sorted({rows.box.bundle for _, rows in self._live() if rows.box and model in rows.box.models})

    def _note(self) -> None:
        """Build the catalog anew after a change of rows or boxes, and wake the requests that wait for a change."""
        entries: dict[str, ModelEntry] = {}
        names: set[str] = set()
        for _, rows in sorted(self._rows.items()):
            if rows.box is None or rows.box.box not in self._boxes.by_name:
                continue
            names.update(rows.box.models)
            for model in rows.box.models:
                row = rows.of(model)
                entry: ModelEntry | None = None if row is None else row.version or row.entry
                if entry is not None:
                    entries.setdefault(model, entry)
        for name in self._figures.keys() - self._boxes.by_name.keys():
            del self._figures[name]
        for model, configured in self._configured.items():
            entries.setdefault(model, configured)
            names.add(model)
        sources = tuple(entries.values())
        if sources != self.catalog.sources:
            self.catalog.replace(Catalog(sources, names=names))
        self.homes.look()
        self._forget()
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget(self) -> None:
        """Rows, boxes or profiles may have changed."""
        self.takers.forget()
        self._loaded.clear()

    def _live(self) -> Iterator[tuple[Box, Rows]]:
        for box in self._boxes:
            rows = self._rows.get(box.name)
            if box.alive and rows is not None and rows.box is not None and rows.box.life == box.life:
                yield box, rows

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_told(self) -> bool:
        return any(rows.box is not None and rows.box.is_told for _, rows in self._live())

    @property
    def is_learning(self) -> bool:
        return not self._is_read or (bool(self._boxes.by_name) and not self.is_told)

    @property
    def removed(self) -> set[tuple[str, int]]:
        return set()

    def chosen(self, model: str) -> tuple[int, ...]:
        for _, rows in self._live():
            for version in reversed(self.catalog.versions.get(model, ())):
                row = rows.of(f"{model}@{version}")
                if row is not None and row.chosen:
                    return row.chosen
        return self.catalog.versions.get(model, ())

    def _offered(self, entry: str) -> list[tuple[BoxRow, ModelRow]]:
        """The rows of each live box that has an entry."""
        found = ((rows.box, rows.of(entry)) for _, rows in self._live())
        return [(box, row) for box, row in found if box is not None and row is not None]

    def wished(self, model: str) -> bool | None:
        """See `Models`: a box that was told to load a model counts before boxes that were told to unload the model."""
        entries = [id_of(model, version) for version in self.catalog.versions.get(model, ())] or [model]
        found = {row.wished for entry in entries for _, row in self._offered(entry)}
        return next((wish for wish in (True, None) if wish in found), False if found else None)

    def is_by_name(self, entry: str) -> bool | None:
        """See `Models`: where one box loads models when somebody asks, a request may go there."""
        found = self._offered(entry)
        return all(box.by_name for box, _ in found) if found else None

    def find(self, model: str) -> ModelEntry:
        """Catalog entry of a model name. Raises `ModelNotFound`, and while no model is known at all why."""
        if not len(self.catalog):
            raise self._nobody()
        return self.catalog.find(model)

    def _states(self, model: str, choice: Choice | None = None) -> list[ModelStatus]:
        """States of a model at all boxes, or at those that a request may go to."""
        found = self._live() if choice is None else self._chosen(model, choice)
        return [state for _, rows in found for state in rows.states.get(model, {}).values()]

    def pool_of(self, choice: Choice) -> str:
        """The pool that a request goes to."""
        return choice.pool or self._pool

    def _chosen(self, model: str, choice: Choice) -> list[tuple[Box, Rows]]:
        """The boxes with a model that a request may go to: those of its machine profile, where there are any."""
        pool = self.pool_of(choice)
        found = [
            (box, rows)
            for box, rows in self._live()
            if box.pool == pool
            and choice.bundle in ("", rows.box.bundle)  # type: ignore[union-attr]
            and model in rows.states
        ]
        return [each for each in found if choice.takes(self._profile(*each))] or found

    def status(self, model: str) -> ModelStatus:
        states = self._states(model)
        return min(states, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available"))

    def is_loaded(self, model: str, revision: str = "") -> bool:
        return any(s.state == "loaded" and revision in ("", s.revision) for s in self._states(model))

    def identity(self, model: str) -> str:
        found = {state.identity for state in self._states(model) if state.state == "loaded"}
        return found.pop() if len(found) == 1 else ""

    def why_unavailable(self, model: str, choice: Choice | None = None, kind: str = RUN) -> PenstockError:
        """See `Models`; of the boxes of a choice, for an item of a kind."""
        states = self._states(model, choice)
        if not states or not self._is_up():
            return self._nobody()
        having = [rows for _, rows in self._chosen(model, choice or ANY_BOX)]
        if having and not any(kind in rows.box.kinds for rows in having if rows.box is not None):
            return Unsupported(
                f"the boxes that have the model '{model}' are of an earlier version, which takes no work of the kind "
                f"'{kind}' from gateways; upgrade these boxes, or ask one of them directly"
            )
        failed = [state for state in states if state.state == "failed"]
        if failed and len(failed) == len(states):
            return why_failed(next((state for state in failed if state.permanent), failed[0]))
        return ModelNotLoaded(f"Model '{model}' is not loaded", retry_after_s=1)

    def _places(self, model: str, choice: Choice) -> tuple[str, ...]:
        """The places of sequences of a model: one for each configured worker of the boxes of the roster."""
        pool, entry = self.pool_of(choice), model.partition(":")[0]
        rows = (rows.box for _, rows in sorted(self._rows.items()) if rows.box is not None)
        return tuple(
            f"{box.box}/{slot}"
            for box in rows
            if entry in box.models
            and STEP in box.kinds
            and choice.bundle in ("", box.bundle)
            and pool == (self.reserved(box.box) or box.pool)
            for slot in range(box.slots)
        )

    def keeper(self, work: Work, tried: Collection[str], choice: Choice) -> tuple[Box | None, int | None]:
        """The box that keeps a sequence, None while it is down or has refused, and since when; see `Homes.find`."""
        name, stays_ms = self.homes.find(work, choice)
        box = self._boxes.by_name.get(name)
        return (box if box is not None and box.open and box.life not in tried else None), stays_ms

    def why_no_keeper(self, work: Work, choice: Choice) -> PenstockError:
        """Why a request of a sequence cannot run now."""
        step = work.step
        assert step is not None
        name, _ = self.homes.find(work, choice)
        if not self._is_up() or not name:
            return self.why_unavailable(work.model, choice, STEP)
        box = self._boxes.by_name.get(name)
        # A live box that changes its broker listens for a moment to nobody, and has the state.
        if step.start or (box is not None and box.alive and box.deaf and not box.draining):
            return NoReplica("the worker of this sequence is not up", retry_after_s=2)
        config = self.status(work.model).config
        shown = work.model if config is None else config.name
        return SequenceUnknown(not_begun(step.id, shown, STATE_GONE))

    def workers(self) -> Sequence[WorkerView]:
        """Workers of live boxes, numbered through; a worker's name has its box before it."""
        views: list[WorkerView] = []
        for box, rows in sorted(self._live(), key=lambda each: each[0].name):
            assert rows.box is not None
            for worker in rows.box.workers:
                models = {
                    name: states[worker.name] for name, states in rows.states.items() if worker.name in states
                }
                views.append(
                    WorkerView(
                        f"{box.name}/{worker.name}",
                        len(views),
                        worker.state,
                        worker.responsive,
                        worker.preloaded,
                        worker.device,
                        worker.threads,
                        models,
                        Credits(0.0, 0.0, 0.0),
                        self._stats(box).get(worker.name),
                        box=box.name,
                    )
                )
        return views

    def boxes(self) -> Sequence[BoxView]:
        """Boxes by name; a dead one for a minute."""
        return [self._view(box) for box in sorted(self._boxes, key=lambda each: each.name)]

    def _view(self, box: Box) -> BoxView:
        rows = self._rows.get(box.name)
        row = rows.box if rows is not None else None
        bundle, profile, home = (row.bundle, row.profile, row.pool) if row is not None else (BUNDLE, "", "")
        return BoxView(
            box.name, box.pool, bundle, box.alive, box.draining, box.room_s, box.wait_s, profile, home
        )

    def watch(self, on: bool) -> bool:
        return True

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        while not done():
            deadline.check(deadline_ns, "before the boxes were done")
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining_s(deadline_ns)):
                    await self._changed.wait()

    async def ensure_loaded(
        self, model: str, deadline_ns: int, others: Collection[str] = (), choice: Choice = ANY_BOX
    ) -> ModelStatus:
        """Wait until some box has the model or one of `others`; see `Models`. Raises `Provisioning` without a box.

        A box that begins or comes back is waited for, as a worker is on one host; a pool without boxes is not. Raises
        `QueueUnavailable` at once without a broker, and `DependencyConflict` where only other bundles have the model.
        """
        # PERF: most models were loaded for the request before.
        if not others and (status := self._loaded.get((model, choice))) is not None:
            return status

        def having() -> bool:
            states = [state for name in (model, *others) for state in self._states(name, choice)]
            return any(state.state == "loaded" for state in states)

        if not having():
            if not self._is_up():
                raise self._nobody()
            if self.takers.choose(model, (), choice) is None:
                self._check_bundle(model, choice)
                if self._may_come(choice):
                    until_ns = min(deadline_ns, deadline.after(self._wait_s))
                    with suppress(DeadlineExceeded):
                        await self.wait(lambda: self.takers.choose(model, (), choice) is not None, until_ns)
            if having():
                return self._told(model, choice)
            if self.takers.choose(model, (), choice) is None:
                deadline.check(deadline_ns, "before a box was there")
                raise self.why_unavailable(model, choice)
            assert self.ensure is not None
            await self.ensure(model, deadline_ns, others, choice)
            await self.wait(having, min(deadline_ns, deadline.after(TOLD_S)))
        status = self._told(model, choice)
        if not others and status.state == "loaded" and having():
            if len(self._loaded) >= MOST_REMEMBERED:
                self._loaded.clear()
            self._loaded[model, choice] = status
        return status

    def _told(self, model: str, choice: Choice) -> ModelStatus:
        """The state of a model at the boxes of a choice, else at all."""
        states = self._states(model, choice) or self._states(model)
        return min(states, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available"))

    def _may_come(self, choice: Choice) -> bool:
        """Whether a box may begin or come back; of a pool that the request names, only a box that belongs there."""
        return any(choice.pool in ("", box.pool) for box in self._boxes) or self.expects(choice.pool)

    def _check_bundle(self, model: str, choice: Choice) -> None:
        """Raise `DependencyConflict` if boxes have a model, and none of these the bundle of the choice."""
        if not choice.bundle:
            return
        # A variant is a model of the row of its entry.
        entry = model.partition(":")[0]
        known = {
            rows.box.bundle
            for box in self._boxes
            if (rows := self._rows.get(box.name)) is not None and rows.box and entry in rows.box.models
        }
        if known and choice.bundle not in known:
            raise DependencyConflict(
                f"model '{model}' is not in the bundle '{choice.bundle}'", compatible_bundles=sorted(known)
            )

    def _nobody(self) -> PenstockError:
        """Why nobody can be asked: this gateway has no broker, or no box has the model."""
        if not self._is_up():
            return QueueUnavailable(NO_BROKER, retry_after_s=1)
        return Provisioning("no box of the cluster serves this model now", retry_after_s=RETRY_PROVISIONING_S)
