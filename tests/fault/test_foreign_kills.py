"""Code of models ends the process by itself, wherever such code runs: its input is refused after its second kill."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.raising import KILLS, SEQUENCES, STREAM, write_python
from tests.fault import serving
from tests.fault.test_foreign_errors import MODEL, assert_right, code_of, infer, write_entry
from tests.harness.lifecycle import ON_DEMAND
from tests.harness.server import Server, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("kills")
    catalog = place / "catalog"
    catalog.mkdir()
    repository: Path = place / "repository"
    write_entry(catalog, MODEL)
    for name in KILLS:
        write_entry(catalog, f"org/load-{name}", fail=f"#kill {name} load")
    write_python(repository, "many", facts=STREAM)
    write_python(repository, "sequence", facts=SEQUENCES)
    settings = ON_DEMAND | {
        "repository.dirs": repository,
        "repository.allow_python": "true",
        "limits.load_wait_s": 100,
        "limits.restart_wait_s": 100,
        "worker.healthy_after_s": 0.1,
    }
    with serving(place, models=(), settings=settings, catalog=catalog) as running:
        yield running


def deaths(server: Server) -> float:
    """Worker processes that have ended so far."""
    return server.metric("penstock_worker_restarts_total")


@pytest.mark.parametrize("place", ["check", "group", "prepare", "collate", "run"])
@pytest.mark.parametrize("name", KILLS)
def test_an_input_that_kills_is_refused_after_its_second_kill(server: Server, name: str, place: str) -> None:
    before = deaths(server)
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(server.encode, MODEL, [f"#kill {name} {place}"], 300)
        assert_right(server.encode(MODEL, ["beside"], timeout_s=300), ["beside"])
        assert code_of(killing.result()) == (500, "WORKER_CRASHED")
    # The client hears of a death before the supervisor has started another worker, which is when the death counts.
    wait_until(lambda: deaths(server) == before + 2, what="the second restart")
    assert code_of(server.encode(MODEL, [f"#kill {name} {place}"])) == (500, "WORKER_CRASHED")
    assert_right(server.encode(MODEL, ["behind"], timeout_s=300), ["behind"])
    assert deaths(server) == before + 2


@pytest.mark.parametrize("name", KILLS)
def test_a_load_that_kills_is_refused_after_its_second_kill(server: Server, name: str) -> None:
    before = deaths(server)
    answer = server.encode(f"org/load-{name}", ["x"], timeout_s=300)
    assert code_of(answer) == (502, "MODEL_LOAD_FAILED") and "died twice" in answer.body.decode()
    assert_right(server.encode(MODEL, ["behind"], timeout_s=300), ["behind"])
    assert deaths(server) == before + 2


@pytest.mark.parametrize("place", ["call", "start", "middle"])
def test_a_stream_that_kills_is_refused_after_its_second_kill(server: Server, place: str) -> None:
    before, body = deaths(server), {"X": 2, "do": f"#kill segfault {place}"}
    for _ in range(2):
        server.post("/v2/models/many/generate_stream", body, 300)
        assert_right(server.encode(MODEL, ["behind"], timeout_s=300), ["behind"])
    assert b"is refused" in server.post("/v2/models/many/generate_stream", body, 300).body
    assert deaths(server) == before + 2


def test_a_sequence_that_kills_is_refused_after_its_second_kill(server: Server) -> None:
    before, step = deaths(server), {"sequence_start": True, "sequence_end": True}
    for number in range(3):
        answer = infer(server, "sequence", 1, "#kill segfault infer", sequence_id=number + 1, **step)
        assert answer.status == (503 if number < 2 else 500)
        assert_right(server.encode(MODEL, ["behind"], timeout_s=300), ["behind"])
    assert deaths(server) == before + 2
