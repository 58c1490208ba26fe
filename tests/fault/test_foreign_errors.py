"""Code of models raises whatever can be raised, wherever such code runs: that request ends with an error, nothing else.

One server lives through all tests. Its worker must be the same process after each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fakes.raising import EXCEPTIONS, SEQUENCES, STREAM, WORDS, write_python
from tests.fault import serving
from tests.harness.decoupled import Events
from tests.harness.lifecycle import ON_DEMAND, state, unload
from tests.harness.server import Answer, Server, wait_until

MODEL = "org/raising"
PYTHON = ("import", "make", "proof")
"""Places in the load of a Python model. The proof is of zeros, which a model need not take."""
IN_REQUESTS = ("check", "group", "prepare", "collate", "run")


def write_entry(catalog: Path, name: str, **options: Any) -> None:
    """A model of `RaisingAdapter`."""
    (catalog / "weights").mkdir(exist_ok=True)
    entry = {
        "id": name,
        "source": {"kind": "adapter", "path": str(catalog / "weights")},
        "adapter": "tests.fakes.raising:RaisingAdapter",
        "outputs": {"dense": {"dims": 16}},
        "loadtime": {"dims": 16, **options},
    }
    (catalog / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(entry))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("foreign")
    catalog, repository = place / "catalog", place / "repository"
    catalog.mkdir()
    write_entry(catalog, MODEL)
    for name in EXCEPTIONS:
        for at in ("load", "proof"):
            write_entry(catalog, f"org/{at}-{name}", fail=f"#throw {name} {at}")
    for at in PYTHON:
        for name in ("SystemExit", "Panic"):
            write_python(repository, f"python-{at}-{name}", f"#throw {name} {at}")
    write_python(repository, "one")
    write_python(repository, "many", facts=STREAM)
    write_python(repository, "sequence", facts=SEQUENCES)
    write_python(repository, "end", "#throw SystemExit end")
    write_python(repository, "litter", "#litter")
    settings = ON_DEMAND | {"repository.dirs": repository, "repository.allow_python": "true"}
    with serving(place, models=(), settings=settings, catalog=catalog) as running:
        yield running
        assert_right(running.encode(MODEL, ["at the end"]), ["at the end"])
        running.stop()
        assert running.starts(0) == 1 and "worker 0 has ended in order" in running.log


@pytest.fixture(autouse=True)
def the_worker_lives_on(server: Server) -> Iterator[None]:
    """After each test the worker is the same process."""
    pid = server.worker_pid()
    yield
    assert server.worker_pid() == pid


def assert_right(answer: Answer, texts: list[str], bad: int = -1, code: str = "") -> None:
    """The item `bad` has an error, all others the vector of their text."""
    assert answer.status == 200, answer.body[:500]
    for at, (item, text) in enumerate(zip(answer.json()["items"], texts, strict=True)):
        if at == bad:
            assert item["error"]["code"] == code, item
        else:
            values = item["dense"]["values"]
            assert np.allclose(values, vector_of(text, len(values)), atol=1e-6)


def code_of(answer: Answer) -> tuple[int, str]:
    """Status and code of an error of the SIE protocol."""
    return answer.status, answer.json()["detail"]["code"]


def infer(server: Server, model: str, number: int, do: str = "", **more: Any) -> Answer:
    """One request over KServe."""
    inputs = [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [number]}]
    return server.post(f"/v2/models/{model}/infer", {"inputs": inputs, "parameters": {"do": do, **more}})


@pytest.mark.sample
@pytest.mark.parametrize("place", IN_REQUESTS)
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_in_a_family_ends_its_request(server: Server, name: str, place: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        texts = [f"neighbour {at}" for at in range(2)]
        beside = [pool.submit(server.encode, MODEL, [text]) for text in texts]
        answer = server.encode(MODEL, [f"#throw {name} {place}"])
        assert code_of(answer) == (500, "INFERENCE_ERROR"), answer.body
        for found, text in zip(beside, texts, strict=True):
            assert_right(found.result(), [text])


@pytest.mark.parametrize("place", ["collate", "run"])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_on_one_item_leaves_the_items_of_its_batch(
    server: Server, name: str, place: str
) -> None:
    texts = ["before", f"#throw {name} {place}", "behind"]
    assert_right(server.encode(MODEL, texts, item_errors=True), texts, 1, "INFERENCE_ERROR")


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_in_a_figure_costs_the_figure_only(server: Server, name: str) -> None:
    text = f"#throw {name} padding"
    assert_right(server.encode(MODEL, [text]), [text])


@pytest.mark.parametrize("place", [*IN_REQUESTS])
@pytest.mark.parametrize("name", WORDS)
def test_words_that_cannot_be_sent_end_their_request(server: Server, name: str, place: str) -> None:
    answer = server.encode(MODEL, [f"#throw {name} {place}"])
    assert code_of(answer) == (400, "INVALID_INPUT")


@pytest.mark.sample
@pytest.mark.parametrize("place", ["load", "proof"])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_in_a_load_fails_the_load_in_words(server: Server, name: str, place: str) -> None:
    answer = server.encode(f"org/{place}-{name}", ["x"])
    assert code_of(answer) == (502, "MODEL_LOAD_FAILED"), answer.body
    raised = type(EXCEPTIONS[name]()).__name__
    words = {"StopIteration": raised, "Circle": "first", "RecursionError": "recursion"}
    told = {"Draining": "the model says so", "WorkerLost": "the model says so"}
    # NOTE: to ask such an error whether it is true raises another one.
    told |= {"Untrue": "code of the model raised"}
    assert (words | told).get(name, f"code of the model raised {raised}") in answer.json()["detail"][
        "message"
    ]


@pytest.mark.parametrize("name", ["SystemExit", "Panic"])
def test_an_exception_of_a_python_model_is_its_own_affair(server: Server, name: str) -> None:
    for place in ("import", "make"):
        failed = infer(server, f"python-{place}-{name}", 1)
        assert failed.status >= 400 and "code of the model raised" in failed.json()["error"]
    assert infer(server, f"python-proof-{name}", 1).status == 500, "zeros need not suit a model"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_of_a_python_model_ends_its_request(server: Server, name: str) -> None:
    assert infer(server, "one", 1, f"#throw {name} infer").status == 500
    assert infer(server, "one", 1).json()["outputs"][0]["data"] == [2]


@pytest.mark.sample
@pytest.mark.parametrize("place", ["call", "start", "middle", "close"])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_in_a_stream_ends_the_stream(server: Server, name: str, place: str) -> None:
    command = {"X": 2, "do": f"#throw {name} {place}"}
    answer = server.post("/v2/models/many/generate_stream", command)
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    if (place == "call" and name == "StopIteration") or not events:
        assert answer.status >= 500 or not events
        return
    parts = {"call": 0, "start": 0, "middle": 1, "close": 2}[place]
    assert [event.get("Y") for event in events[:parts]] == list(range(parts))
    assert "error" in events[parts] and len(events) == parts + 1


def test_exceptions_when_streams_are_closed_are_lines_of_the_log(server: Server) -> None:
    path, text = "/v2/models/many/generate_stream", "the model failed when its stream was closed"
    begun = [Events(server, 0, path, X=1 << 30, do=f"#throw {name} close") for name in EXCEPTIONS]
    for events in begun:
        assert next(iter(events))["Y"] == 0
        events.close()
    # NOTE: a generator may end so, without a word.
    logged = len(EXCEPTIONS.keys() - {"GeneratorExit"})
    wait_until(lambda: server.log.count(text) == logged, what="the end of all")


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_in_a_sequence_ends_its_requests(server: Server, name: str) -> None:
    step = {"sequence_id": 7, "sequence_start": True}
    assert infer(server, "sequence", 1, f"#throw {name} infer", **step).status == 500
    assert infer(server, "sequence", 1, **step, sequence_end=True).json()["outputs"][0]["data"] == [2]


def test_an_exception_in_the_end_of_a_model_is_nobody_elses_affair(server: Server) -> None:
    assert infer(server, "end", 1).status == 200
    assert unload(server, "end@1").status == 200
    wait_until(lambda: state(server, "end@1") == "available", what="the end of the model")


def test_what_a_model_leaves_in_its_process_harms_no_other(server: Server) -> None:
    assert infer(server, "litter", 1).status == 200
    assert "the filters are taken back" in server.log
    assert infer(server, "one", 1).status == 200
