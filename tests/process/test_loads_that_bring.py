"""Loads by name that bring a configuration or files: on every worker, until the next load that brings none."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import pytest

from frontend.status import history
from ipc.processes.paths import RunPaths
from ipc.protos import kserve_v2_pb2 as pb
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import ROOT, Answer, Server, serving, wait_until
from tests.harness.shared import client_object, register, unregister
from tests.tiny.programs import write_model, write_repository

MODELS = ("add_sub", "versions_all")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends and two workers, models by name, files allowed."""
    place = tmp_path_factory.mktemp("wishes")
    settings = {
        "repository.dirs": write_repository(place / "models", MODELS),
        "repository.control": "explicit",
        "repository.models": "add_sub",
        "repository.allow_files": "true",
        "repository.max_upload_bytes": 1 << 20,
        "shared_memory.enabled": "true",
        "server.frontends": 2,
        "worker.count": 2,
        **grpc_settings(),
    }
    with serving(place, ("fake/echo",), settings) as running:
        yield running


def load(server: Server, model: str, **parameters: Any) -> Any:
    """A load that brings these parameters."""
    return server.post(f"/v2/repository/models/{model}/load", {"parameters": parameters})


def unload(server: Server, model: str) -> None:
    """An unload, to its end."""
    assert server.post(f"/v2/repository/models/{model}/unload", {}).status == 200


def restore(server: Server) -> None:
    """Unload and load the model, so that the repository's own is in force again."""
    unload(server, "add_sub")
    assert load(server, "add_sub").status == 200


def batch_of(server: Server, model: str = "add_sub") -> int:
    """The largest batch that its configuration allows."""
    found: int = server.get(f"/v2/models/{model}/config").json()["max_batch_size"]
    return found


def config_of(server: Server, model: str = "add_sub", **changes: Any) -> str:
    """The model's present configuration with some fields changed, as JSON text."""
    return json.dumps(server.get(f"/v2/models/{model}/config").json() | changes)


def rows(server: Server, count: int, model: str = "add_sub") -> int:
    """Status of a request of so many rows, on a connection of its own."""
    return infer(server, count, model).status


def infer(server: Server, count: int, model: str = "add_sub") -> Answer:
    """The answer to a request of so many rows."""
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [count, 16], "data": [1] * 16 * count}
        for name in ("INPUT0", "INPUT1")
    ]
    return server.post(f"/v2/models/{model}/infer", {"inputs": inputs})


def patient(ask: Callable[[], Answer]) -> Answer:
    """As a client that comes again after a 503."""

    def answered() -> Answer | None:
        answer = ask()
        return None if answer.status == 503 else answer

    found: Answer = wait_until(answered, what="an answer")
    return found


def wishes_of(server: Server) -> Wishes:
    """What loads brought that are in force."""
    paths = RunPaths(server.run_dir, "test")
    return Wishes(paths, Store(paths))


def kept(server: Server) -> list[str]:
    """Models for which loads brought something, and names of their files; each directory of files has its row."""
    wishes = wishes_of(server)
    rows = wishes.brought()
    files = [path.name for path in wishes.directory.rglob("[!.]*") if path.is_file()]
    assert {path.name for path in wishes.directory.iterdir() if path.is_dir()} == {
        override.files for override in rows.values() if override.files
    }
    return [*rows, *files]


def test_a_configuration_holds_on_every_process_until_the_unload_and_a_plain_load_keeps_it(
    server: Server,
) -> None:
    assert (batch_of(server), rows(server, 8)) == (8, 200)
    answer = load(server, "add_sub", config=config_of(server, max_batch_size=2))
    assert answer.status == 200, answer.body
    for _ in range(8):
        assert (batch_of(server), rows(server, 2), rows(server, 3)) == (2, 200, 400)
    for _ in range(4):
        assert load(server, "add_sub").status == 200
        assert (batch_of(server), rows(server, 2), rows(server, 3)) == (2, 200, 400)
    restore(server)
    for _ in range(8):
        assert (batch_of(server), rows(server, 8)) == (8, 200)
    assert not kept(server)


@pytest.mark.long
def test_a_configuration_outlives_the_worker(server: Server) -> None:
    assert load(server, "add_sub", config=config_of(server, max_batch_size=3)).status == 200
    wait_until(lambda: server.starts(0) and server.starts(1), what="two workers")
    for slot in (0, 1):
        pid, starts = server.worker_pid(slot), server.starts(slot)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda slot=slot, starts=starts: server.starts(slot) > starts, what="its return")
    for _ in range(8):
        assert [patient(lambda count=count: infer(server, count)).status for count in (3, 4)] == [200, 400]
        assert patient(lambda: server.get("/v2/models/add_sub/config")).json()["max_batch_size"] == 3
    restore(server)
    assert rows(server, 8) == 200


