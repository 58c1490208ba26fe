"""Results of a decoupled model without workers: what is booked however they end, and what is held meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.protocols.kserve_v2.generate import _only
from frontend.scope import current_scope, plain_scope
from frontend.sending import EventStream
from frontend.services import Services
from frontend.tensors.request import InputTensor, TensorRequest
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import InvalidInput, LeaseRevoked
from tests.fakes.tensors import InferReply, ending, entry, loaded, results, services_of, tensor

COUNT = 3
NBYTES = 256 << 10
CONFIG = ModelConfig(
    name="parts",
    inputs=(tensor("A", "UINT8", -1),),
    outputs=(tensor("O", "INT32", 1),),
    decoupled=True,
)


class Parts:
    """A stream whose work is done when its last part was made, though nobody has read it yet."""

    def __init__(self) -> None:
        self._left = [InferReply.of(O=np.full(1, number, np.int32)) for number in range(COUNT)]
        self._then: list[Callable[[], object]] = []
        self.result: InferReply | None = None

    def when_answered(self, then: Callable[[], object]) -> None:
        """Keep."""
        self._then.append(then)

    def answer(self) -> None:
        """The worker has done its work."""
        for then in self._then:
            then()

    async def __anext__(self) -> InferReply:
        if not self._left:
            self.result = InferReply([], {})
            raise StopAsyncIteration
        return self._left.pop(0)

    def __aiter__(self) -> Parts:
        return self

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.clear()


def run(
    root: Path,
    act: Callable[[Services, Parts, AsyncGenerator[Any, None]], Any],
    fails: type[Exception] | None = None,
) -> list[Any]:
    """Do `act` with the results of one request, whose inputs are in a block; what was booked. It `fails` so."""

    async def whole() -> list[Any]:
        more = {"arena__input_inline_bytes": "1000"}
        services = services_of(root, [entry("parts@1")], [loaded("parts@1", CONFIG)], **more)
        parts = Parts()
        client: Any = services.engine.client

        async def stream(request: Any, payload: Any) -> Parts:
            return parts

        client.stream = stream
        made = plain_scope()
        made.deadline_ns = deadline.after(20)
        current_scope.set(made)
        request = TensorRequest("parts", None, [InputTensor("A", "UINT8", [NBYTES], bytes(NBYTES))], None)
        try:
            failing = nullcontext() if fails is None else pytest.raises(fails)
            with failing, ending(services, made):
                await act(services, parts, results(services, made, request))
            assert client.inputs.used_nbytes == 0
        finally:
            client.inputs.close()
        return services.extensions.counters.booked  # type: ignore[attr-defined, no-any-return]

    return asyncio.run(whole())


def test_inputs_are_given_back_when_the_work_is_done_and_not_when_it_was_read(tmp_path: Path) -> None:
    async def act(services: Services, parts: Parts, found: AsyncGenerator[Any, None]) -> None:
        async with aclosing(found):
            await anext(found)
            assert services.engine.client.inputs.used_nbytes >= NBYTES
            parts.answer()
            assert services.engine.client.inputs.used_nbytes == 0
            assert len([result async for result in found]) == COUNT - 1

    assert run(tmp_path, act) == [("parts", 1, 1)]


def test_a_request_is_checked_against_the_model_as_it_is_when_its_body_has_come(tmp_path: Path) -> None:
    services = services_of(tmp_path, [entry("parts@1")], [loaded("parts@1", CONFIG)])
    narrow = msgspec.structs.replace(CONFIG, inputs=(tensor("A", "UINT8", 2),))
    request = TensorRequest("parts", None, [InputTensor("A", "UINT8", [3], bytes(3))], None)

    async def late() -> None:
        scope = plain_scope()
        scope.deadline_ns = deadline.after(20)
        model = await services.tensor_inference.find(scope, "parts", None)
        [channel] = services.engine.client.channels  # type: ignore[attr-defined]
        channel.models = {"parts@1": loaded("parts@1", narrow)}
        async with aclosing(services.tensor_inference.stream(scope, model, request)) as found:
            await anext(found)

    with pytest.raises(InvalidInput):
        asyncio.run(late())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("JSON cannot say it"), "INVALID_INPUT"),
        (LeaseRevoked("the lease is gone"), "LEASE_REVOKED"),
        (ValueError("a bug"), "INTERNAL_ERROR"),
    ],
)
def test_what_goes_wrong_with_a_result_is_booked_as_what_it_was(
    tmp_path: Path, error: Exception, code: str
) -> None:
    async def act(services: Services, parts: Parts, found: AsyncGenerator[Any, None]) -> None:
        async with aclosing(found):
            await anext(found)
            raise error

    [(*asked, booked)] = run(tmp_path, act, type(error))
    assert asked == ["parts", 1, 1] and booked == code


def test_who_leaves_early_is_booked_as_gone(tmp_path: Path) -> None:
    async def act(services: Services, parts: Parts, found: AsyncGenerator[Any, None]) -> None:
        async def texts() -> AsyncGenerator[bytes, None]:
            async with aclosing(found):
                async for _ in found:
                    yield b"data: {}\n\n"

        req: Any = SimpleNamespace(path="/v2/models/parts/generate_stream", method="POST", uri_template="")
        req.context, req.scope = SimpleNamespace(penstock=current_scope.get()), {}
        events = EventStream(services, req, texts(), "kserve", lambda error: (error.status, b""), idle_s=60)
        await events.begin()
        assert await anext(events) == b"data: {}\n\n"
        await events.close()

    assert run(tmp_path, act) == [("parts", 1, 1, "CANCELLED")]


def test_generate_books_that_there_was_more_than_one_response(tmp_path: Path) -> None:
    async def act(services: Services, parts: Parts, found: AsyncGenerator[Any, None]) -> None:
        async def texts() -> AsyncGenerator[bytes, None]:
            async with aclosing(found):
                async for _ in found:
                    yield b"{}"

        await _only(texts(), "parts")

    assert run(tmp_path, act, InvalidInput) == [("parts", 1, 1, "INVALID_INPUT")]
