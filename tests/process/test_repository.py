"""A server with a model repository: versions, models that cannot be loaded, and files that change while it runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.server import Server, make_server, serving, wait_until
from tests.tiny import programs

ONLY_REPOSITORY = {"catalog.dirs": "", "catalog.models": ""}
ALL = "version_policy { all { } }"
LATEST = "version_policy { latest { num_versions: 1 } }"


def infer(server: Server, model: str, version: int | None = None) -> list[int] | int:
    """What a versions model makes of zeros: its number four times; the status of an error."""
    at = f"/versions/{version}" if version is not None else ""
    tensor = {"name": "INPUT", "shape": [1, 4], "datatype": "INT32", "data": [0, 0, 0, 0]}
    answer = server.post(f"/v2/models/{model}{at}/infer", {"inputs": [tensor]})
    found: list[int] | int = answer.json()["outputs"][0]["data"] if answer.status == 200 else answer.status
    return found


def index(server: Server) -> dict[str, tuple[str, str]]:
    """State and reason by `<model>@<version>`."""
    entries: list[dict[str, Any]] = server.post("/v2/repository/index", {}).json()
    return {f"{e['name']}@{e['version']}": (e["state"], e.get("reason", "")) for e in entries}


def state(server: Server, name: str) -> str:
    """State of one version; empty when there is none."""
    return index(server).get(name, ("", ""))[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server and the repository that it follows."""
    root = tmp_path_factory.mktemp("repository")
    names = ("versions_latest", "versions_all", "versions_specific", "broken", "broken_config", "empty")
    models = programs.write_repository(root / "models", names)
    for name in ("steady", "changing"):
        programs.write_version(models / name, 1, ALL)
    with serving(
        root, models=(), settings={**ONLY_REPOSITORY, "repository.dirs": models}, supervised=False
    ) as server:
        yield server, models


def test_policies_choose_and_versions_answer_differently(world: tuple[Server, Path]) -> None:
    server, _ = world
    answers = {
        name: [infer(server, name, version) for version in (None, 1, 2, 3)]
        for name in ("versions_latest", "versions_all", "versions_specific")
    }
    one, two, three = [1] * 4, [2] * 4, [3] * 4
    assert answers == {
        "versions_latest": [three, 404, 404, three],
        "versions_all": [three, one, two, three],
        "versions_specific": [three, one, 404, three],
    }


def test_models_that_cannot_be_loaded_say_why_and_keep_no_other_away(world: tuple[Server, Path]) -> None:
    server, models = world
    found = index(server)
    assert found["broken@1"] == ("UNAVAILABLE", "model.pt2 is no program of torch.export: damaged or cut off")
    assert "config.pbtxt:2:24: " in found["broken_config@1"][1]
    assert found["empty@"] == (
        "UNAVAILABLE",
        "there is no version: no directory with a number for a name",
    ) and not {"empty@1", "empty@-1"} & set(found)
    assert "empty" not in {row["name"] for row in server.get("/v2/models/stats").json()["model_stats"]}
    answer = server.get("/v2/models/empty/stats")
    assert (answer.status, answer.json()["error"]) == (400, "requested model 'empty' is not available")
    answer = server.get("/v2/models/empty/versions/1/ready")
    assert answer.json()["error"] == "model 'empty' is not ready: it has no version 1"
    assert server.get("/v1/config").json()["empty"] == {"model_version_status": []}
    assert str(models) not in str(found)
    assert server.get("/readyz").status == 200


def test_text_routes_refuse_models_of_named_tensors(world: tuple[Server, Path]) -> None:
    server, _ = world
    for name in ("versions_all", "versions_all@1"):
        answer = server.encode(name, ["text"])
        assert answer.status == 400
        assert "takes named tensors and does not support encode" in answer.json()["detail"]["message"]
    assert server.get("/v1/models").json()["data"] == []


def test_files_that_change_take_effect_while_others_are_served(world: tuple[Server, Path]) -> None:
    server, models = world

    def until(condition: Any, what: str) -> None:
        def holds() -> bool:
            assert infer(server, "steady") == [1] * 4
            return bool(condition())

        wait_until(holds, what=what)

    programs.write_version(models / "changing", 2, ALL)
    until(lambda: infer(server, "changing") == [2] * 4, "a new version")
    assert infer(server, "changing", 1) == [1] * 4

    shutil.rmtree(models / "changing" / "2")
    until(lambda: infer(server, "changing", 2) == 404, "the end of a removed version")
    until(lambda: infer(server, "changing") == [1] * 4, "the version before it")

    (models / "changing" / "5").mkdir()
    until(lambda: state(server, "changing@5") == "UNAVAILABLE", "a half-written version")
    assert infer(server, "changing") == [1] * 4, "the latest version is the latest that is ready"
    programs.write_version(models / "changing", 5, ALL)
    until(lambda: infer(server, "changing") == [5] * 4, "the version, once it is whole")

    config = models / "changing" / "config.pbtxt"
    config.write_text(config.read_text().replace(ALL, LATEST))
    until(
        lambda: infer(server, "changing", 1) == 404 and infer(server, "changing") == [5] * 4, "a new policy"
    )

    config.write_text("max_batch_size: many")
    until(lambda: "config.pbtxt:1:17" in index(server)["changing@5"][1], "a broken configuration")
    assert (state(server, "changing@5"), infer(server, "changing")) == ("READY", [5] * 4)
    shutil.rmtree(models / "changing")
    until(lambda: "changing" not in str(index(server)), "the end of the model")
    assert server.worker_pid() is not None and "Traceback" not in server.log.partition("is ready")[2]