@contextmanager
def asking(server: Server, count: int) -> Iterator[Counter[int]]:
    """Requests of so many rows meanwhile, from two clients; the statuses of their answers."""
    statuses, over = Counter[int](), threading.Event()

    def client() -> None:
        while not over.is_set():
            statuses[rows(server, count)] += 1

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(client) for _ in range(2)]
        try:
            wait_until(lambda: statuses.total() >= 4, what="traffic")
            yield statuses
        finally:
            over.set()
    for each in clients:
        each.result()


def misfit(server: Server) -> str:
    """A configuration that only the load of its program finds wrong."""
    config = json.loads(config_of(server))
    config["input"][0]["data_type"] = "TYPE_FP32"
    return json.dumps(config)


def test_a_configuration_that_does_not_fit_the_program_changes_nothing(server: Server) -> None:
    config = misfit(server)
    with asking(server, 8) as statuses:
        for _ in range(3):
            answer = load(server, "add_sub", config=config)
            assert answer.status == 500
            assert answer.json()["error"].startswith("failed to load 'add_sub', ")
            assert "INPUT0" in answer.json()["error"]
            assert load(server, "add_sub").status == 200, "as it was, on whichever frontend"
    assert set(statuses) == {200}, "requests during a load that fails"
    assert not kept(server)


def test_a_load_that_succeeds_costs_no_request(server: Server) -> None:
    with asking(server, 2) as statuses:
        for batch in (2, 4):
            assert load(server, "add_sub", config=config_of(server, max_batch_size=batch)).status == 200
            for _ in range(4):
                assert (batch_of(server), rows(server, batch), rows(server, batch + 1)) == (batch, 200, 400)
        assert load(server, "add_sub", config=config_of(server, max_batch_size=8)).status == 200
    assert set(statuses) == {200}
    restore(server)


def test_requests_on_their_way_do_not_load_what_is_unloaded(server: Server) -> None:
    with asking(server, 2) as statuses:
        for _ in range(3):
            unload(server, "add_sub")
            gone = statuses[404]
            wait_until(lambda gone=gone: statuses[404] >= gone + 20, what="the end of the model")
            assert [rows(server, 2) for _ in range(4)] == [404] * 4
            assert load(server, "add_sub").status == 200
    assert set(statuses) == {200, 404}


def test_a_load_that_fails_where_nothing_was_loaded_does_not_spoil_the_next(server: Server) -> None:
    config = misfit(server)
    for _ in range(2):
        unload(server, "add_sub")
        assert load(server, "add_sub", config=config).status == 500
        assert load(server, "add_sub").status == 200
    assert rows(server, 8) == 200


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({"config": "{"}, 400, "failed to load 'add_sub', config"),
        ({"config": "[]"}, 400, "expected a map"),
        ({"config": '{"max_batch_sise": 1}'}, 400, "max_batch_sise"),
        ({"config": '{"max_batch_size": -1}'}, 400, "max_batch_size: -1"),
        ({"config": '{"name": "other"}'}, 400, "name: 'other'"),
        ({"config": '{"platform": "tensorrt_plan"}'}, 400, "platform: 'tensorrt_plan'"),
        ({"config": {}}, 400, "expected the JSON text"),
        ({"config": "{}", "more": 1}, 400, "'more'"),
        ({"file:1/model.pt2": "AA=="}, 400, "'config' is missing"),
        ({"config": "{}", "file:1/model.pt2": "*"}, 400, "base64"),
        ({"config": "{}", "file:../model.pt2": "AA=="}, 400, "below the model's directory"),
        ({"config": "{}", "file:/etc/passwd": "AA=="}, 400, "below the model's directory"),
        ({"config": "{}", "file:config.pbtxt": "AA=="}, 400, "below the model's directory"),
        ({"config": "{}", "file:labels.txt": "AA=="}, 400, "there is no version"),
        ({"config": "{}", "file:1/model.py": "AA=="}, 400, "repository.allow_python"),
        ({"config": "{}", "file:1/model.pt2": "A" * (2 << 20)}, 413, "repository.max_upload_bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_anything_changes(
    server: Server, parameters: dict[str, Any], status: int, words: str
) -> None:
    answer = load(server, "add_sub", **parameters)
    assert (answer.status, words in answer.json()["error"]) == (status, True), answer.body
    assert rows(server, 8) == 200
    assert not kept(server)


