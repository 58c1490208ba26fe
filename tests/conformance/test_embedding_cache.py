"""The cache of embeddings of a running server: what a second request costs, and that its answer is the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.models import DIMS, SALTED, salt_of
from tests.conformance.rounding import reference
from tests.conformance.wire import MSGPACK
from tests.fakes.adapter import vector_of
from tests.harness.cluster import ways_to
from tests.harness.lifecycle import state, unload
from tests.harness.server import Answer, Server, wait_until

HITS, MISSES = "penstock_embedding_cache_hits_total", "penstock_embedding_cache_misses_total"
BYTES = "penstock_embedding_cache_bytes"
ALL = ["dense", "sparse", "multivector"]


server = ways_to("sie")


def hits(answer: Answer) -> int:
    assert answer.status == 200, answer.body
    return int(answer.headers["x-penstock-cache-hits"])


def loaded(answer: Answer) -> Any:
    """The body of an answer in either form."""
    return (
        MSGPACK.load(answer.body) if answer.headers["content-type"] == MSGPACK.media_type else answer.json()
    )


def content(answer: Answer) -> tuple[Any, Any]:
    """All of an answer but its times."""
    found = loaded(answer)
    return found["items"], found["usage"]


def test_kept_items_are_answered_as_they_were_and_the_others_are_computed(server: Server) -> None:
    before = {name: server.metric(name, model="org/many") for name in (HITS, MISSES, BYTES)}
    texts = ["cached once", "", "cached for a longer while " * 9]
    # Other files send empty texts without an instruction.
    first, again = (server.encode("org/many", texts, output_types=ALL, instruction="keep") for _ in range(2))
    assert (hits(first), hits(again)) == (0, 3)
    assert content(first) == content(again)
    assert float(first.headers["x-inference-time"]) > 0
    assert (again.headers["x-inference-time"], again.headers["x-queue-time"]) == ("0.00", "0.00")
    more = server.encode("org/many", [texts[2], "not cached", texts[0]], output_types=ALL, instruction="keep")
    assert hits(more) == 2
    items, usage = content(first)
    assert [content(more)[0][at] for at in (0, 2)] == [items[2], items[0]]
    assert [content(more)[1]["tokens"][at] for at in (0, 2)] == [usage["tokens"][2], usage["tokens"][0]]
    wait_until(lambda: server.metric(HITS, model="org/many") - before[HITS] == 5, what="hits")
    wait_until(lambda: server.metric(MISSES, model="org/many") - before[MISSES] == 4, what="misses")
    assert server.metric(BYTES, model="org/many") - before[BYTES] > 4 * 4 * len(items[0]["dense"]["values"])


def test_all_forms_and_dtypes_are_made_of_the_same_embedding(server: Server) -> None:
    text = "one embedding for all forms"
    assert hits(server.encode("org/many", [text])) == 0
    small = server.encode("org/many", [text], output_dtype="int8", options={"dimensions": 4})
    packed = MSGPACK.post(server, "/v1/encode/org/many", {"items": [{"text": text}]})
    openai = server.post("/v1/embeddings", {"model": "org/many", "input": text})
    assert [hits(answer) for answer in (small, packed, openai)] == [1, 1, 1]
    expected = vector_of(text, len(openai.json()["data"][0]["embedding"]))
    assert np.array_equal(np.float32(openai.json()["data"][0]["embedding"]), expected)
    assert openai.json()["usage"]["total_tokens"] == content(small)[1]["tokens"][0]
    assert np.array_equal(content(packed)[0][0]["dense"]["values"], expected)
    cut = expected[:4] / np.linalg.norm(expected[:4])
    assert content(small)[0][0]["dense"]["values"] == reference(cut, "int8")[0]
    assert hits(server.encode("org/many", [text], is_query=True)) == 0


def test_an_item_with_an_error_has_its_own_place_beside_kept_ones(server: Server) -> None:
    assert hits(server.encode("org/many", ["beside an error"])) == 0
    for _ in range(2):
        answer = server.encode("org/many", ["beside an error", "#nan here"], item_errors=True)
        assert hits(answer) == 0
        found = content(answer)[0]
        assert "item 1" in found[1]["error"]["message"] and "dense" in found[0]


def test_a_request_that_comes_again_byte_for_byte_has_the_same_answer_with_times_of_its_own(
    server: Server,
) -> None:
    body = {
        "items": [{"id": "one", "text": "byte for byte"}, {"text": "again"}],
        "params": {"output_types": ALL},
    }
    openai = {"model": "org/many", "input": ["byte for byte", "again"]}
    before = server.metric(HITS, model="org/many")
    for ask in (
        lambda: server.post("/v1/encode/org/many", body),
        lambda: MSGPACK.post(server, "/v1/encode/org/many", body),
        lambda: server.post("/v1/embeddings", openai),
    ):
        first, *more = [ask() for _ in range(4)]
        for answer in more:
            assert hits(answer) == 2
            assert set(answer.headers) >= {"x-request-id", "x-total-time", "x-queue-time", "x-inference-time"}
            assert answer.headers["content-type"] == first.headers["content-type"]
        found = [loaded(answer) for answer in (first, *more)]
        times = [one.pop("timing", None) for one in found]
        assert all(str(one) == str(found[0]) for one in found[1:])
        if times[0] is not None:
            assert list(times[0]) == list(times[-1])
            assert all(one["queue_ms"] == one["inference_ms"] == 0 for one in times[1:])
            assert all(one["total_ms"] > 0 for one in times)
    wait_until(lambda: server.metric(HITS, model="org/many") - before >= 3 * 6, what="hits")


DOCUMENT = "A first line.\nA second line, which is longer.\nThe end."


def chunks(server: Server, texts: list[str], rule: object = True, **options: object) -> Answer:
    body = {
        "items": [{"text": text} for text in texts],
        "params": {"options": {"late_chunking": rule, **options}},
    }
    return server.post(f"/v1/encode/{SALTED}", body)


def test_kept_chunks_are_those_of_the_same_document_and_rule(sie: Server) -> None:
    salt = salt_of(sie.run_dir.parent).read_text()
    texts = [DOCUMENT, "", "One line alone."]
    answers = [chunks(sie, texts) for _ in range(4)]
    assert [hits(answer) for answer in answers] == [0, 3, 3, 3]
    assert all(content(answer) == content(answers[0]) for answer in answers)
    items = [item["chunks"] for item in content(answers[0])[0]]
    assert [item["num_chunks"] for item in items] == [3, 0, 1]
    lines = DOCUMENT.splitlines(keepends=True)
    expected = np.stack([vector_of(salt + line, DIMS) for line in lines])
    assert np.array_equal(np.float32(items[0]["values"]), expected)
    assert [DOCUMENT[a:b] for a, b in items[0]["spans"]] == lines
    turned = chunks(sie, ["Another.", *texts[::-1]])
    assert hits(turned) == 3
    assert [item["chunks"] for item in content(turned)[0]][1:] == items[::-1]
    small = chunks(sie, texts[:1], dimensions=4)
    assert (hits(small), content(small)[0][0]["chunks"]["dims"]) == (1, 4)
    assert content(small)[0][0]["chunks"]["spans"] == items[0]["spans"]
    for spans in ([[0, 13], [14, 45]], [[0, 13], [14, 44]]):
        found = chunks(sie, texts[:1], {"spans": [spans]})
        assert hits(found) == 0, "other chunks of the same text"
        assert content(found)[0][0]["chunks"]["spans"] == spans
    again = chunks(sie, [texts[2], texts[0]], {"spans": [[[0, 8]], [[0, 13], [14, 45]]]})
    assert hits(again) == 1, "spans of one text are no matter of the others"
    assert hits(sie.encode(SALTED, texts[:1])) == 0, "the whole text is another matter"


def test_embeddings_of_files_that_have_changed_are_never_served(sie: Server) -> None:
    salt = salt_of(sie.run_dir.parent)
    text = "files that change"
    seen = []
    for word in ("first ", "other "):
        if salt.read_text() != word:
            salt.write_text(word)
            assert unload(sie, SALTED).status == 200
        answers = [sie.encode(SALTED, [text]) for _ in range(4)]
        answers += [sie.post("/v1/embeddings", {"model": SALTED, "input": text}) for _ in range(3)]
        assert [hits(answer) for answer in answers] == [0, 1, 1, 1, 1, 1, 1]
        vectors = [content(answer)[0][0]["dense"]["values"] for answer in answers[:4]]
        vectors += [answer.json()["data"][0]["embedding"] for answer in answers[4:]]
        expected = vector_of(word + text, DIMS)
        assert all(np.array_equal(np.float32(vector), expected) for vector in vectors)
        seen.append(vectors[0])
    assert seen[0] != seen[1]
    assert unload(sie, SALTED).status == 200
    again = sie.encode(SALTED, [text])
    assert (hits(again), content(again)[0][0]["dense"]["values"]) == (1, seen[1]), "the files are the same"
    assert state(sie, SALTED) == "loaded", "a model is loaded before it answers, also from the cache"
