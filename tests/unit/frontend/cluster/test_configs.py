"""Changes of configurations at one gateway, over a real broker: keys that two requests share, and a lost bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from frontend.cluster.boxes import Boxes
from frontend.cluster.broker import Broker
from frontend.cluster.configs import ClusterConfigs
from frontend.cluster.directory import ClusterModels
from ipc.catalog.entries import Catalog
from ipc.errors import ConfigRefused, PenstockError
from ipc.settings import Cluster
from ipc.wire.cluster import VERSION, BoxBeat
from ipc.wire.cluster_configs import Configuration, entry_of, key_of, read_configuration
from ipc.wire.cluster_names import Names, row_key
from ipc.wire.cluster_rows import BoxRow, ModelRow, WorkerRow
from ipc.wire.messages import ModelStatus
from tests.harness.broker import broker
from tests.harness.server import eventually

MODEL = "acme/vec"
DOCUMENT = {
    "sie_id": MODEL,
    "hf_id": MODEL,
    "tasks": {"encode": {"dense": {"dim": 8}}},
    "profiles": {"default": {"adapter_path": "dense"}},
}
BODY = yaml.safe_dump(DOCUMENT).encode()


class Stage:
    """A gateway that hears a box which serves `MODEL`."""

    def __init__(
        self, url: str, *, configured: bool | None = None, document: dict[str, Any] | None = None
    ) -> None:
        """`configured`: the box has the model by a configuration, or by a file of its own; None: not at all.

        `document`: what the box tells of the configuration.
        """
        self.broker = Broker(Cluster(urls=(url,)), "test")
        boxes = Boxes(Cluster())
        self.models = ClusterModels(Catalog(()), boxes, 0.0, lambda: self.broker.up)
        self.configs = ClusterConfigs(self.broker, Names(), self.models, "router")
        boxes.take(BoxBeat(VERSION, "a", "a1", "default", 1, False, 1.0, 0.0))
        served = [] if configured is None else [MODEL]
        worker = WorkerRow("worker-0", 0, "ready", True, True, "cpu", 1)
        rows: dict[str, Any] = {"a": BoxRow(VERSION, "a", "a1", "default", "default", [worker], True, served)}
        for model in served:
            states = {"worker-0": [ModelStatus(model, "available")]}
            entry = entry_of(Configuration(VERSION, DOCUMENT))
            rows[row_key("a", model)] = ModelRow(
                VERSION, "a1", entry, None, states, configured=bool(configured), document=document
            )
        self.models.read(rows)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.broker.start()
        self._tasks = [asyncio.create_task(run()) for run in self.configs.loops]  # type: ignore[arg-type]

        async def is_read() -> bool:
            return self.configs._followed.is_read

        await eventually(is_read, "the configurations")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.broker.close()


def on_broker(root: Path, scene: Callable[[Stage], Awaitable[None]], **box: Any) -> None:
    async def whole(url: str) -> None:
        stage = Stage(url, **box)
        try:
            await stage.start()
            await scene(stage)
        finally:
            await stage.close()

    with broker(root) as server:
        asyncio.run(whole(server.url))


def test_a_model_that_boxes_keep_of_a_lost_bucket_is_written_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.configs.document(MODEL)["source"] == stage.configs.status(MODEL)["source"] == "api"
        assert [each["source"] for each in stage.configs.models()] == ["api"]
        status, _ = await stage.configs.put(BODY, "")
        assert status == 201 and stage.configs.document(MODEL) == DOCUMENT
        data, _ = await stage.configs._kept.read(key_of(MODEL))
        assert data is not None

    on_broker(tmp_path, scene, configured=True)


OTHER = DOCUMENT | {"sie_id": "acme/other", "hf_id": "acme/other"}


async def _kept(stage: Stage) -> set[str]:
    found = [await stage.configs._kept.read(key_of(model)) for model in (MODEL, "acme/other")]
    return {read_configuration(data).model for data, _ in found if data is not None}


def test_a_change_behind_a_lost_bucket_keeps_what_the_gateway_knows(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        fast = {"adapter_path": "dense", "max_batch_tokens": 64}
        assert (await stage.configs.put(BODY, ""))[0] == 201
        more = yaml.safe_dump({"sie_id": MODEL, "profiles": {"fast": fast}}).encode()
        assert (await stage.configs.put(more, ""))[0] == 201
        await stage.broker.client.jetstream().delete_key_value(Names().configs)
        assert (await stage.configs.put(yaml.safe_dump(OTHER).encode(), ""))[0] == 201
        assert await _kept(stage) == {MODEL, "acme/other"}

        async def has_both() -> bool:
            return {each["model_id"] for each in stage.configs.models()} == {MODEL, "acme/other"}

        await eventually(has_both, "both models")
        assert stage.configs.document(MODEL)["profiles"].keys() == {"default", "fast"}

    on_broker(tmp_path, scene)


def test_a_change_behind_a_lost_bucket_keeps_what_boxes_tell(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.configs.put(yaml.safe_dump(OTHER).encode(), ""))[0] == 201
        assert await _kept(stage) == {MODEL, "acme/other"}
        assert stage.configs.document(MODEL) == DOCUMENT

    on_broker(tmp_path, scene, configured=True, document=DOCUMENT)


@pytest.mark.parametrize(
    "document", [{}, {"sie_id": "../x"}, DOCUMENT | {"weights_path": "/etc"}, DOCUMENT | {"profiles": 3}]
)
def test_what_a_box_tells_is_checked_before_it_is_put_back(tmp_path: Path, document: dict[str, Any]) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.configs.put(yaml.safe_dump(OTHER).encode(), ""))[0] == 201
        assert await _kept(stage) == {"acme/other"}

    on_broker(tmp_path, scene, configured=True, document=document)


def test_a_model_of_the_files_of_a_box_needs_no_value(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert [each["source"] for each in stage.configs.models()] == ["filesystem"]
        status, _ = await stage.configs.put(BODY, "")
        assert status == 200 and await stage.configs._kept.read(key_of(MODEL)) == (None, 0)

    on_broker(tmp_path, scene, configured=False)


@pytest.mark.parametrize("fails", ["the first", "the second"])
def test_of_two_requests_with_one_key_the_one_that_fails_leaves_the_answer_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async def scene(stage: Stage) -> None:
        add, gates = stage.configs._add, [asyncio.Event(), asyncio.Event()]
        begun: list[int] = []

        async def gated(document: dict[str, Any]) -> Any:
            number = len(begun)
            begun.append(number)
            await gates[number].wait()
            if fails == ("the first", "the second")[number]:
                raise ConfigRefused("no")
            return await add(document)

        monkeypatch.setattr(stage.configs, "_add", gated)
        puts = []
        for number in range(2):
            puts.append(asyncio.create_task(stage.configs.put(BODY, "key")))

            async def has_begun(count: int = number + 1) -> bool:
                return len(begun) == count

            await eventually(has_begun, "the change")
        # The one that succeeds ends first, then the other one fails.
        last = 0 if fails == "the first" else 1
        gates[1 - last].set()
        status, answer = await puts[1 - last]
        assert status == 201
        gates[last].set()
        with pytest.raises(PenstockError):
            await puts[last]
        monkeypatch.setattr(stage.configs, "_add", add)
        assert await stage.configs.put(BODY, "key") == (201, answer), "the first answer, not that of a repeat"

    on_broker(tmp_path, scene)


def test_a_key_whose_first_request_fails_keeps_the_answer_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        add = stage.configs._add

        async def refused(document: dict[str, Any]) -> Any:
            raise ConfigRefused("no")

        monkeypatch.setattr(stage.configs, "_add", refused)
        with pytest.raises(ConfigRefused):
            await stage.configs.put(BODY, "key")
        assert (await stage.configs._keys.read(key_of("key")))[0] is None
        monkeypatch.setattr(stage.configs, "_add", add)
        first = await stage.configs.put(BODY, "key")
        assert first[0] == 201 and await stage.configs.put(BODY, "key") == first

    on_broker(tmp_path, scene)
