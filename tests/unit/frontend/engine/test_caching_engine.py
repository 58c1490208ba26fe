"""The cache of embeddings: which items are computed, what decides a key, and when nothing may be taken from it."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.access.gate import Grant
from frontend.engine import caching
from frontend.engine.answer import Answer
from frontend.engine.caching import ENTRY_NBYTES, CachingEngine, keys_of
from frontend.engine.planning import plan
from frontend.scope import RequestScope, plain_scope
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import InferenceFailed, InputTooLong, InvalidInput, LeaseRevoked, QueueFull
from ipc.settings import Cache, Settings
from ipc.wire.messages import Chunking, EncodeCall, InputItem, ItemError, ModelStatus, Result, Timing, Work
from tests.fakes.adapter import vector_of
from tests.fakes.engine import InProcessDirectory, InProcessEngine
from tests.fakes.lease import FakeLease
from tests.unit.frontend.engine.test_bounded_cache import meter

MODEL, DIMS = "org/model", 8


class Computing(InProcessEngine):
    """Vectors by text, token vectors by its length, and the errors that a text asks for; notes what it computes."""

    def __init__(self) -> None:
        status = ModelStatus(MODEL, "loaded", identity="first")
        super().__init__(InProcessDirectory(Catalog([]), [status]), {})
        self.directory.loaded.add(MODEL)
        self.asked: list[list[str]] = []
        self.revokes = False
        self.identity = "first"

    def load(self, identity: str) -> None:
        """The worker has other files from now on, and has told."""
        self.identity = identity
        self.directory._statuses[MODEL] = ModelStatus(MODEL, "loaded", identity=identity)

    async def run(self, scope: RequestScope, work: Work, payload: Any = None) -> Answer:
        assert isinstance(work.call, EncodeCall)
        texts = [item.text or "" for item in work.call.items]
        self.asked.append(texts)
        for at, text in enumerate(texts):
            if text == "#refused":
                raise InvalidInput(f"items[{at}]: refused")
            if text == "#long":
                raise InputTooLong(f"items[{at}].text: too long")
            if text == "#failed":
                raise InferenceFailed(f"items[{at}]: failed")
            if text == "#busy":
                raise QueueFull("later")
        errors = [
            ItemError(at, "INFERENCE_ERROR", f"items[{at}]") for at, t in enumerate(texts) if t == "#bad"
        ]
        arrays = {"dense": np.stack([vector_of(f"{self.identity} {text}", DIMS) for text in texts])}
        counts = [len(text) for text in texts]
        arrays["multivector"] = np.concatenate([np.full((len(text), 2), len(text), "f4") for text in texts])
        answer = self.answer(work, arrays)
        answer._result = msgspec.structs.replace(
            answer._result,
            tokens=counts,
            truncated=[at for at, text in enumerate(texts) if text.endswith("...")],
            errors=errors,
            rows={"multivector": counts},
            identity=self.identity,
        )
        if self.revokes:
            self.leases[-1].revoke()
        return answer


class Setup:
    """A cache in front of that engine, and requests of one caller or another."""

    def __init__(self, **cache: Any) -> None:
        self.inner = Computing()
        self.counted = meter()
        settings = Settings(cache=Cache(**{"embeddings_bytes": 1 << 20, **cache}))
        recorder: Any = SimpleNamespace(
            cache=lambda model: self.counted, in_flight=lambda model, lane: nullcontext()
        )
        self.settings = settings
        self.engine = CachingEngine(self.inner, self.inner.directory, settings, recorder)

    def ask(self, *texts: str, caller: str = "", **call: Any) -> tuple[RequestScope, dict[str, Any]]:
        """The scope and the parts of an answer, whose context has been left."""
        scope = plain_scope()
        scope.deadline_ns, scope.grant = deadline.after(60), Grant(caller=caller)
        items = [InputItem(text) for text in texts]
        work = plan(scope, self.settings, MODEL, EncodeCall(items, ["dense", "multivector"], **call), 100)

        async def run() -> dict[str, Any]:
            with await self.engine.run(scope, work) as answer:
                found = {name: values.copy() for name, values in answer.tensors().items()}
                return found | {
                    "rows": answer.rows("multivector"),
                    "tokens": answer.tokens,
                    "truncated": answer.truncated,
                    "errors": answer.errors,
                    "batches": answer.timing.batches,
                    "uuid": answer.uuid,
                }

        found = asyncio.run(run())
        assert all(lease.releases == 1 for lease in self.inner.leases)
        return scope, found


def assert_right(found: dict[str, Any], texts: list[str], identity: str = "first") -> None:
    """All parts of an answer belong to these texts, in this order."""
    assert np.array_equal(found["dense"], np.stack([vector_of(f"{identity} {t}", DIMS) for t in texts]))
    assert found["rows"] == found["tokens"] == [len(text) for text in texts]
    assert found["multivector"].tolist() == [[len(t), len(t)] for t in texts for _ in t]
    assert found["truncated"] == [at for at, text in enumerate(texts) if text.endswith("...")]


def test_nine_of_ten_texts_are_kept_and_one_is_computed() -> None:
    setup = Setup()
    texts = [f"text {number}" + "..." * (number % 2) for number in range(10)]
    scope, found = setup.ask(*texts[:4], *texts[5:])
    assert scope.cache_hits == 0
    assert_right(found, texts[:4] + texts[5:])
    scope, found = setup.ask(*texts)
    assert (scope.cache_hits, setup.inner.asked[-1]) == (9, [texts[4]])
    assert (found["batches"], found["uuid"]) == (1, "cpu"), (
        "the times are those of the text that was computed"
    )
    assert_right(found, texts)
    scope, found = setup.ask(*reversed(texts))
    assert (scope.cache_hits, len(setup.inner.asked)) == (10, 2)
    assert (found["batches"], found["uuid"]) == (0, "")
    assert_right(found, texts[::-1])
    assert (setup.counted.hits.value, setup.counted.misses.value) == (19, 10)
    assert setup.counted.nbytes.value == setup.engine.kept.nbytes > 10 * (ENTRY_NBYTES + 4 * DIMS)


def test_an_answer_cannot_change_what_is_kept() -> None:
    setup = Setup()
    setup.ask("text")
    _, found = setup.ask("text")
    found["dense"][:] = 0
    assert_right(setup.ask("text")[1], ["text"])


def test_keys_keep_their_embeddings_apart_unless_they_may_share() -> None:
    for shared, hits in ((False, 0), (True, 1)):
        setup = Setup(shared=shared)
        setup.ask("text", caller="one")
        scope, found = setup.ask("text", caller="two")
        assert scope.cache_hits == hits
        assert_right(found, ["text"])
        assert setup.ask("text", caller="one")[0].cache_hits == 1


def test_a_model_with_other_files_never_answers_with_old_embeddings() -> None:
    setup = Setup()
    setup.ask("text")
    setup.inner.load("second")
    scope, found = setup.ask("text")
    assert scope.cache_hits == 0
    assert_right(found, ["text"], "second")
    assert setup.ask("text")[0].cache_hits == 1
    setup.inner.load("first")
    assert setup.ask("text")[0].cache_hits == 0, "a row has the identity of the model that computed it last"


def test_without_a_known_identity_nothing_is_taken_and_nothing_kept() -> None:
    setup = Setup()
    setup.ask("text")
    setup.inner.load("")
    assert setup.ask("text")[0].cache_hits == 0
    assert setup.ask("other")[0].cache_hits == setup.ask("other")[0].cache_hits == 0


def test_no_answer_mixes_two_models() -> None:
    setup = Setup()
    setup.ask("old")
    setup.inner.identity = "second"  # The worker has changed, and this frontend has not heard of it.
    scope, found = setup.ask("old", "new")
    assert_right(found, ["old", "new"], "second")
    assert (scope.cache_hits, setup.inner.asked[1:]) == (0, [["new"], ["old", "new"]])


@pytest.mark.parametrize(
    ("text", "kind"), [("#refused", InvalidInput), ("#long", InputTooLong), ("#failed", InferenceFailed)]
)
def test_an_error_names_the_place_in_the_whole_request(text: str, kind: type[Exception]) -> None:
    setup = Setup()
    setup.ask("a", "b")
    with pytest.raises(kind, match=r"items\[2\]"):
        setup.ask("a", "b", text)


def test_an_item_with_an_error_has_its_place_and_is_not_kept() -> None:
    setup = Setup()
    setup.ask("a", "b")
    for _ in range(2):
        _, found = setup.ask("a", "b", "#bad", "c")
        assert [(error.index, error.message) for error in found["errors"]] == [(2, "items[2]")]
    assert setup.ask("a", "c")[0].cache_hits == 2
    assert setup.ask("#bad")[1]["errors"], "an error is found anew"


def test_a_full_queue_is_no_reason_to_try_again() -> None:
    setup = Setup()
    setup.ask("a")
    with pytest.raises(QueueFull):
        setup.ask("a", "#busy")
    assert setup.inner.asked == [["a"], ["#busy"]]


def test_memory_that_was_taken_back_is_not_kept() -> None:
    setup = Setup()
    setup.inner.revokes = True
    with pytest.raises(LeaseRevoked):
        setup.ask("text")
    setup.inner.revokes = False
    scope, found = setup.ask("text")
    assert scope.cache_hits == 0
    assert_right(found, ["text"])


def test_a_request_with_a_lora_adapter_is_not_looked_up() -> None:
    setup = Setup()
    for _ in range(2):
        assert setup.ask("text", lora="adapter")[0].cache_hits is None
    assert len(setup.inner.asked) == 2 and len(setup.engine.kept) == 0


def test_values_that_no_message_can_hold_go_to_the_engine() -> None:
    setup = Setup()
    assert setup.ask("text", options={"number": 1 << 80})[0].cache_hits is None


def test_the_part_that_is_computed_has_its_share_of_the_cost() -> None:
    setup = Setup()
    setup.ask("a" * 400)
    works: list[Work] = []
    run = setup.inner.run

    async def noting(scope: RequestScope, work: Work, payload: Any = None) -> Answer:
        works.append(work)
        return await run(scope, work, payload)

    setup.inner.run = noting  # type: ignore[method-assign]
    setup.ask("a" * 400, "b")
    assert [work.cost for work in works] == [1]


CALL = EncodeCall([InputItem("text")], ["dense", "sparse"], None, False, {"prompts": 1}, "truncate")


def key(owner: str = "", model: str = MODEL, item: InputItem | None = None, **changes: Any) -> bytes:
    items = [item or InputItem("text")]
    found = keys_of(owner, model, msgspec.structs.replace(CALL, items=items, **changes))
    assert found is not None
    return found[0]


def test_all_that_decides_a_result_decides_the_key() -> None:
    keys = [
        key(),
        key(owner="one"),
        key(model="org/model:profile"),
        key(outputs=["dense"]),
        key(instruction="text"),
        key(instruction=""),
        key(is_query=True),
        key(options={}),
        key(options={"prompts": 2}),
        key(options={"prompts": "1"}),
        key(overflow="error"),
        key(chunking=Chunking("sentences")),
        key(chunking=Chunking("sentences", 2)),
        key(chunking=Chunking("tokens", 32)),
        key(chunking=Chunking("tokens", 32, 8)),
        key(item=InputItem("text", spans=[(0, 2)])),
        key(item=InputItem("text", spans=[(0, 2), (2, 4)])),
        key(item=InputItem("text", first="")),
        key(item=InputItem("text ")),
        key(item=InputItem("")),
        key(item=InputItem(None, [1, 2])),
        key(item=InputItem(None, [12])),
        key(item=InputItem("text", None, [b"image"])),
        key(item=InputItem("text", None, [b"im", b"age"])),
        key(item=InputItem("text", None, [], {"a": 1})),
        key(item=InputItem("text", None, [], {"a": 1, "b": 2})),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(each) == 32 for each in keys)


def test_what_only_shapes_the_answer_does_not_decide_the_key() -> None:
    assert key() == key(outputs=["sparse", "dense"])
    shaping = {"output_dtype": "int8", "dimensions": 4, "profile": "default", "overflow_policy": "default"}
    # The spans lie in the items, and a rule in the call.
    shaping |= {"late_chunking": {"spans": [[[0, 2]], [[0, 4]]]}}
    assert key() == key(options={"prompts": 1, **shaping})
    one, other = InputItem("", None, [], {"a": 1, "b": 2}), InputItem("", None, [], {"b": 2, "a": 1})
    assert key(item=one) == key(item=other)


def test_the_copies_of_an_answer_are_checked_against_its_lease() -> None:
    lease = FakeLease(bytes(16))
    answer = Answer(Result(1, None, [], [1], [], [], Timing()), lease.view, lease=lease)
    lease.revoke()
    with pytest.raises(LeaseRevoked):
        answer.copies()


def test_each_frontend_has_the_whole_bound_for_its_embeddings() -> None:
    bound = 64 << 10
    frontends = [Setup(embeddings_bytes=bound) for _ in range(2)]
    texts = [f"text {number}" for number in range(150)]
    for first in range(0, len(texts), 50):
        for setup in frontends:
            scope, _ = setup.ask(*texts[first : first + 50])
            # Nothing comes from the other frontend, which has just computed the same texts or will.
            assert scope.cache_hits == 0
            assert setup.counted.nbytes.value <= bound
    for setup in frontends:
        assert 0.95 * bound < setup.counted.nbytes.value == setup.engine.kept.nbytes
        assert setup.counted.evictions.value > 50
        assert setup.ask(*texts[-5:])[0].cache_hits == 5 and setup.ask(texts[0])[0].cache_hits == 0


def test_what_is_counted_covers_the_memory_of_kept_embeddings() -> None:
    setup = Setup(embeddings_bytes=8 << 20)
    setup.ask("warm")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        counted = setup.engine.kept.nbytes
        for first in range(0, 100, 50):
            setup.ask(*(f"text {number}" for number in range(first, first + 50)))
        setup.inner.leases.clear()
        setup.inner.works.clear()
        setup.inner.asked.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= setup.engine.kept.nbytes - counted


@pytest.mark.parametrize(("text", "aside"), [("a", False), ("a" * (513 << 10), True)])
def test_keys_of_large_inputs_are_made_in_a_thread(
    text: str, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input of little cost may be large, as a text that is cut or an image is: the event loop hashes none."""
    threads: list[threading.Thread] = []

    def noted(owner: str, model: str, call: EncodeCall) -> list[bytes] | None:
        threads.append(threading.current_thread())
        return keys_of(owner, model, call)

    monkeypatch.setattr(caching, "keys_of", noted)
    Setup().ask(text)
    assert [thread is not threading.main_thread() for thread in threads] == [aside]
