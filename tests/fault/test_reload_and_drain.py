"""R19 and R20: reload, stop and the drain of one worker under load of clients that keep their connections."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fault import rounds, serving
from tests.harness.load import Load
from tests.harness.server import FAKE_CATALOG, Server, alive, wait_until

CLIENTS = 16
PATIENT = {"server.drain_s": 5}
"""No client lets its connection rest for that long; a drain ends with the last connection."""


def more_answers(load: Load, count: int = 100) -> None:
    """Wait until `count` more requests are answered."""
    before = load.done
    wait_until(lambda: load.done >= before + count, what="traffic")


def reload(server: Server, load: Load) -> None:
    """SIGHUP, and wait until all frontends are new ones."""
    before = set(server.frontend_pids())
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(alive(pid) for pid in before), what="the end of the old frontends")
    more_answers(load)
    assert server.frontend_pids()
    assert not before & set(server.frontend_pids())


def assert_none_failed(load: Load) -> None:
    """Every request was answered 200 with the vector of its text."""
    outcome = load.stop()
    assert outcome.failed == 0, (outcome.statuses, outcome.wrong, outcome.broken[:5], outcome.bodies[:3])
    assert outcome.statuses[200] > 50


def test_reloads_under_load_fail_no_request_and_keep_the_models(tmp_path: Path) -> None:
    with serving(tmp_path, settings={**PATIENT, "server.frontends": 2}) as server:
        worker = server.worker_pid()
        with Load(server.port, CLIENTS) as kept, Load(server.port, 4, keep_alive=False) as fresh:
            more_answers(kept)
            for _ in range(rounds(short=1, long=100)):
                reload(server, kept)
            assert_none_failed(kept)
            assert_none_failed(fresh)
        assert kept.outcome.refused_connections == fresh.outcome.refused_connections == 0
        assert server.worker_pid() == worker, "a reload must not touch the workers"


def test_a_stop_under_load_answers_every_request_that_was_sent(tmp_path: Path) -> None:
    with serving(tmp_path, models=("fake/slow",), settings=PATIENT) as server:
        with Load(server.port, CLIENTS, model="fake/slow") as load:
            more_answers(load, 50)
            assert server.stop() == 0
            wait_until(lambda: load.outcome.refused_connections > 0, what="a refused connection")
            assert_none_failed(load)
        server.assert_nothing_left()


def test_the_drain_of_one_of_two_workers_fails_no_request(tmp_path: Path) -> None:
    with serving(tmp_path, models=("fake/slow",), settings={"worker.count": 2}) as server:
        wait_until(lambda: server.starts(0) and server.starts(1), what="two workers")
        with Load(server.port, CLIENTS, model="fake/slow") as load:
            for turn in range(rounds(short=1, long=20)):
                more_answers(load, 50)
                slot = turn % 2
                drained, starts = server.worker_pid(slot), server.starts(slot)
                assert drained is not None
                os.kill(drained, signal.SIGTERM)
                wait_until(lambda pid=drained: not alive(pid), what="the end of the drained worker")
                wait_until(lambda at=slot, seen=starts: server.starts(at) > seen, what="its successor")
                wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers again")
            assert_none_failed(load)
        assert "has drained" in server.log
        assert "signal-" not in server.log


def test_a_reload_applies_good_settings_and_refuses_broken_ones_without_a_failed_request(
    tmp_path: Path,
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("limits: {max_items: 3}\n")
    with (
        serving(tmp_path, config=config, settings=PATIENT, supervised=False) as server,
        Load(server.port, CLIENTS) as load,
    ):
        mistakes = ("limits: {max_itmes: 5}\n", "limits: [\n", "limits: {max_items: -1}\n")
        for number, broken in enumerate(mistakes):
            more_answers(load)
            config.write_text(broken)
            reload(server, load)
            wait_until(lambda seen=number: server.log.count("is refused") > seen, what="a refusal")
            assert server.process.poll() is None
            assert server.encode("fake/echo", list("abc")).status == 200
            assert server.encode("fake/echo", list("abcd")).status == 400
        assert "did you mean 'max_items'" in server.log
        config.write_text("limits: {max_items: 4}\n")
        reload(server, load)
        assert server.encode("fake/echo", list("abcd")).status == 200
        assert_none_failed(load)


@pytest.mark.long
def test_a_broken_or_vanished_catalog_stops_no_frontend_and_no_worker_that_starts_again(
    tmp_path: Path,
) -> None:
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    entry = (
        (FAKE_CATALOG / "echo.yaml").read_text().replace("../weights", str(FAKE_CATALOG.parent / "weights"))
    )
    (catalog / "echo.yaml").write_text(entry)
    with serving(tmp_path, catalog=catalog, settings=PATIENT) as server, Load(server.port, CLIENTS) as load:
        (catalog / "echo.yaml").write_text("id: [\n")
        reload(server, load)
        assert_none_failed(load)
        frontend = server.frontend_pids()[0]
        os.kill(frontend, signal.SIGKILL)
        wait_until(lambda: server.frontend_pids() not in ([], [frontend]), what="a new frontend")
        wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
        assert server.encode("fake/echo", ["served"]).status == 200
        worker = wait_until(server.worker_pid, what="a worker")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.worker_pid() not in (None, worker), what="its successor")
        wait_until(lambda: server.get("/readyz").status == 200, what="a worker with the catalog of before")
        assert "bad catalog file: " in server.log
        assert server.encode("fake/echo", ["served"]).status == 200
        (catalog / "echo.yaml").unlink()
        worker = wait_until(server.worker_pid, what="a worker")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.worker_pid() not in (None, worker), what="its successor")
        wait_until(lambda: server.get("/readyz").status == 200, what="a worker without any catalog file")
