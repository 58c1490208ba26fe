"""The configurations of a cluster as one gateway keeps them.

1. Each model is one value of a bucket. A change reads the value, adds profiles, and writes over the revision that was
   read: what another gateway wrote meanwhile is read again, and nothing that is there changes. The epoch is the newest
   revision.
2. A bundle can run a model if its boxes have all adapters of the model: those of this version, and those of models in
   the boxes' own catalogs. Nobody can bring code by a configuration.
3. A box tells the digest of what it serves as configured. A bundle has a configuration when all of its boxes that
   take work tell the digest of all that is configured for the bundle.
4. Brokers that lost the bucket get back what this gateway and the boxes know, before a change makes the bucket anew:
   configurations only grow, so what several know is merged.
5. The first answer under an Idempotency-Key is kept for `KEYS_S`, in a bucket of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from nats.js.errors import KeyWrongLastSequenceError

from frontend.cluster.broker import NO_BROKER, Broker
from frontend.cluster.bucket import LOST
from frontend.cluster.directory import ClusterModels
from frontend.cluster.kept import Followed, Kept
from frontend.engine.boxes import BUNDLE
from frontend.engine.interface import Configs
from ipc.catalog.entries import ModelEntry
from ipc.errors import (
    BodyTooLarge,
    ConfigRefused,
    ContentConflict,
    DependencyConflict,
    InvalidInput,
    KeyReused,
    ModelNotFound,
    PenstockError,
    ProtocolError,
    QueueUnavailable,
    StateFull,
)
from ipc.metrics.cluster import ConfigResult
from ipc.wire import cluster_configs as wire
from ipc.wire.cluster_configs import Configuration, FirstAnswer
from ipc.wire.cluster_names import Names

log = logging.getLogger(__name__)

KEYS_S = 86_400
MOST_TRIES = 50
MOST_KEY = 256
MOST_MODELS = 10_000
NO_BOX = "no_eligible_workers_connected"
_UNREAD = "the brokers have not told the configurations yet"


@dataclass(frozen=True, slots=True)
class BundleView:
    """The boxes of a bundle that take work, with what each has of the configurations; `adapters` of all of them."""

    adapters: frozenset[str]
    boxes: dict[str, wire.BoxConfigs | None] = field(default_factory=dict)

    def can_run(self, entry: ModelEntry) -> bool:
        """Whether the boxes have all adapters of a model."""
        return self.adapters.issuperset(entry.adapters)


@dataclass(frozen=True, slots=True)
class _Known:
    """A configuration, and its model with its content; None where this version cannot read the model."""

    configuration: Configuration
    entry: ModelEntry | None = None
    content: wire.Content | None = None


def _known(configuration: Configuration) -> _Known:
    try:
        entry = wire.entry_of(configuration)
    except ConfigRefused:
        # A newer gateway wrote it: boxes of that version serve the model, and tell its entry.
        return _Known(configuration)
    return _Known(configuration, entry, wire.content_of(entry))


class ClusterConfigs(Configs):
    """See `frontend.engine.interface.Configs`."""

    def __init__(self, broker: Broker, names: Names, models: ClusterModels, router: str) -> None:
        self._broker, self._models, self._router = broker, models, router
        self._kept, self._keys = Kept(broker, names.configs), Kept(broker, names.config_keys, KEYS_S)
        self._followed = Followed(broker, self._kept, wire.read_configuration)
        self._followed.on_change = self._changed
        self._known: dict[str, _Known] = {}
        self._entries: dict[str, ModelEntry] = {}
        """Models by id, of the configurations that this version can read."""
        self._contents: dict[str, wire.Content] = {}

    @property
    def loops(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What runs as long as the gateway."""

        async def follow() -> None:
            await self._followed.run(self._broker)

        return (follow,)

    def counts(self) -> dict[tuple[str, str], float]:
        """For `GatewayMeter`."""
        followed = self._followed
        return {
            ("config_failures", ""): followed.failures,
            ("config_degraded", ""): not followed.is_read,
            ("config_epoch", ""): followed.revision,
            ("config_deltas", "model applied"): followed.changes,
            ("config_deltas", "model unreadable"): followed.unreadable,
        }

    def _changed(self) -> None:
        # PERF: a model takes a quarter of a millisecond, so only what came anew is read.
        self._known = {
            key: known
            if (known := self._known.get(key)) is not None and known.configuration is each
            else _known(each)
            for key, each in self._followed.values.items()
        }
        readable = [known for known in self._known.values() if known.entry is not None]
        self._entries = {known.configuration.model: known.entry for known in readable if known.entry}
        self._contents = {known.configuration.model: known.content for known in readable if known.content}
        self._models.configure(self._entries)

    def _check_read(self) -> None:
        if not self._followed.is_read:
            raise QueueUnavailable(_UNREAD, retry_after_s=1, error="nats_unavailable")

    def _of(self, model: str) -> Configuration | None:
        return self._followed.values.get(wire.key_of(model))

    async def put(self, body: bytes, key: str) -> tuple[int, bytes]:
        if len(body) > wire.MOST_NBYTES:
            raise BodyTooLarge(f"body: {len(body)} bytes, a configuration may have {wire.MOST_NBYTES}")
        if len(key) > MOST_KEY or not key.isprintable():
            raise InvalidInput(f"Idempotency-Key: at most {MOST_KEY} printable characters")
        if not self._broker.up:
            raise QueueUnavailable(NO_BROKER, retry_after_s=1, error="nats_unavailable")
        try:
            return await self._put(body, key)
        except LOST as error:
            raise QueueUnavailable(
                f"the brokers do not keep configurations now: {error}",
                retry_after_s=1,
                error="nats_unavailable",
            ) from error

    async def _put(self, body: bytes, key: str) -> tuple[int, bytes]:
        digest, place, claim = hashlib.sha256(body).hexdigest(), wire.key_of(key), 0
        if key:
            first, claim = await self._claimed(place, digest)
            if first is not None:
                return first.status, first.answer
        try:
            # PERF: a document of 1 MiB takes a tenth of a second.
            document = await asyncio.to_thread(wire.read_document, body)
            status, answer = await self._add(document)
        except PenstockError:
            if claim:
                # A claim that stays is answered as a repeated change.
                with contextlib.suppress(*LOST):
                    await self._keys.remove(place, claim)
            raise
        encoded = msgspec.json.encode(answer)
        if key:
            await self._note(place, FirstAnswer(wire.VERSION, digest, status, encoded))
        return status, encoded

    async def _claimed(self, place: str, digest: str) -> tuple[FirstAnswer | None, int]:
        """The answer that a key had before, and the revision of the claim of a key that had none.

        The revision is 0 where another request with this body has claimed the key. Raises `KeyReused`.
        """
        for _ in range(MOST_TRIES):
            data, revision = await self._keys.read(place)
            if data is not None:
                first = wire.read_first(data)
                if first.body != digest:
                    raise KeyReused(
                        "Idempotency-Key: the key was that of another body", error="idempotency_mismatch"
                    )
                return (first if first.status else None), 0
            try:
                claim = wire.encode(FirstAnswer(wire.VERSION, digest))
                return None, await self._keys.write(place, claim, revision)
            except KeyWrongLastSequenceError:
                continue
        raise QueueUnavailable("the Idempotency-Key is used by too many others", retry_after_s=1)

    async def _note(self, place: str, first: FirstAnswer) -> None:
        """Keep a first answer, unless another request with the same key has one already."""
        for _ in range(MOST_TRIES):
            data, revision = await self._keys.read(place)
            known = None if data is None else wire.read_first(data)
            if known is not None and (known.status or known.body != first.body):
                return
            try:
                await self._keys.write(place, wire.encode(first), revision)
                return
            except KeyWrongLastSequenceError:
                continue

    async def _add(self, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        model, key = document["sie_id"], wire.key_of(document["sie_id"])
        await self._put_back()
        for _ in range(MOST_TRIES):
            data, revision = await self._kept.read(key)
            before = None if data is None else wire.read_configuration(data)
            if before is None and (same := self._same_at_boxes(document)) is not None:
                return 200, self._answer(model, [], same, {})
            after = await asyncio.to_thread(wire.merged, before, document)
            entry = await asyncio.to_thread(wire.entry_of, after)
            known = set() if before is None else set(before.profiles)
            new = [name for name in document["profiles"] if name not in known]
            routes = self._routes(entry)
            if new:
                if before is None and len(self._followed.values) >= MOST_MODELS:
                    raise StateFull(f"there are {MOST_MODELS} configurations, which is the limit")
                try:
                    written = await self._kept.write(key, encoded := wire.encode(after), revision)
                except KeyWrongLastSequenceError:
                    continue
                self._followed.take(key, encoded, written)
            skipped = [name for name in document["profiles"] if name in known]
            answer = self._answer(model, new, skipped, dict.fromkeys(new, routes))
            return (201 if new else 200), answer
        raise QueueUnavailable("the configuration is changed by too many others", retry_after_s=1)

    async def take(self, document: dict[str, Any]) -> ConfigResult:
        """Add what a configuration service tells; applied if profiles are new. Raises as `put`, or `LOST`."""
        status, _ = await self._add(document)
        return "applied" if status == 201 else "repeated"

    async def _put_back(self) -> None:
        """Where brokers have no bucket, write what is known of one that they have lost."""
        if await self._kept.found() is not None:
            return
        known = list(self._followed.values.values())
        told = {wire.encode(Configuration(wire.VERSION, each)) for each in self._models.documents()}
        for data in sorted(told):
            try:
                wire.entry_of(configuration := wire.read_configuration(data))
                known.append(configuration)
            except (ProtocolError, ConfigRefused) as error:
                log.warning("the configuration that a box tells is passed over: %s", error.message)
        for configuration in known:
            try:
                await self._merge(configuration)
            except PenstockError as error:
                log.warning("the configuration of %s is not put back: %s", configuration.model, error.message)
        if known:
            log.warning("the brokers had lost the configurations: put back %d", len(self._followed.values))

    async def _merge(self, known: Configuration) -> None:
        """Write a configuration, or what another one under its key lacks. Raises `ConfigRefused` and its kin."""
        key = wire.key_of(known.model)
        for _ in range(MOST_TRIES):
            data, revision = await self._kept.read(key)
            after = known
            if data is not None:
                after = await asyncio.to_thread(wire.merged, wire.read_configuration(data), known.document)
                if not known.profiles.keys() - wire.read_configuration(data).profiles.keys():
                    return
            try:
                written = await self._kept.write(key, encoded := wire.encode(after), revision)
            except KeyWrongLastSequenceError:
                continue
            self._followed.take(key, encoded, written)
            return

    def _answer(
        self, model: str, new: list[str], skipped: list[str], routes: dict[str, list[str]]
    ) -> dict[str, Any]:
        return {
            "model_id": model,
            "created_profiles": new,
            "existing_profiles_skipped": skipped,
            "warnings": [] if self._views() else [NO_BOX],
            "routable_bundles_by_profile": routes,
            "router_id": self._router,
        }

    def _same_at_boxes(self, document: dict[str, Any]) -> list[str] | None:
        """The profiles of a document whose model boxes have from their own files; None for a model that none has.

        What a box keeps of an earlier configuration is none of its own files: brokers that lost their disks get the
        configuration again. Raises `ContentConflict` for anything that those files do not say: they are changed on
        the boxes.
        """
        entry = self._models.entry_at_boxes(document["sie_id"], own=True)
        if entry is None or document["sie_id"] in self._entries:
            return None
        said = wire.content_of(wire.entry_of(Configuration(wire.VERSION, document)))
        known = wire.content_of(entry)
        wire.refuse_other(known, said, said)
        new = [name for name in said if name not in known]
        if new:
            raise ContentConflict(
                f"profiles: {new[0]!a}: boxes have the model from files of their own; add the profile there",
                error="content_conflict",
            )
        return list(document["profiles"])

    def _views(self) -> dict[str, BundleView]:
        """Bundles that have boxes which take work, by name, the bundle of plain requests first."""
        views: dict[str, BundleView] = {}
        for box, bundle, adapters, told in self._models.configured_boxes():
            view = views.setdefault(bundle, BundleView(frozenset()))
            views[bundle] = BundleView(view.adapters | adapters, {**view.boxes, box: told})
        return dict(sorted(views.items(), key=lambda each: (each[0] != BUNDLE, each[0])))

    def _routes(self, entry: ModelEntry) -> list[str]:
        """Bundles that can run a model. Raises `ConfigRefused` where none can."""
        views, needed = self._views(), set(entry.adapters)
        able = [name for name, view in views.items() if view.can_run(entry)]
        known = self._models.families.union(*(view.adapters for view in views.values()))
        lacking = sorted(needed - known)
        if lacking or (views and not able):
            which = lacking[0] if lacking else ", ".join(sorted(needed))
            raise ConfigRefused(
                f"adapter_path: {which[:128]!a}: no bundle of boxes has this adapter",
                error="validation_error",
            )
        return able

    def models(self) -> list[dict[str, Any]]:
        self._check_read()
        shown = {
            model: {"model_id": model, "profiles": sorted(c.profiles), "source": "api"}
            for model, c in sorted((each.model, each) for each in self._followed.values.values())
        }
        for entry in self._models.catalog.sources:
            shown.setdefault(
                entry.id,
                {"model_id": entry.id, "profiles": _profiles(entry), "source": self._source(entry.id)},
            )
        return [shown[model] for model in sorted(shown)]

    def document(self, model: str) -> dict[str, Any]:
        self._check_read()
        configuration = self._of(model)
        if configuration is not None:
            return configuration.document
        entry = self._files_of(model)
        bundles = self._models.bundles_of(model)
        return {
            "sie_id": model,
            "source": self._source(model),
            "profiles": _profiles(entry),
            "bundles": bundles,
        }

    def _source(self, model: str) -> str:
        """Where a model without a configuration comes from: boxes may keep what the brokers have lost."""
        return "filesystem" if self._models.entry_at_boxes(model, own=True) is not None else "api"

    def _files_of(self, model: str) -> ModelEntry:
        entry = self._models.entry_at_boxes(model)
        if entry is None:
            raise ModelNotFound(f"Model {model[:200]!a} not found", error="model_not_found")
        return entry

    def _expected(self, view: BundleView) -> str:
        """Digest of all that is configured for a bundle."""
        able = (model for model, entry in self._entries.items() if view.can_run(entry))
        return wire.digest_of({model: self._contents[model] for model in able})

    def status(self, model: str) -> dict[str, Any]:
        self._check_read()
        entry, source = self._entries.get(model), "api"
        if entry is None:
            entry, source = self._files_of(model), self._source(model)
        able = ((name, view) for name, view in self._views().items() if view.can_run(entry))
        shown = [self._bundle_status(name, view, model) for name, view in able]
        return {
            "model_id": model,
            "config_epoch": self._followed.revision,
            "all_bundles_acked": bool(shown) and all(each["acked"] for each in shown),
            "no_bundles": not shown,
            "bundles": shown,
            "source": source,
        }

    def _bundle_status(self, name: str, view: BundleView, model: str) -> dict[str, Any]:
        expected = self._expected(view)
        acked = sorted(box for box, told in view.boxes.items() if told and told.digest == expected)
        refused = {
            box: told.refused[model] for box, told in view.boxes.items() if told and model in told.refused
        }
        return {
            "bundle_id": name,
            "expected_bundle_config_hash": expected,
            "total_eligible_workers": len(view.boxes),
            "acked_workers": acked,
            "pending_workers": sorted(view.boxes.keys() - acked - refused.keys()),
            "unsupported_workers": [
                {"name": box, "message": message} for box, message in sorted(refused.items())
            ],
            "acked": len(acked) == len(view.boxes),
        }

    def bundles(self) -> list[dict[str, Any]]:
        return [
            {
                "bundle_id": name,
                "priority": number,
                "adapter_count": len(view.adapters),
                "adapters": sorted(view.adapters),
                "source": "boxes",
                "connected_workers": len(view.boxes),
            }
            for number, (name, view) in enumerate(self._views().items())
        ]

    def resolve(self, model: str, bundle: str) -> dict[str, Any]:
        self._check_read()
        base = model.partition(":")[0]
        entry = self._entries.get(base) or self._files_of(base)
        if model != base and model not in {f"{base}:{name}" for name in _profiles(entry)}:
            raise ModelNotFound(f"Model {model[:200]!a} not found", error="model_not_found")
        able = [name for name, view in self._views().items() if view.can_run(entry)]
        bundles = able if base in self._entries else self._models.bundles_of(base)
        if bundle and bundle not in bundles:
            raise DependencyConflict(
                f"model {model[:200]!a} is not in the bundle {bundle[:64]!a}",
                compatible_bundles=bundles,
                error="bundle_conflict",
            )
        return {
            "model": model,
            "resolved_bundle": bundle or (bundles[0] if bundles else BUNDLE),
            "compatible_bundles": bundles,
            "profiles": _profiles(entry),
        }

    def epoch(self) -> dict[str, Any]:
        self._check_read()
        views = self._views()
        return {
            "epoch": self._followed.revision,
            "bundles_hash": _digest({name: sorted(view.adapters) for name, view in views.items()}),
            "bundle_config_hashes_hash": _digest(
                {name: self._expected(each) for name, each in views.items()}
            ),
        }

    def export(self) -> dict[str, Any]:
        self._check_read()
        views = self._views()

        def able(model: str) -> Collection[str]:
            entry = self._entries.get(model)
            return [] if entry is None else [name for name, view in views.items() if view.can_run(entry)]

        found = sorted((each.model, each.document) for each in self._followed.values.values())
        return {
            "epoch": self._followed.revision,
            "models": [
                {
                    "model_id": model,
                    "source": "api",
                    "model_config": document,
                    "affected_bundles": able(model),
                }
                for model, document in found
            ],
        }


def _profiles(entry: ModelEntry) -> list[str]:
    return sorted({"default", *entry.profiles})


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()
