"""The files that a box makes of the configurations of its cluster, without a broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from frontend.bridge.configs import LACKING_S, MOST_REFUSED, ConfiguredModels
from frontend.cluster.broker import Broker
from ipc.catalog.entries import Catalog
from ipc.catalog.reading import read_served
from ipc.errors import ConfigRefused, ContentConflict, QueueUnavailable, StateFull
from ipc.settings import Settings, load
from ipc.wire import cluster_configs as wire
from ipc.wire.cluster_configs import (
    MOST_REFUSAL,
    VERSION,
    Configuration,
    content_of,
    digest_of,
    encode,
    entry_of,
    key_of,
)
from ipc.wire.cluster_names import Names
from tests.harness.server import eventually

OWN = """
id: acme/own
source: {kind: hub, repo: acme/own}
adapter: tests.fakes.adapter:FakeAdapter
served_name: own-name
"""


def configuration(model: str, adapter: str = "dense", **changes: Any) -> Configuration:
    document = {
        "sie_id": model,
        "hf_id": model,
        "tasks": {"encode": {"dense": {}}},
        "profiles": {"default": {"adapter_path": adapter}},
    }
    document["tasks"] = {"encode": {"dense": {"dim": 8}}}
    return Configuration(VERSION, {**document, **changes})


class Workers:
    """The models of a box as its workers serve them."""

    def __init__(self) -> None:
        self.version, self.catalog = 1, Catalog(())

    def serve(self, settings: Settings) -> None:
        """The workers read the files."""
        self.version += 1
        self.catalog = read_served(settings.catalog, settings.repository, added=settings.configured_dirs)


class Stage:
    """One box with a catalog of its own."""

    def __init__(self, root: Path, **more: Any) -> None:
        own = root / "own"
        own.mkdir()
        (own / "own.yaml").write_text(OWN)
        flags = {"catalog.dirs": str(own), "run.dir": str(root / "run"), "cluster.urls": "nats://127.0.0.1:1"}
        self.settings = load(None, flags | more, environ={})
        self.settings.paths.root.mkdir()
        self.workers, self.revision, self.now_s = Workers(), 0, 1000.0
        self.begin()

    def begin(self) -> None:
        """A life of the bridge begins."""
        broker = Broker(self.settings.cluster, "test")
        self.one = ConfiguredModels(
            self.settings,
            broker,
            Names(),
            self.workers,  # type: ignore[arg-type]
            now_s=lambda: self.now_s,
        )

    async def apply(self, *configurations: Configuration) -> None:
        """The bucket has these, and the box has written its files."""
        followed = self.one._followed
        for gone in followed.values.keys() - {key_of(each.model) for each in configurations}:
            del followed.values[gone]
        for each in configurations:
            self.revision += 1
            followed.take(key_of(each.model), encode(each), self.revision)
        followed.is_read = followed.is_there = True
        followed.on_change()
        await self.one.apply()

    async def lack(self, *configurations: Configuration) -> None:
        """The bucket has these alone for long."""
        await self.apply(*configurations)
        self.now_s += LACKING_S
        await self.one.apply()

    def files(self) -> dict[str, Any]:
        found = [yaml.safe_load(path.read_text()) for path in self.settings.paths.configurations().iterdir()]
        return {each["sie_id"]: each for each in found}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_configuration_becomes_a_file_and_is_told_once_workers_serve_it(stage: Stage) -> None:
    async def scene() -> None:
        made = configuration("acme/new")
        await stage.apply(made)
        assert stage.files() == {"acme/new": made.document}
        expected = digest_of({"acme/new": content_of(entry_of(made))})
        assert stage.one.told().digest != expected, "no worker has read the file"
        stage.workers.serve(stage.settings)
        assert stage.one.told().digest == expected and not stage.one.told().refused
        assert "acme/own" in stage.workers.catalog
        await stage.lack()
        assert stage.files() == {}

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (configuration("acme/code", "os:system"), "adapter"),
        (configuration("acme/own", "dense"), "other content"),
        (configuration("own-name"), "name"),
        (configuration("acme/wrong", max_sequence_length=-1), "max_sequence_length"),
    ],
)
def test_what_the_box_cannot_take_is_refused_and_the_others_go_on(
    stage: Stage, made: Configuration, words: str
) -> None:
    async def scene() -> None:
        good = configuration("acme/good")
        await stage.apply(made, good)
        stage.workers.serve(stage.settings)
        told = stage.one.told()
        assert list(told.refused) == [made.model] and words in told.refused[made.model]
        assert told.digest == digest_of({"acme/good": content_of(entry_of(good))})
        assert stage.files().keys() == {"acme/good"}

    asyncio.run(scene())


def test_a_model_that_the_box_has_alike_needs_no_file(stage: Stage) -> None:
    async def scene() -> None:
        default = {"adapter_path": "tests.fakes.adapter:FakeAdapter"}
        made = configuration(
            "acme/own", profiles={"default": default}, tasks={"encode": {"dense": {"dim": 8}}}
        )
        own = stage.settings.catalog.dirs[0]
        (Path(own) / "own.yaml").write_text(
            OWN.replace("served_name: own-name", "outputs: {dense: {dims: 8}}")
        )
        await stage.apply(made)
        stage.workers.serve(stage.settings)
        assert stage.files() == {} and not stage.one.told().refused
        assert stage.one.told().digest == digest_of({"acme/own": content_of(entry_of(made))})

    asyncio.run(scene())


def test_files_stay_while_there_is_no_bucket_also_for_the_next_life_of_the_bridge(stage: Stage) -> None:
    async def scene() -> None:
        await stage.apply(configuration("acme/new"))
        before = stage.files()
        stage.begin()
        stage.one._followed._told()
        await stage.one.apply()
        assert stage.files() == before, "brokers that lost their disks"
        await stage.lack()
        assert before and stage.files() == {}, "a bucket without the model"

    asyncio.run(scene())


def test_the_box_knows_which_models_it_has_by_configurations_also_in_its_next_life(stage: Stage) -> None:
    async def scene() -> None:
        assert stage.one.kept == set()
        await stage.apply(configuration("acme/new"))
        assert stage.one.kept == {key_of("acme/new")}
        stage.begin()
        assert stage.one.kept == {key_of("acme/new")}, "before brokers have told anything"
        await stage.lack()
        assert stage.one.kept == set()

    asyncio.run(scene())


def test_a_file_stays_while_brokers_that_lost_their_disks_get_their_values_back(stage: Stage) -> None:
    """A gateway writes the values one after the other into a new bucket."""

    async def scene() -> None:
        both = configuration("acme/one"), configuration("acme/two")
        await stage.apply(*both)
        await stage.apply(both[0])
        stage.now_s += LACKING_S - 0.1
        await stage.one.apply()
        assert stage.files().keys() == {"acme/one", "acme/two"}
        await stage.apply(*both)
        stage.now_s += LACKING_S
        await stage.apply(both[0])
        assert stage.files().keys() == {"acme/one", "acme/two"}, "time of a lack before does not count"
        stage.now_s += LACKING_S
        await stage.one.apply()
        assert stage.files().keys() == {"acme/one"}

    asyncio.run(scene())


def test_time_without_a_bucket_is_no_lack_of_a_model(stage: Stage) -> None:
    async def scene() -> None:
        both = configuration("acme/one"), configuration("acme/two")
        await stage.apply(*both)
        await stage.apply(both[0])
        stage.one._followed.is_there = False
        stage.now_s += LACKING_S
        await stage.one.apply()
        await stage.apply(both[0])
        assert stage.files().keys() == {"acme/one", "acme/two"}
        await stage.lack(both[0])
        assert stage.files().keys() == {"acme/one"}

    asyncio.run(scene())


def test_the_box_tells_the_last_document_of_a_file_that_the_bucket_lacks(stage: Stage) -> None:
    async def scene() -> None:
        made = configuration("acme/new")
        grown = {**made.document["profiles"], "more": {"adapter_path": "dense", "max_batch_tokens": 99}}
        await stage.apply(made)
        stage.begin()
        stage.one._documents = stage.one._read()
        await stage.apply(last := configuration("acme/new", profiles=grown))
        await stage.apply()
        assert stage.files() == {"acme/new": last.document}
        assert stage.one.document("acme/new") == last.document
        await stage.lack()
        assert not stage.files() and stage.one.document("acme/new") is None and not stage.one._documents

    asyncio.run(scene())


def test_the_box_tells_the_documents_of_its_files_also_in_its_next_life(stage: Stage) -> None:
    async def scene() -> None:
        made = configuration("acme/new")
        await stage.apply(made)
        assert stage.one.document("acme/new") == made.document and stage.one.document("acme/own") is None
        (stage.settings.paths.configurations() / "broken.yaml").write_text("{")
        stage.begin()
        before = stage.one.version
        running = asyncio.create_task(stage.one._run())

        async def has_read() -> bool:
            return stage.one.version > before

        await eventually(has_read, "the files")
        assert stage.one.document("acme/new") == made.document
        running.cancel()

    asyncio.run(scene())


def test_states_of_workers_are_no_reason_to_look_at_the_content_of_models_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        await stage.apply(configuration("acme/new"))
        stage.workers.serve(stage.settings)
        told, looked = stage.one.told(), list[str]()
        monkeypatch.setattr(wire, "content_of", lambda entry: looked.append(entry.id) or content_of(entry))
        stage.workers.version += 1
        assert stage.one.told() == told and not looked
        stage.workers.serve(stage.settings)
        assert stage.one.told() == told and looked == ["acme/new"]

    asyncio.run(scene())


def test_refusals_of_many_models_leave_the_row_of_the_box_small(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Stage(tmp_path, **{"catalog.watch": False})
        await stage.apply(*(configuration(f"acme/{number}") for number in range(MOST_REFUSED + 44)))
        refused = stage.one.told().refused
        assert len(refused) == MOST_REFUSED
        longest = dict.fromkeys((f"{number:0200}" for number in range(MOST_REFUSED)), "x" * MOST_REFUSAL)
        assert len(msgspec.msgpack.encode(longest)) < 128 << 10

    asyncio.run(scene())


def test_a_box_that_follows_no_files_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Stage(tmp_path, **{"catalog.watch": False})
        await stage.apply(configuration("acme/new"))
        assert "catalog.watch" in stage.one.told().refused["acme/new"] and stage.files() == {}

    asyncio.run(scene())


def test_a_directory_that_cannot_be_written_is_a_refusal_and_no_end(stage: Stage) -> None:
    async def scene() -> None:
        stage.settings.paths.configurations().write_text("a file in the way")
        await stage.apply(configuration("acme/new"))
        assert "cannot write" in stage.one.told().refused["acme/new"]
        stage.settings.paths.configurations().unlink()
        await stage.apply(configuration("acme/new"))
        assert stage.files().keys() == {"acme/new"} and not stage.one.told().refused

    asyncio.run(scene())


def test_without_a_bucket_a_box_takes_what_a_service_tells_its_bundle(stage: Stage) -> None:
    async def scene() -> None:
        made = configuration("acme/new")
        more = {"sie_id": "acme/new", "profiles": {"fast": {"extends": "default", "max_batch_tokens": 64}}}
        stage.one._followed.is_read = True
        assert await stage.one.hear(made.document) == "applied"
        assert await stage.one.hear(made.document) == "repeated"
        await stage.one.apply()
        assert stage.files() == {"acme/new": made.document}
        stage.workers.serve(stage.settings)
        assert stage.one.told().digest == digest_of({"acme/new": content_of(entry_of(made))})
        # The next life adds a profile to the model of a file.
        stage.begin()
        stage.one._followed.is_read = True
        assert await stage.one.hear(more) == "applied"
        await stage.one.apply()
        assert stage.files()["acme/new"]["profiles"].keys() == {"default", "fast"}
        for other in (
            configuration("acme/new", "splade").document,
            configuration("acme/wrong", x=1).document,
        ):
            with pytest.raises((ConfigRefused, ContentConflict)):
                await stage.one.hear(other)

    asyncio.run(scene())


def test_a_message_before_the_files_of_an_earlier_life_are_read_takes_no_profile_away(stage: Stage) -> None:
    async def scene() -> None:
        told = configuration("acme/new")
        fast = {**told.profiles, "fast": {"extends": "default", "max_batch_tokens": 64}}
        stage.one._followed.is_read = True
        await stage.one.hear({**told.document, "profiles": fast})
        await stage.one.apply()
        stage.begin()
        stage.one._followed.is_read = True
        assert await stage.one.hear(told.document) == "repeated"
        await stage.one.apply()
        assert stage.files()["acme/new"]["profiles"].keys() == fast.keys()

    asyncio.run(scene())


def test_a_bucket_goes_before_what_a_service_told(stage: Stage) -> None:
    async def scene() -> None:
        told, kept = configuration("acme/told"), configuration("acme/kept")
        stage.one._followed.is_read = True
        await stage.one.hear(told.document)
        await stage.one.apply()
        # A gateway writes one after the other into the bucket that it makes.
        await stage.apply(kept)
        assert stage.files().keys() == {"acme/told", "acme/kept"}
        assert await stage.one.hear(configuration("acme/later").document) == "ignored"
        assert await stage.one.hear(kept.document) == "ignored"
        with pytest.raises(ConfigRefused):
            await stage.one.hear(configuration("acme/wrong", x=1).document)
        await stage.lack(kept)
        assert stage.files().keys() == {"acme/kept"}

    asyncio.run(scene())


def test_a_message_before_the_bucket_was_read_waits(stage: Stage) -> None:
    async def scene() -> None:
        made = configuration("acme/new")
        with pytest.raises(QueueUnavailable, match="has yet to be read"):
            await stage.one.hear(made.document)
        await stage.apply(configuration("acme/kept"))
        assert await stage.one.hear(made.document) == "ignored"

    asyncio.run(scene())


def test_documents_of_messages_have_a_bound(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.bridge.configs.MOST_HEARD_NBYTES", 300)

    async def scene() -> None:
        stage.one._followed.is_read = True
        await stage.one.hear(configuration("acme/a").document)
        with pytest.raises(StateFull, match="300"):
            for name in "bcd":
                await stage.one.hear(configuration(f"acme/{name}").document)

    asyncio.run(scene())
