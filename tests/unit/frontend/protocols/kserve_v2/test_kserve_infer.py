"""Infer and generate over HTTP, from the body to the answer: what is booked, how refusals begin, where work is done."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from falcon import testing
from falcon.asgi import Request, Response

from frontend.access.gate import Restrictions
from frontend.http.bodies import noting
from frontend.protocols.kserve_v2 import routes, schemas
from frontend.protocols.kserve_v2.generate import GENERATE, GenerateResource, request_of
from frontend.protocols.kserve_v2.infer import LENGTH_HEADER, InferResource
from frontend.protocols.kserve_v2.reading import Target
from frontend.scope import plain_scope
from frontend.sending import InferenceRoute
from frontend.services import Services
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import BodyTooLarge, InferenceFailed, InvalidInput, PenstockError, Unsupported
from ipc.memory import copies
from ipc.store.regions import Kind
from tests.fakes.tensors import InferReply, ending, entry, loaded, services_of, tensor

CONFIG = ModelConfig(
    name="m", max_batch_size=4, inputs=(tensor("A", "FP32", 2),), outputs=(tensor("O", "FP32", 2),)
)
TARGET = Target("m", None, "infer")
OPEN = Restrictions.of("")


def services(root: Path, values: np.ndarray[Any, Any] | None = None, **settings: str) -> Services:
    """Services with one model that answers these values."""
    reply = InferReply.of(O=np.zeros((2, 2), np.float32) if values is None else values)
    return services_of(root, [entry("m@3")], [loaded("m@3", CONFIG)], lambda request: reply, **settings)


def request(body: bytes, query: str = "", **headers: str) -> Request:
    """A request that has arrived."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"Content-Length": str(len(body)), **named}
    scope = testing.create_scope(method="POST", query_string=query, headers=sent)
    event = {"type": "http.request", "body": body, "more_body": False}
    nothing: asyncio.Queue[Any] = asyncio.Queue()
    made = Request(scope, noting(scope, nothing.get), first_event=event)  # type: ignore[arg-type]
    made.context.penstock = plain_scope()
    made.context.penstock.deadline_ns = deadline.after(20)
    return made


