"""The configurations of the cluster at one box: files in the run directory, which the workers of the box serve.

1. The bucket of configurations is followed. A model whose adapters the box has becomes a file of the directory
   `RunPaths.configurations`, in SIE's layout; workers follow such files as those of their own catalog.
2. What the box cannot take is refused with the reason, and the other models go on: an adapter that no model of the
   box's own files has, a model or a name of the box's own catalog with other content, a file that cannot be written.
3. The box tells the digest of the models that its workers serve as they are configured, and what it refused.
4. Files outlive the bridge, and the loss of all brokers. A file goes when a bucket lacks its model for `LACKING_S`:
   a gateway may be about to put back what brokers have lost. Files stay while there is no bucket. Gateways hear the
   documents of the files with the rows of their models.
5. While there is no bucket, since no gateway of Penstock keeps one, the box takes documents from messages of a
   configuration service to its bundle. A bucket goes before messages: gateways hear the same changes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from frontend.cluster.broker import Broker
from frontend.cluster.config_messages import ConfigMessages
from frontend.cluster.kept import Followed, Kept
from frontend.engine.interface import Models
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.option_names import FAMILY_OPTIONS
from ipc.catalog.reading import read_served
from ipc.catalog.repository import VersionEntry
from ipc.errors import ConfigError, ConfigRefused, ContentConflict, InvalidInput, QueueUnavailable, StateFull
from ipc.metrics.cluster import ConfigResult
from ipc.settings import Settings
from ipc.wire import cluster_configs as wire
from ipc.wire.cluster_configs import BoxConfigs, Configuration
from ipc.wire.cluster_names import Names

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""Refused models are tried again so often: the files of the box may have changed."""
LACKING_S = 10.0
MOST_REFUSED = 256
"""Refusals that a box tells: its row has to fit into a message."""
MOST_HEARD_NBYTES = 64 << 20
"""Documents that a box keeps of messages."""