def test_files_make_a_model_that_the_repository_does_not_have(server: Server, tmp_path: Path) -> None:
    program = (write_model(tmp_path, "add_sub") / "1" / "model.pt2").read_bytes()
    config = config_of(server, name="brought", max_batch_size=4)
    parameters = {"config": config, "file:1/model.pt2": base64.b64encode(program).decode()}
    answer = load(server, "brought", **parameters)
    assert answer.status == 200, answer.body
    for _ in range(8):
        assert (rows(server, 4, "brought"), rows(server, 5, "brought")) == (200, 400)
    assert rows(server, 8) == 200, "the model whose program it was goes on as it is"
    assert "model.pt2" in kept(server)
    assert load(server, "brought").status == 200, "a load that brings nothing keeps the files"
    assert (rows(server, 4, "brought"), rows(server, 5, "brought")) == (200, 400)
    unload(server, "brought")
    wait_until(lambda: rows(server, 4, "brought") == 404, what="the end of the model")
    assert not kept(server)
    for _ in range(4):
        assert load(server, "brought").status == 500, "there is no model of that name without the files"


def test_a_plain_load_after_an_unload_finds_the_repositorys_own(server: Server) -> None:
    assert load(server, "versions_all").status == 200
    specific = config_of(server, "versions_all", version_policy={"specific": {"versions": [2]}})
    assert load(server, "versions_all", config=specific).status == 200
    for _ in range(4):
        assert server.get("/v2/models/versions_all").json()["versions"] == ["2"]
    unload(server, "versions_all")
    assert load(server, "versions_all").status == 200
    assert server.get("/v2/models/versions_all").json()["versions"] == ["1", "2", "3"]


@pytest.mark.parametrize("model", ["..", ".", ".x", "..."])
def test_a_name_that_leads_elsewhere_writes_nothing(server: Server, tmp_path: Path, model: str) -> None:
    victim = tmp_path / "victim"
    write_model(victim, "add_sub")
    content = json.dumps({"model": "stolen", "config": "{}", "files": str(victim)}).encode()
    file = "file:stolen.json"
    answer = load(server, model, config="{}", **{file: base64.b64encode(content).decode()})
    assert answer.status in (400, 404), answer.body
    request = pb.RepositoryModelLoadRequest(model_name=model)
    request.parameters["config"].string_param = "{}"
    request.parameters[file].bytes_param = content
    with Rpc(address_of(server)) as rpc, pytest.raises(grpc.RpcError) as caught:
        rpc.call("RepositoryModelLoad", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    assert "this is no name for a model" in caught.value.details()
    assert not kept(server)
    assert (victim / "add_sub" / "1" / "model.pt2").is_file()


def test_a_name_of_a_file_that_is_too_long_is_refused(server: Server) -> None:
    config = config_of(server, default_model_filename="x" * 300)
    answer = load(server, "add_sub", config=config)
    assert (answer.status, "File name too long" in answer.json()["error"]) == (400, True), answer.body
    config = config_of(server, name="brought", default_model_filename="x" * 300)
    answer = load(server, "brought", **{"config": config, "file:1/model.pt2": "AA=="})
    assert (answer.status, "File name too long" in answer.json()["error"]) == (400, True), answer.body
    assert not kept(server)


@pytest.mark.long
def test_loads_of_one_model_at_the_same_time_come_one_after_another(server: Server, tmp_path: Path) -> None:
    program = (write_model(tmp_path, "add_sub") / "1" / "model.pt2").read_bytes()
    brought = {"file:1/model.pt2": base64.b64encode(program).decode()}

    def one(rows_allowed: int) -> tuple[int, bytes]:
        config = config_of(server, name="brought", max_batch_size=rows_allowed)
        answer = load(server, "brought", config=config, **brought)
        return answer.status, answer.body

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(one, range(2, 8)))
    assert {status for status, _ in answers} == {200}, answers
    found = batch_of(server, "brought")
    assert found in range(2, 8) and len(kept(server)) == 2
    for _ in range(4):
        assert (rows(server, found, "brought"), rows(server, found + 1, "brought")) == (200, 400)
    unload(server, "brought")
    assert not kept(server)


def test_the_limit_of_all_files_holds_for_loads_at_the_same_time(server: Server, tmp_path: Path) -> None:
    program = (write_model(tmp_path, "add_sub") / "1" / "model.pt2").read_bytes()
    filling = b"x" * (400_000 - len(program))
    brought = {
        "file:1/model.pt2": base64.b64encode(program).decode(),
        "file:more": base64.b64encode(filling).decode(),
    }
    names = [f"large_{number}" for number in range(4)]

    def one(name: str) -> int:
        return int(load(server, name, config=config_of(server, name=name), **brought).status)

    with ThreadPoolExecutor(4) as threads:
        statuses = sorted(threads.map(one, names))
    assert statuses == [200, 200, 413, 413]
    for name in names:
        unload(server, name)
    assert not kept(server)