@pytest.mark.long
def test_a_new_latest_version_takes_over_without_a_gap_and_a_broken_one_not_at_all(
    world: tuple[Server, Path],
) -> None:
    server, models = world
    answers = []

    def answer() -> Any:
        answers.append(infer(server, "rolling"))
        return answers[-1]

    programs.write_version(models / "rolling", 1, LATEST)
    wait_until(lambda: infer(server, "rolling") == [1] * 4, what="the first version")
    programs.write_version(models / "rolling", 2, LATEST)
    wait_until(lambda: answer() == [2] * 4, what="the second version")
    wait_until(lambda: answer() and infer(server, "rolling", 1) == 404, what="the end of the first")
    (models / "rolling" / "3").mkdir()
    (models / "rolling" / "3" / "model.pt2").write_bytes(b"nonsense")
    wait_until(lambda: answer() and state(server, "rolling@3") == "UNAVAILABLE", what="a broken version")
    assert [answer() for _ in range(20)] == [[2] * 4] * 20
    assert {str(each) for each in answers} == {str([1] * 4), str([2] * 4)}, "no request failed"
    programs.write_version(models / "rolling", 3, LATEST)
    wait_until(lambda: answer() == [3] * 4, what="the version, mended")
    assert not [each for each in answers if isinstance(each, int)]


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server of two frontends and two workers that loads models by name, and its repository."""
    root = tmp_path_factory.mktemp("by_name")
    models = root / "models"
    for name in ("first", "later"):
        programs.write_version(models / name, 1, LATEST)
    settings = {
        **ONLY_REPOSITORY,
        "repository.dirs": models,
        "repository.control": "explicit",
        "repository.models": "first",
        "server.frontends": 2,
        "worker.count": 2,
    }
    with serving(root, models=(), settings=settings, supervised=False) as server:
        both = {"model": "first@1", "state": "loaded"}
        wait_until(
            lambda: server.metric("penstock_model_state", **both) == 2, what="the model on both workers"
        )
        yield server, models


def load(server: Server, model: str) -> Any:
    """The answer to a load by name."""
    return server.post(f"/v2/repository/models/{model}/load", {})


def test_explicit_control_loads_what_is_named_and_follows_what_is_loaded(
    by_name: tuple[Server, Path],
) -> None:
    server, models = by_name
    assert infer(server, "first") == [1] * 4
    assert infer(server, "later") == 404 and state(server, "later@1") == "UNAVAILABLE"
    assert load(server, "later").status == 200
    assert infer(server, "later") == [1] * 4
    programs.write_version(models / "later", 3, LATEST)
    wait_until(lambda: infer(server, "later") == [3] * 4, what="the new version of a loaded model")
    programs.write_version(models / "unasked", 1, LATEST)
    wait_until(lambda: state(server, "unasked@1") == "UNAVAILABLE", what="a model that nobody has asked for")
    assert server.post("/v2/repository/models/first/unload", {}).status == 200
    wait_until(lambda: infer(server, "first") == 404, what="the unloading")
    assert infer(server, "unasked") == 404


def test_a_load_by_name_serves_what_was_copied_just_before_on_every_frontend(
    by_name: tuple[Server, Path],
) -> None:
    server, models = by_name
    programs.write_version(models / "copied", 1, LATEST)
    assert load(server, "copied").status == 200
    assert [infer(server, "copied") for _ in range(8)] == [[1] * 4] * 8, "a new model"
    programs.write_version(models / "copied", 2, LATEST)
    assert load(server, "copied").status == 200
    assert [infer(server, "copied") for _ in range(8)] == [[2] * 4] * 8, "a new version"
    programs.write_version(models / "other", 5, LATEST)
    (models / "other" / "5" / "model.pt2").replace(models / "copied" / "2" / "model.pt2")
    assert load(server, "copied").status == 200
    assert [infer(server, "copied") for _ in range(8)] == [[5] * 4] * 8, "a replaced version"


def test_a_wrong_section_is_refused_at_the_start_by_name(tmp_path: Path) -> None:
    models = programs.write_repository(tmp_path / "models", ["broken"])
    for chosen, said in (
        ({"repository.dirs": tmp_path / "nowhere"}, "nowhere cannot be read"),
        ({"repository.dirs": models, "repository.models": "brokn"}, "did you mean 'broken'"),
    ):
        with pytest.raises(AssertionError, match=said), serving(tmp_path, (), {**ONLY_REPOSITORY, **chosen}):
            pass


@pytest.mark.long
def test_two_thousand_models_are_announced_once_and_answer(tmp_path: Path) -> None:
    names = [f"m{number:04d}" for number in range(2000)]
    for name in names:
        programs.write_model(tmp_path / "models", "raising", name)
    settings = {
        **ONLY_REPOSITORY,
        "repository.dirs": tmp_path / "models",
        "repository.allow_python": True,
        "worker.heartbeat_timeout_s": 2,
    }
    server = make_server(tmp_path, (), settings)
    server.start()
    try:
        server.wait_ready(300)
        tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [3.0]}
        for name in (names[0], names[-1]):
            answer = server.post(f"/v2/models/{name}/infer", {"inputs": [tensor]})
            assert answer.json()["outputs"][0]["data"] == [3.0]
        wait_until(lambda: {state for state, _ in index(server).values()} == {"READY"}, what="all models")
        assert len(index(server)) == len(names)
        wait_until(lambda: server.starts(0) and "Penstock 0.1.0 is ready" in server.log, what="both notes")
        assert server.starts(0) == 1 and server.log.count("Penstock 0.1.0 is ready") == 1
        assert server.metric("penstock_model_state", state="loaded") == len(names)
        assert server.metric("penstock_worker_restarts_total") == 0, "the worker was never taken as hung"
        server.stop()
        server.assert_nothing_left()
    finally:
        server.kill_everything()