class ConfiguredModels:
    """The configurations of one box. `loops` follow them, and write files."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        names: Names,
        models: Models,
        on_message: Callable[[ConfigResult], None] = lambda result: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_message` hears what became of each message of a configuration service."""
        self._settings, self._broker, self._models, self._now_s = settings, broker, models, now_s
        self._root = settings.paths.configurations()
        self._followed = Followed(broker, Kept(broker, names.configs), wire.read_configuration)
        self._followed.on_change = self._note
        bundle = settings.cluster.bundle
        self._messages = ConfigMessages(broker, names.config_changes(bundle), self.hear, on_message, bundle)
        self._heard: dict[str, Configuration] = {}
        """Configurations of messages by model, while there is no bucket."""
        self._wanted = asyncio.Event()
        self._refused: dict[str, str] = {}
        self._given: dict[str, wire.Content] = {}
        """Content of the models that have files, or that the box's own files have alike."""
        self.kept = self._listed()
        """Keys of the models that the box has by files of configurations, also of an earlier life of the bridge."""
        self._documents: dict[str, dict[str, Any]] = {}
        """Documents of the files by key, also of those that an earlier life of the bridge has written."""
        self._is_learnt, self._learning = False, asyncio.Lock()
        self._lacking: dict[str, float] = {}
        """Since when the bucket has lacked models of files, by key, in seconds of the clock."""
        self._told: tuple[Sequence[ModelEntry], Mapping[str, wire.Content]] = (), {}
        self._digest = ""
        self.version = 0
        """Grows with every change of what `told` tells, unless models of workers changed."""

    @property
    def loops(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What runs as long as the bridge."""

        async def follow() -> None:
            await self._followed.run(self._broker)

        return follow, self._run, self._messages.run

    def _note(self) -> None:
        if self._followed.is_read:
            self._wanted.set()

    async def hear(self, document: dict[str, Any]) -> ConfigResult:
        """Take in what a configuration service tells the bundle; applied if profiles are new to the box.

        Ignored while there is a bucket. Raises `ConfigRefused` and `ContentConflict` for what cannot be, `StateFull`
        for more than a box keeps, and `QueueUnavailable` before the brokers have told whether there is a bucket.
        """
        if not self._followed.is_read:
            raise QueueUnavailable("the bucket of configurations has yet to be read", retry_after_s=1)
        await self._learn()
        model = document["sie_id"]
        known = self._heard.get(model)
        if known is None and (earlier := self.document(model)) is not None:
            known = Configuration(wire.VERSION, earlier)
        after = await asyncio.to_thread(wire.merged, known, document)
        await asyncio.to_thread(wire.entry_of, after)
        is_new = known is None or bool(after.profiles.keys() - known.profiles.keys())
        if self._followed.is_there:
            return "ignored"
        heard = {**self._heard, model: after}
        nbytes = await asyncio.to_thread(_nbytes, heard.values())
        if nbytes > MOST_HEARD_NBYTES:
            raise StateFull(f"documents of messages have {nbytes} bytes, and {MOST_HEARD_NBYTES} may be")
        self._heard = heard
        self._note()
        return "applied" if is_new else "repeated"

    def gives(self, model: str) -> bool:
        """Whether the box has a model by a file of a configuration."""
        return wire.key_of(model) in self.kept

    def document(self, model: str) -> dict[str, Any] | None:
        """The document of a model that the box has by a configuration."""
        key = wire.key_of(model)
        if key not in self.kept:
            return None
        known = self._followed.values.get(key)
        return known.document if known is not None else self._documents.get(key)

    def told(self) -> BoxConfigs:
        """What the box has of the configurations."""
        # PERF: the content of a model takes a quarter of a millisecond, and the states of workers change all the time.
        sources = self._models.catalog.sources
        if self._told[0] is not sources or self._told[1] is not self._given:
            served = {entry.id: entry for entry in sources if entry.id in self._given}
            # A model that is served otherwise, as workers have yet to read its file, gives another digest.
            contents = {
                model: {name: found.get(name, {}) for name in self._given[model]}
                for model, entry in served.items()
                for found in (wire.content_of(entry),)
            }
            self._digest, self._told = wire.digest_of(contents), (sources, self._given)
        refused = dict(itertools.islice(self._refused.items(), MOST_REFUSED))
        return BoxConfigs(self._followed.revision, self._digest, refused)

    async def _learn(self) -> None:
        """Read the files of an earlier life of the bridge, once."""
        async with self._learning:
            if not self._is_learnt:
                self._documents = await asyncio.to_thread(self._read)
                self._is_learnt = True
                self.version += 1

    async def _run(self) -> None:
        await self._learn()
        while True:
            again_s = LACKING_S if self._lacking else AGAIN_S if self._refused else None
            try:
                async with asyncio.timeout(again_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            await self.apply()

    async def apply(self) -> None:
        """Write what is known now."""
        if self._followed.is_there:
            self._heard = {}
        known = self._heard | {each.model: each for each in self._followed.values.values()}
        if not known and not (self._followed.is_there and self._root.exists()):
            self._lacking = {}
            return
        before = self._refused, self._given, self.kept
        now_s, absent = self._now_s(), self.kept - {wire.key_of(model) for model in known}
        # Time counts while there is a bucket: who makes the bucket anew puts values back one by one.
        since = self._lacking if self._followed.is_there else {}
        self._lacking = {key: since.get(key, now_s) for key in absent}
        stay = {key for key, since_s in self._lacking.items() if now_s - since_s < LACKING_S}
        # NOTE: files of a catalog are read and written, which would hold up the event loop.
        self._refused, self._given = await asyncio.to_thread(self._write, known, self._taken(), stay)
        self._lacking = {key: since_s for key, since_s in self._lacking.items() if key in stay}
        self.kept = await asyncio.to_thread(self._listed)
        documents = {wire.key_of(model): each.document for model, each in known.items()}
        self._documents = {k: each for k, each in {**self._documents, **documents}.items() if k in self.kept}
        for model, why in self._refused.items():
            if before[0].get(model) != why:
                log.warning("the configuration of %s is refused: %s", model, why)
        if before != (self._refused, self._given, self.kept):
            self.version += 1

    def _listed(self) -> set[str]:
        try:
            return {path.stem for path in self._root.iterdir() if path.suffix == ".yaml"}
        except OSError:
            return set()

    def _read(self) -> dict[str, dict[str, Any]]:
        """The documents of the files by key; files that cannot be read are left out."""
        found: dict[str, dict[str, Any]] = {}
        for key in self.kept:
            try:
                found[key] = wire.read_document((self._root / f"{key}.yaml").read_bytes())
            except (OSError, ConfigRefused, InvalidInput) as error:
                log.warning("the file of a configuration cannot be read: %s", error)
        return found

    def _taken(self) -> set[str]:
        """Names of models of repositories."""
        return {entry.model for entry in self._models.catalog.sources if isinstance(entry, VersionEntry)}

    def _write(
        self, known: Mapping[str, Configuration], taken: set[str], stay: set[str]
    ) -> tuple[dict[str, str], dict[str, wire.Content]]:
        """Have the directory hold what is known, and the files of the keys in `stay`.

        Returns why models are refused, and the content of the others.
        """
        refused: dict[str, str] = {}
        given: dict[str, wire.Content] = {}
        files: dict[Path, bytes] = {}
        try:
            own = read_served(self._settings.catalog, self._settings.repository, vanished_ok=True)
        except (ConfigError, OSError) as error:
            log.error("configurations wait, since the catalog of this box cannot be read: %s", error)
            return dict.fromkeys(known, "the box cannot read its own catalog"), {}
        adapters = set(FAMILY_OPTIONS).union(*(entry.adapters for entry in own.sources))
        for model, configuration in known.items():
            try:
                entry = self._entry(configuration, adapters)
                content = wire.content_of(entry)
                if not self._is_own(entry, content, own, taken):
                    files[self._root / f"{wire.key_of(model)}.yaml"] = _text(configuration)
                given[model] = content
            except (ConfigRefused, ContentConflict) as error:
                refused[model] = error.message[: wire.MOST_REFUSAL]
        failed = self._put(files, {self._root / f"{key}.yaml" for key in stay})
        for model in [model for model in given if self._root / f"{wire.key_of(model)}.yaml" in failed]:
            refused[model] = "the box cannot write the file of the model"
            del given[model]
        return refused, given

    def _entry(self, configuration: Configuration, adapters: set[str]) -> ModelEntry:
        if not self._settings.catalog.watch:
            raise ConfigRefused("the box does not follow files of models (catalog.watch)")
        entry = wire.entry_of(configuration)
        lacking = sorted(set(entry.adapters) - adapters)
        if lacking:
            raise ConfigRefused(f"the box has no adapter {lacking[0][:128]!a}")
        return entry

    @staticmethod
    def _is_own(entry: ModelEntry, content: wire.Content, own: Catalog, taken: set[str]) -> bool:
        """Whether the box's own files have a model with this content; they go before a configuration.

        Raises `ContentConflict` where they have something else under the name.
        """
        if entry.id in taken or entry.id in own.aliases:
            raise ContentConflict("another model of the box has this name")
        mine = next((each for each in own.sources if each.id == entry.id), None)
        if mine is None:
            return False
        known = wire.content_of(mine)
        wire.refuse_other(known, content, content)
        if content.keys() - known.keys():
            raise ContentConflict("the box has this model from files of its own, with other profiles")
        return True

    def _put(self, files: Mapping[Path, bytes], stay: set[Path]) -> set[Path]:
        """Write files that differ, and remove all others but `stay`. Returns those that could not be written."""
        failed = set[Path]()
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            for path in set(self._root.iterdir()) - files.keys() - stay:
                path.unlink()
        except OSError as error:
            log.error("configurations of the cluster cannot be changed here: %s", error)
        for path, data in files.items():
            try:
                if not path.exists() or path.read_bytes() != data:
                    draft = path.with_suffix(".draft")
                    draft.write_bytes(data)
                    draft.replace(path)
            except OSError as error:
                log.error("a configuration of the cluster cannot be written: %s", error)
                failed.add(path)
        return failed


def _nbytes(configurations: Iterable[Configuration]) -> int:
    return sum(len(wire.encode(each)) for each in configurations)


def _text(configuration: Configuration) -> bytes:
    return yaml.safe_dump(configuration.document, sort_keys=False).encode()
