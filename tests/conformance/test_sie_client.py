"""The unmodified client of SIE, both of its lines, against tiny models of all families gives the numbers of the routes.

What a client gives is compared with the body of the same request over HTTP. `tests/process/test_cluster_sdk_hosts.py`
asks several gateways and boxes.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conformance.conftest import Families
from tests.conformance.encoders import BGE, INSTRUCTED, MEAN, PYLATE, SPLADE
from tests.conformance.extractors import GLICLASS, GLINER, GLINER2
from tests.conformance.sights import DETR, DONUT, PAGES
from tests.conformance.towers import CLIP, PALI
from tests.conformance.wire import MSGPACK
from tests.harness.cluster import is_gateway
from tests.harness.server import Server
from tests.harness.sie_clients import Client, each_client
from tests.tiny.pictures import encoded, picture

PROGRAM = """
def plain(value):
    match value:
        case np.ndarray():
            return {"dtype": value.dtype.name, "values": value.tolist()}
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list():
            return [plain(each) for each in value]
    return value

def restored(value):
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value

async def main():
    calls = json.loads(sys.stdin.read(), object_hook=restored)
    client = KIND(sys.argv[2])
    answers = {
        name: plain(await tried(lambda: getattr(client, method)(**arguments)))
        for name, (method, arguments) in calls.items()
    }
    answers["frame"] = await frame_of(client)
    print(json.dumps(answers))
    await got(client.close())

asyncio.run(main())
"""
TEXTS = ["The river turns the wheel.", "Paris", "Marie Curie visited Paris"]
LABELS = ["person", "city", "river"]
IMAGE = encoded(picture(1))
SCHEMA = {"type": "object", "properties": {"person": {"type": "string"}, "city": {"type": "string"}}}


class Call(NamedTuple):
    """A call of the client: `of` names the method and the route, `fields` are arguments and fields of the body."""

    of: str
    model: str
    items: list[dict[str, Any]]
    fields: dict[str, Any]

    @property
    def sent(self) -> tuple[str, dict[str, Any]]:
        """The method and its arguments, whose pictures are in base64."""
        return self.of, {
            "model": self.model,
            "items": [_in_base64(item) for item in self.items],
            **self.fields,
        }

    @property
    def body(self) -> dict[str, Any]:
        """The same for the route."""
        if self.of == "score":
            return {"items": self.items, **self.fields}
        fields = dict(self.fields)
        if (is_query := fields.pop("is_query", None)) is not None:
            fields["options"] = {**fields.get("options", {}), "is_query": is_query}
        return {"items": self.items, "params": fields}


def _in_base64(item: dict[str, Any]) -> dict[str, Any]:
    if "images" not in item:
        return item
    images = [{"data": {"base64": base64.b64encode(image["data"]).decode()}} for image in item["images"]]
    return {**item, "images": images}


def texts(*given: str) -> list[dict[str, Any]]:
    """Items of texts, of which the first has an id."""
    return [{"text": text} | ({"id": "first"} if at == 0 else {}) for at, text in enumerate(given or TEXTS)]


def image(**more: Any) -> list[dict[str, Any]]:
    """One item with a picture."""
    return [{"images": [{"data": IMAGE, "format": "png"}], **more}]


OUTPUTS = ["dense", "sparse", "multivector"]
CALLS = {
    "dense": Call("encode", MEAN, texts(), {}),
    **{
        dtype: Call("encode", MEAN, texts(), {"output_dtype": dtype})
        for dtype in ("float32", "float16", "int8", "uint8", "binary", "ubinary")
    },
    "three outputs": Call("encode", BGE, texts(), {"output_types": OUTPUTS}),
    "three outputs in halves": Call(
        "encode", BGE, texts(), {"output_types": OUTPUTS, "output_dtype": "float16"}
    ),
    "sparse query": Call("encode", SPLADE, texts(), {"output_types": ["sparse"], "is_query": True}),
    "token vectors of a query": Call(
        "encode", PYLATE, texts(), {"output_types": ["multivector"], "is_query": True}
    ),
    "token vectors of documents": Call("encode", PYLATE, texts(), {"output_types": ["multivector"]}),
    "instruction": Call("encode", INSTRUCTED, texts(), {"instruction": "Find rivers", "is_query": True}),
    "option": Call("encode", MEAN, texts(), {"options": {"normalize": False}}),
    "picture": Call("encode", CLIP, image(id="seen"), {}),
    "token vectors of a picture": Call("encode", PALI, image(), {"output_types": ["multivector"]}),
    "cross encoder": Call(
        "score", "cross-encoder/sigmoid", texts(), {"query": {"text": "rivers", "id": "q"}}
    ),
    "late interaction": Call("score", "lightonai/colbert", texts(), {"query": {"text": "rivers"}}),
    "instructed scores": Call(
        "score", "Qwen/Qwen3-Reranker", texts(), {"query": {"text": "rivers"}, "instruction": "Find rivers"}
    ),
    "tokens": Call("extract", "tiny/ner", texts(), {"options": {"aggregation_strategy": "simple"}}),
    "labels": Call("extract", GLINER, texts(), {"labels": LABELS, "options": {"threshold": 0.3}}),
    "relations": Call(
        "extract",
        "tiny/relex",
        texts("Marie Curie built", "Alan Turing in Paris"),
        {
            "labels": ["person", "city", "organisation"],
            "options": {"threshold": 0.65, "relation_threshold": 0.4, "relations": ["visited", "works for"]},
        },
    ),
    "labels of a schema": Call("extract", GLINER, texts(), {"labels": ["river"], "output_schema": SCHEMA}),
    "labels of another family": Call("extract", GLINER2, texts(), {"labels": LABELS}),
    "classes": Call("extract", GLICLASS, texts(), {"labels": LABELS}),
    "objects": Call("extract", DETR, image(), {"options": {"score_threshold": 0.0}}),
    "document": Call("extract", DONUT, image(), {"instruction": "Who?"}),
    "question": Call(
        "extract",
        PAGES,
        image(metadata={"words": ["Total", "12"], "boxes": [[0, 0, 9, 9], [10, 0, 19, 9]]}),
        {"instruction": "What is the total?"},
    ),
}
REFUSED = {
    "no items": Call("encode", MEAN, [], {}),
    "no model": Call("encode", "tiny/none", texts(), {}),
    "dtype": Call("encode", MEAN, texts(), {"output_dtype": "float8"}),
    "output": Call("encode", SPLADE, texts(), {"output_types": ["dense"]}),
    "too long": Call("encode", MEAN, texts("x " * 9999), {"options": {"overflow_policy": "error"}}),
    "too long to extract": Call(
        "extract", GLINER, texts("x " * 9999), {"labels": LABELS, "options": {"overflow_policy": "error"}}
    ),
    "no query": Call("score", "cross-encoder/sigmoid", texts(), {"query": {}}),
    "torn picture": Call("encode", CLIP, [{"images": [{"data": IMAGE[:99], "format": "png"}]}], {}),
    "no labels": Call("extract", GLINER, texts(), {}),
}


@pytest.fixture(scope="module")
def server(either_families: Families) -> Server:
    """The server of all families, or a gateway whose only box is that server."""
    return either_families.server


client = each_client


@pytest.fixture(scope="module")
def told(client: Client, server: Server) -> Any:
    """What a client got, by the name of the call."""
    calls = {name: call.sent for name, call in (CALLS | REFUSED).items()}
    calls["model"] = ("get_model", {"model": BGE})
    calls["models"] = ("list_models", {})
    calls["capacity"] = ("get_capacity", {})
    return client.printed(PROGRAM, server.url, sent=calls)


def same(ours: Any, wanted: Any) -> None:
    """The value that a client printed is that of the route, whose arrays keep their type."""
    if isinstance(wanted, np.ndarray):
        assert ours["dtype"] == wanted.dtype.name
        np.testing.assert_allclose(np.array(ours["values"], wanted.dtype), wanted, rtol=1e-3, atol=1e-5)
    elif isinstance(wanted, float):
        assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    else:
        assert ours == wanted


def route(server: Server, call: Call) -> Any:
    """The body of the route's answer."""
    answer = MSGPACK.post(server, f"/v1/{call.of}/{call.model}", call.body)
    assert answer.status == 200, answer.body
    return MSGPACK.load(answer.body)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.of == "encode"])
