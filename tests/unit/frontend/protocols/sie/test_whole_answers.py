"""Whole answers that are kept: when they count as absent, what decides their keys, and their bodies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgpack
import orjson
import pytest
from falcon.asgi import Request
from falcon.testing import create_asgi_req

from frontend.access.gate import Grant
from frontend.engine.whole_answers import LONGEST_BODY, WholeAnswer, WholeAnswers
from frontend.protocols.sie import repeating
from frontend.protocols.sie.flow import timing_of
from frontend.scope import RequestScope, plain_scope
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry
from ipc.settings import Cache, Settings
from tests.unit.frontend.engine.test_bounded_cache import meter

ANSWER = WholeAnswer("name", "org/model", 2, [], b"before", b"after")


class Setup:
    """Answers of one model with an identity that a test changes."""

    def __init__(self) -> None:
        self.catalog, self.identity, self.counted = Catalog([]), "first", meter()
        recorder: Any = SimpleNamespace(cache=lambda model: self.counted)
        self.answers = WholeAnswers(self.catalog, lambda model: self.identity, recorder, 1 << 16)
        self.answers.keep(b"key", ANSWER)


def test_a_kept_answer_counts_all_its_items() -> None:
    setup = Setup()
    assert setup.answers.find(b"key") is ANSWER and setup.answers.find(b"other") is None
    assert setup.counted.hits.value == 2
    assert setup.counted.nbytes.value > len(b"beforeafter")


def test_another_identity_or_reading_of_the_catalog_hides_an_answer() -> None:
    setup = Setup()
    for identity in ("second", ""):
        setup.identity = identity
        assert setup.answers.find(b"key") is None
    setup.identity = "first"
    assert setup.answers.find(b"key") is ANSWER
    setup.catalog.replace(Catalog([ModelEntry("other", DirectorySource("m"))]))
    assert setup.answers.find(b"key") is None
    assert setup.counted.hits.value == 2


def test_without_an_identity_nothing_is_kept() -> None:
    setup = Setup()
    setup.identity = ""
    setup.answers.keep(b"new", ANSWER)
    setup.identity = "first"
    assert setup.answers.find(b"new") is None


def request(**headers: str) -> Request:
    return create_asgi_req(headers={"Content-Type": "application/json", **headers}, method="POST")


def key(
    body: bytes = b"body",
    name: str = "m",
    operation: str = "encode",
    caller: str = "",
    shared: bool = False,
    **headers: str,
) -> bytes:
    scope: RequestScope = plain_scope()
    scope.operation, scope.grant = operation, Grant(caller=caller)
    settings = Settings(cache=Cache(shared=shared))
    services: Any = SimpleNamespace(engine=SimpleNamespace(answers=True), settings=settings)
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    return repeating.key_of(request(**asked), scope, services, name, body)


def test_all_that_a_request_says_decides_the_key() -> None:
    keys = [
        key(),
        key(b"other"),
        key(name="other"),
        key(name="", body=b"mbody"),
        key(operation="embeddings"),
        key(caller="one"),
        key(caller="two"),
        key(Accept="application/json"),
        key(Content_Type="application/msgpack"),
        key(X_Penstock_warnings="1"),
        key(X_Penstock_item_errors="1"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(caller="one", shared=True) == key(caller="two", shared=True)


def test_a_long_body_has_no_key() -> None:
    assert key(b"x" * LONGEST_BODY) and not key(b"x" * (LONGEST_BODY + 1))


@pytest.mark.parametrize(
    ("json", "pack", "load"), [(True, orjson.dumps, orjson.loads), (False, msgpack.packb, msgpack.unpackb)]
)
def test_a_timed_answer_has_the_times_of_each_request(json: bool, pack: Any, load: Any) -> None:
    timing = {"total_ms": 9.5, "queue_ms": 2.5}
    body, part = pack({"items": [1], "timing": timing, "usage": 2}), pack(timing)
    at = body.index(part)
    parts = [body[:3], memoryview(body[3:at]), part, body[at + len(part) :]]
    block = timing_of({}, 0.0)
    answer = repeating.whole_of("name", "m", 1, [], parts, block, json=json)
    for total in (0.25, 100.0):
        made = load(repeating.body_of(answer, total))
        assert made == {"items": [1], "timing": block | {"total_ms": total}, "usage": 2}
        assert list(made["timing"]) == list(block)
    plain = repeating.whole_of("name", "m", 3, [], [b"a", b"b", b"c"], None, json=json)
    assert repeating.body_of(plain, 1.0) == b"abc"