@pytest.mark.long
def test_an_override_in_force_outlives_frontends(server: Server) -> None:
    assert load(server, "add_sub", config=config_of(server, max_batch_size=3)).status == 200
    left = server.run_dir / "wishes" / "0123456789abcdef"
    left.mkdir()
    old = server.frontend_pids()
    os.kill(old[0], signal.SIGKILL)
    wait_until(lambda: len(server.frontend_pids()) == 2 and old[0] not in server.frontend_pids(), what="two")
    assert_batch(server, 3)
    wait_until(lambda: not left.exists(), what="the end of what a dead process left")
    old = server.frontend_pids()
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(
        lambda: len(server.frontend_pids()) == 2 and not {*old} & {*server.frontend_pids()}, what="new"
    )
    assert_batch(server, 3)
    restore(server)
    assert_batch(server, 8)
    assert not kept(server)


def assert_batch(server: Server, expected: int) -> None:
    """Every frontend takes so many rows and no more."""
    for _ in range(8):
        assert (rows(server, expected), rows(server, expected + 1)) == (200, 400)


def killed_in_a_load(server: Server, **parameters: Any) -> bool:
    """Kill the frontends once a load is in force, until there are new ones; false if it had ended before."""
    wishes, old = wishes_of(server), server.frontend_pids()
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(load, server, "brought", **parameters)
        wait_until(lambda: "brought" in wishes.brought() or lost.done(), what="the load")
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        error = lost.exception(30)
    assert error is None or isinstance(error, OSError | HTTPException)
    wait_until(
        lambda: len(server.frontend_pids()) == 2 and not {*old} & {*server.frontend_pids()}, what="new"
    )
    server.wait_ready()
    return error is not None


def test_a_frontend_killed_in_a_load_keeps_nobody_from_the_next(server: Server, tmp_path: Path) -> None:
    program = (write_model(tmp_path, "add_sub") / "1" / "model.pt2").read_bytes()
    parameters = {
        "config": config_of(server, name="brought", max_batch_size=4),
        "file:1/model.pt2": base64.b64encode(program).decode(),
    }
    for _ in range(3):
        if killed_in_a_load(server, **parameters):
            break
        unload(server, "brought")
    else:
        pytest.fail("every load ended before its frontend did")
    answer = load(server, "brought", **parameters)
    assert answer.status == 200, answer.body
    assert (rows(server, 4, "brought"), rows(server, 5, "brought"), len(kept(server))) == (200, 400, 2)
    unload(server, "brought")
    assert not kept(server)


def files_of(server: Server) -> dict[str, tuple[int, int]]:
    """Every file of the run directory with its inode and size.

    Metrics, marks of loads under way and the lock of the history, which the next frontend takes within ten seconds of a
    death, are left out.
    """
    moving = {"metrics", "loading", f"{history.LOCK}.lock"}
    found: dict[str, tuple[int, int]] = {}
    for path in server.run_dir.rglob("*"):
        if not moving & set(path.parts) and path.is_file():
            found[str(path)] = (path.stat().st_ino, path.stat().st_size)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("supervise", ["1", "0"])
def test_a_second_start_changes_nothing_and_says_who_runs(server: Server, supervise: str) -> None:
    assert load(server, "add_sub", config=config_of(server, max_batch_size=2)).status == 200
    with client_object(64) as memory:
        assert register(server, "mine", memory.key, 64).status == 200
        wait_until(lambda: (server.run_dir / "announced").exists(), what="the start announced")
        before, arenas = files_of(server), server.arenas()
        done = subprocess.run(
            [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py"],
            cwd=ROOT,
            env=server.environment | {"PENSTOCK_SUPERVISE": supervise},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        assert (
            f"server.lock is held by another live process (pid {server.process.pid}, since 20" in done.stderr
        )
        assert "nothing was changed" in done.stderr and "Traceback" not in done.stderr
        assert files_of(server) == before
        assert server.arenas() == arenas
        listed = server.get("/v2/systemsharedmemory/status").json()
        assert [region["name"] for region in listed] == ["mine"]
        assert (rows(server, 2), rows(server, 3)) == (200, 400)
        assert unregister(server, "mine").status == 200
    unload(server, "add_sub")
    assert load(server, "add_sub").status == 200