def test_vectors_are_those_of_the_route(told: Any, server: Server, name: str) -> None:
    items = route(server, CALLS[name])["items"]
    assert len(told[name]) == len(items)
    for ours, wanted in zip(told[name], items, strict=True):
        assert ours.get("id") == wanted.get("id")
        for output in OUTPUTS:
            if (vector := wanted.get(output)) is None:
                assert output not in ours
            elif output == "sparse":
                same(ours[output]["indices"], vector["indices"])
                same(ours[output]["values"], vector["values"])
            else:
                same(ours[output], vector["values"])


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.of == "score"])
def test_scores_are_those_of_the_route(told: Any, server: Server, name: str) -> None:
    wanted = route(server, CALLS[name])
    assert (told[name]["model"], told[name].get("query_id")) == (wanted["model"], wanted.get("query_id"))
    assert len(told[name]["scores"]) == len(TEXTS)
    for ours, score in zip(told[name]["scores"], wanted["scores"], strict=True):
        for field in ("item_id", "rank", "score"):
            same(ours[field], score[field])


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.of == "extract"])
def test_extracts_are_those_of_the_route(told: Any, server: Server, name: str) -> None:
    items = route(server, CALLS[name])["items"]
    for ours, wanted in zip(told[name], items, strict=True):
        assert ours["id"] == wanted["id"] and ours.get("data", {}) == (wanted.get("data") or {})
        for kind in ("entities", "relations", "classifications", "objects"):
            assert len(ours[kind]) == len(wanted[kind])
            for one, other in zip(ours[kind], wanted[kind], strict=True):
                for field, value in other.items():
                    same(one[field], value)
    assert any(
        any(item.get(kind) for kind in ("entities", "relations", "classifications", "objects", "data"))
        for item in items
    ), "the route found something"


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_route_refuses_is_an_error_with_its_code_and_message(
    told: Any, server: Server, name: str
) -> None:
    call, error = REFUSED[name], told[name]
    detail = MSGPACK.post(server, f"/v1/{call.of}/{call.model}", call.body).json()["detail"]
    assert error["error"] in ("RequestError", "InputTooLongError"), error
    assert error["code"] == detail["code"] and detail["message"] in error["text"]


def test_models_capacity_and_state_are_those_of_the_server(told: Any, server: Server) -> None:
    assert {model["name"] for model in told["models"]} == {
        model["name"] for model in server.get("/v1/models").json()["models"]
    }
    assert (told["model"]["name"], told["model"]["loaded"]) == (BGE, True)
    assert set(told["model"]["outputs"]) == set(OUTPUTS)
    if is_gateway(server):
        assert told["capacity"]["worker_count"] == 1
        assert [worker["name"] for worker in told["frame"]["workers"]] == ["beside"]
    else:
        # Only a gateway tells capacity: the client takes a server for a worker, and watches it as one.
        assert told["capacity"]["code"] == "not_gateway"
        assert {model["name"] for model in told["frame"]["models"]} >= {BGE, MEAN}
