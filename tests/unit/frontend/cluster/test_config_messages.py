"""Messages of a configuration service at one gateway, over a real broker: what is kept, and what is dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import yaml

from frontend.cluster.broker import lasting
from frontend.cluster.config_messages import ConfigMessages
from ipc.metrics.cluster import ConfigResult
from ipc.wire.cluster_names import Names
from tests.harness.broker import Broker, broker
from tests.harness.server import eventually
from tests.unit.frontend.cluster.test_configs import DOCUMENT, MODEL, Stage

FAST = {"fast": {"extends": "default", "max_batch_tokens": 64}}


class Service:
    """A configuration service, and a gateway that hears its messages."""

    def __init__(self, server: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("config_messages", "broker"):
            monkeypatch.setattr(f"frontend.cluster.{module}.TRY_AGAIN_S", 0.01)
        self.server, self.stage = server, Stage(server.url)
        self.results: Counter[str] = Counter()
        self.messages = ConfigMessages(
            self.stage.broker,
            Names().config_changes(),
            self.stage.configs.take,
            lambda result: self.results.update([result]),
        )

    async def start(self) -> None:
        await self.stage.start()
        self.stage._tasks.append(asyncio.create_task(lasting(self.messages.run)))
        self._client = await nats.connect(self.server.url)

    async def close(self) -> None:
        await self._client.close()
        await self.stage.close()

    async def tell(self, result: str, data: bytes = b"", **changes: Any) -> None:
        """Tell a change, and wait until the gateway has come to `result`."""
        before = self.results[result]
        await self._client.publish("sie.config.models._all", data or message(**changes))

        async def is_told() -> bool:
            return self.results[result] > before

        await eventually(is_told, f"the end of a message: {result}, not {self.results}")

    def profiles(self) -> set[str]:
        return set(self.stage.configs.document(MODEL)["profiles"])


def message(document: dict[str, Any] | str = DOCUMENT, **changes: Any) -> bytes:
    text = document if isinstance(document, str) else yaml.safe_dump(document)
    return msgspec.json.encode({"model_id": MODEL, "model_config": text, "epoch": 1, **changes})


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Service], Awaitable[None]]], None]:
    def run(scene: Callable[[Service], Awaitable[None]]) -> None:
        async def whole(server: Broker) -> None:
            service = Service(server, monkeypatch)
            try:
                await service.start()
                await scene(service)
            finally:
                await service.close()

        with broker(tmp_path) as server:
            asyncio.run(whole(server))

    return run


def test_a_change_is_kept_once_and_a_repeat_adds_nothing(play: Any) -> None:
    async def scene(service: Service) -> None:
        await service.tell("applied")
        assert service.stage.configs.document(MODEL) == DOCUMENT
        await service.tell("repeated")
        more = {"sie_id": MODEL, "profiles": FAST}
        await service.tell("applied", document=more, epoch=2, profiles_added=["fast"], router_id="")
        assert service.profiles() == {"default", "fast"}

    play(scene)


def test_an_older_change_is_dropped_unless_the_service_counts_anew(play: Any) -> None:
    async def scene(service: Service) -> None:
        more = {"sie_id": MODEL, "profiles": FAST}
        await service.tell("applied", epoch=7)
        await service.tell("stale", document=more, epoch=6)
        assert service.profiles() == {"default"}
        await service.tell("applied", document=more, epoch=6, producer_id="another")
        await service.tell("stale", epoch=5, producer_id="another")
        for tell in service.stage.broker.on_up:
            tell()
        await service.tell("repeated", epoch=1, producer_id="another")

    play(scene)


def test_a_change_that_was_ignored_is_no_last_change(play: Any) -> None:
    async def ignore(document: dict[str, Any]) -> ConfigResult:
        return "ignored"

    async def scene(service: Service) -> None:
        service.messages._apply = ignore
        await service.tell("ignored", epoch=7)
        service.messages._apply = service.stage.configs.take
        await service.tell("applied", epoch=6)

    play(scene)


def test_the_models_whose_epochs_are_remembered_have_a_bound(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.cluster.config_messages.MOST_EPOCHS", 2)

    async def scene(service: Service) -> None:
        for model in ("acme/one", "acme/two", "acme/one", "acme/three"):
            document = {**DOCUMENT, "sie_id": model}
            result = "repeated" if model in service.messages._epochs else "applied"
            await service.tell(result, document=document, model_id=model)
        assert list(service.messages._epochs) == ["acme/one", "acme/three"]

    play(scene)


def test_bad_messages_are_counted_and_the_next_one_is_heard(play: Any) -> None:
    async def scene(service: Service) -> None:
        for data in (b"\x00", b"[" * 100_000, b"{}", message(v=2), message(epoch=-1)):
            await service.tell("unreadable", data)
        await service.tell("refused", document="sie_id: &a [x]\nb: *a")
        await service.tell("refused", model_id="acme/unknown")
        await service.tell("refused", document={"sie_id": MODEL, "profiles": FAST})
        code = {"default": {"adapter_path": "os:system"}}
        await service.tell("refused", document={**DOCUMENT, "profiles": code})
        await service.tell("refused", document={**DOCUMENT, "weights_path": "/etc"})
        assert not service.stage.configs.models()
        # Nothing that was refused counts as the last change.
        await service.tell("applied", epoch=0)
        await service.tell("refused", document={**DOCUMENT, "hf_id": "acme/else"})
        assert service.stage.configs.document(MODEL) == DOCUMENT

    play(scene)


def test_a_change_waits_for_brokers_that_do_not_keep_it(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        write, failures = service.stage.configs._kept.write, iter(range(3))

        async def refuse(*arguments: Any) -> int:
            if next(failures, None) is not None:
                raise TimeoutError
            return await write(*arguments)

        monkeypatch.setattr(service.stage.configs._kept, "write", refuse)
        await service.tell("applied")
        assert service.stage.configs.document(MODEL) == DOCUMENT and next(failures, None) is None

    play(scene)


def test_an_error_in_the_code_costs_one_message_and_not_those_behind(play: Any) -> None:
    async def scene(service: Service) -> None:
        apply, failures = service.messages._apply, iter([ZeroDivisionError()])
        heard = asyncio.Event()

        async def fail(document: dict[str, Any]) -> ConfigResult:
            await heard.wait()
            for error in failures:
                raise error
            return await apply(document)

        service.messages._apply = fail
        for _ in range(2):
            await service._client.publish("sie.config.models._all", message())

        async def is_next_there() -> bool:
            return bool(service.messages._waiting)

        await eventually(is_next_there, "the message behind the first one")
        heard.set()

        async def is_applied() -> bool:
            return service.results["applied"] == 1

        await eventually(is_applied, "the message behind the error")

    play(scene)


def test_a_flood_is_dropped_and_counted(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8
    monkeypatch.setattr("frontend.cluster.config_messages.MOST_WAITING", most)

    async def scene(service: Service) -> None:
        free = asyncio.Event()

        async def wait(document: dict[str, Any]) -> ConfigResult:
            await free.wait()
            return "repeated"

        service.messages._apply = wait
        for _ in range(most + 1):
            await service._client.publish("sie.config.models._all", message())
        await service.tell("dropped")
        free.set()

        async def is_over() -> bool:
            return service.results["repeated"] >= most and not service.messages._waiting_nbytes

        await eventually(is_over, "the end of the line")

    play(scene)