def body_of(request_id: str = "", **more: Any) -> bytes:
    """Two rows."""
    given = {"name": "A", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return json.dumps({"id": request_id, "inputs": [given], **more}).encode()


def ask(made: Services, req: Request, resp: Response | None = None) -> None:
    """One infer request."""
    asyncio.run(ended(made, InferResource(made, OPEN), req, resp or Response()))


async def ended(made: Services, resource: InferenceRoute, req: Request, resp: Response) -> None:
    """One request, and its end."""
    with ending(made, req.context.penstock):
        await resource.on_post(req, resp, TARGET)


def refusal(made: Services, req: Request, resp: Response | None = None) -> PenstockError:
    """The error of one that fails; all bytes are given back."""
    with pytest.raises(PenstockError) as refused:
        ask(made, req, resp)
    assert made.bodies.held_nbytes == 0
    return refused.value


def booked(made: Services) -> list[tuple[Any, ...]]:
    """What the statistics were told."""
    return made.extensions.counters.booked  # type: ignore[attr-defined, no-any-return]


UNREAD: dict[str, tuple[Callable[[], Request], type[PenstockError]]] = {
    "length is no number": (lambda: request(body_of(), Inference_Header_Content_Length="x"), InvalidInput),
    "length is too large": (lambda: request(body_of(), Inference_Header_Content_Length="9999"), InvalidInput),
    "unknown encoding": (lambda: request(body_of(), Content_Encoding="br"), Unsupported),
    "broken gzip": (lambda: request(gzip.compress(body_of())[:-9], Content_Encoding="gzip"), InvalidInput),
    "JSON too large": (lambda: request(b" " * 2000), BodyTooLarge),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_body_that_cannot_be_read_is_booked(case: str, tmp_path: Path) -> None:
    make, kind = UNREAD[case]
    made = services(tmp_path, kserve__max_json_bytes="1000")
    error = refusal(made, make())
    assert isinstance(error, kind)
    assert booked(made) == [("m", 3, 0, error.code)]
    assert error.message.startswith("[request id: <id_unknown>] ") is (kind is InvalidInput)


def test_refusals_of_all_stages_begin_with_the_id_once(tmp_path: Path) -> None:
    made = services(tmp_path)
    wrong = {"name": "A", "shape": [2, 3], "datatype": "FP32", "data": [0] * 6}
    for body in (body_of("seven", parameters={"priority": -1}), body_of("seven", inputs=[wrong])):
        message = refusal(made, request(body)).message
        assert message.startswith("[request id: seven] ") and message.count("request id") == 1
    assert booked(made) == [("m", 3, 0, "INVALID_INPUT"), ("m", 3, 0, "INVALID_INPUT")]
    image = {"name": "A", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]}
    assert refusal(made, request(body_of("seven", inputs=[image]))).message.startswith("[request id: seven] ")


def test_json_beside_binary_goes_behind_it_and_the_large_tensor_is_copied_once(tmp_path: Path) -> None:
    inputs = (tensor("A", "FP32", -1), tensor("B", "INT64", -1))
    config = ModelConfig(name="m", max_batch_size=0, inputs=inputs, outputs=(tensor("O", "FP32", 2),))
    reply = InferReply.of(O=np.zeros(2, np.float32))
    made = services_of(tmp_path, [entry("m@3")], [loaded("m@3", config)], lambda sent: reply)
    large, small = np.arange(1 << 18, dtype=np.float32).tobytes(), [1, 2, 3]
    given = [
        {"name": "B", "datatype": "INT64", "shape": [3], "data": small},
        {"name": "A", "datatype": "FP32", "shape": [1 << 18], "parameters": {"binary_data_size": len(large)}},
    ]
    head = json.dumps({"inputs": given}).encode()
    before = copies.copied()["receive"]
    ask(made, request(head + large, Inference_Header_Content_Length=str(len(head))))
    assert copies.copied()["receive"] - before == len(large) + 8 * len(small)
    client: Any = made.engine.client
    [payload] = client.payloads
    places = {one.name: payload[one.start : one.start + one.nbytes] for one in client.last.inputs}
    assert places == {"A": large, "B": np.array(small, np.int64).tobytes()}
    made.engine.client.inputs.close()


def test_what_json_cannot_say_is_booked_as_the_failure_that_the_client_sees(tmp_path: Path) -> None:
    made = services(tmp_path, np.full((2, 2), np.nan, np.float32))
    error = refusal(made, request(body_of("seven")))
    assert error.message.startswith("[request id: seven] output 'O' holds NaN")
    ask(made, request(body_of(parameters={"binary_data_output": True})))
    assert booked(made) == [("m", 3, 2, "INVALID_INPUT"), ("m", 3, 2)]


def test_the_answer_that_was_lost_leaves_no_headers_of_it(tmp_path: Path) -> None:
    made, resp = services(tmp_path, kserve__compress_min_bytes="1"), Response()

    def lost() -> None:
        raise InferenceFailed("the reply is gone")

    reply = made.engine.client.answer(None)  # type: ignore[attr-defined]
    reply.check = lost
    error = refusal(made, request(body_of(), Accept_Encoding="gzip"), resp)
    assert resp.get_header("Content-Encoding") is None and resp.get_header("Vary") is None
    assert booked(made) == [("m", 3, 2, error.code)]
    del reply.check
    ask(made, request(body_of(), Accept_Encoding="gzip"), resp)
    assert resp.get_header("Content-Encoding") == "gzip" and resp.get_header(LENGTH_HEADER) is None


@pytest.mark.parametrize("body", [b"", b"{", b'{"A": [1, 2], "p": []}', b" " * ((16 << 20) + 1)])
def test_generate_books_what_it_cannot_read(body: bytes, tmp_path: Path) -> None:
    made = services(tmp_path)
    resource = GenerateResource(InferResource(made, OPEN), stream=False)
    with pytest.raises(PenstockError) as refused:
        asyncio.run(ended(made, resource, request(body), Response()))
    assert booked(made) == [("m", 3, 0, refused.value.code)]
    validation = refused.value.code == "INVALID_INPUT"
    assert refused.value.message.startswith("[request id: <id_unknown>] ") is validation


@pytest.mark.parametrize("value", [0.5, np.inf])
def test_generate_books_its_answer_once_it_is_written(value: float, tmp_path: Path) -> None:
    made = services(tmp_path, np.full((1, 2), value, np.float32))
    resource, resp = GenerateResource(InferResource(made, OPEN), stream=False), Response()
    answering = ended(made, resource, request(b'{"A": [1, 2]}'), resp)
    if value == 0.5:
        asyncio.run(answering)
        assert json.loads(resp.data or b"")["O"] == [0.5, 0.5] and booked(made) == [("m", 3, 1)]
    else:
        with pytest.raises(InvalidInput):
            asyncio.run(answering)
        assert booked(made) == [("m", 3, 1, "INVALID_INPUT")]


@pytest.mark.parametrize("value", ["18446744073709551616", "-9223372036854775809", "1" + "0" * 40])
@pytest.mark.parametrize("nested", [False, True])
def test_integers_that_no_worker_can_be_sent_are_refused(value: str, nested: bool) -> None:
    text = f'{{"parameters": {{"big": {value}}}}}' if nested else f'{{"big": {value}}}'
    with pytest.raises(InvalidInput, match="'big'"):
        request_of(TARGET, CONFIG, GENERATE.decode(text.encode()))


@pytest.mark.parametrize("nested", [False, True])
def test_generate_takes_so_many_parameters_and_no_more(nested: bool) -> None:
    def asked(count: int) -> bytes:
        given = {f"p{at}": at for at in range(count)}
        return json.dumps({"parameters": given} if nested else given).encode()

    made = request_of(TARGET, CONFIG, GENERATE.decode(asked(1024)))
    assert len(made.request.parameters) == 1024
    with pytest.raises(InvalidInput, match=r"parameters: \d+ given, the limit is 1024"):
        request_of(TARGET, CONFIG, GENERATE.decode(asked(200_000)))


@pytest.mark.parametrize(("nbytes", "on_loop"), [(64 << 10, True), ((64 << 10) + 1, False)])
def test_long_bodies_are_parsed_off_the_loop(nbytes: int, on_loop: bool, tmp_path: Path) -> None:
    made = services(tmp_path)

    def where(body: bytes) -> bool:
        assert made.bodies.held_nbytes >= len(body) == nbytes, "counted while it is parsed"
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(schemas.parsed(made, request(b" " * nbytes), where, 1 << 20)) is on_loop


class Regions:
    """Remembers what was unregistered."""

    def __init__(self) -> None:
        self.gone: list[str | None] = []

    async def unregister(self, kind: Kind | None, name: str | None) -> int:
        """Note the name, None for all regions."""
        self.gone.append(name)
        return 1


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_an_empty_name_does_not_stand_for_all_regions(kind: Kind, tmp_path: Path) -> None:
    made, regions = services(tmp_path), Regions()
    made.extensions.regions = regions  # type: ignore[assignment]
    resource = routes.regions_of(kind)(routes.Context(made, InferResource(made, made.restrictions)))
    for tail in ("region//unregister", "region//unregister/", "region//register"):
        with pytest.raises(InvalidInput, match="name"):
            asyncio.run(resource.on_post(request(b""), Response(), tail))
    assert regions.gone == []
    for tail in ("region/a/unregister", "unregister"):
        asyncio.run(resource.on_post(request(b""), Response(), tail))
    assert regions.gone == ["a", None]


class Traces:
    """Remembers the models that were asked about."""

    def __init__(self) -> None:
        self.models: list[str] = []

    def get(self, model: str = "") -> dict[str, str]:
        """Nothing."""
        self.models.append(model)
        return {}

    async def update(self, changes: Any, until_ns: int, model: str = "") -> dict[str, str]:
        """Nothing."""
        return self.get(model)


def test_trace_settings_are_kept_under_the_full_name(tmp_path: Path) -> None:
    entries = [entry("org/dense"), entry("m@3")]
    made, traces = services_of(tmp_path, entries, []), Traces()
    made.extensions.trace_settings = traces  # type: ignore[assignment]
    resource = routes.TRACE(routes.Context(made, InferResource(made, made.restrictions)))
    for target in (Target("dense", None, ""), Target("org/dense", None, ""), TARGET, None):
        asyncio.run(resource.on_get(request(b""), Response(), target))
        asyncio.run(resource.on_post(request(b"{}"), Response(), target))
    assert traces.models == ["org/dense"] * 4 + ["m"] * 2 + [""] * 2
