"""Which models can be asked for tensors: names, versions, states, and when they are looked up again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.services import Services
from frontend.tensors.models import TensorModel
from frontend.tensors.request import UnavailableModel
from ipc import deadline
from ipc.catalog.entries import Catalog, OutputSpec
from ipc.catalog.model_config import ModelConfig
from ipc.errors import ModelLoadFailed, ModelLoading, ModelNotFound, NoReplica
from ipc.wire.messages import ModelStatus
from tests.fakes.tensors import entry, loaded, services_of, tensor

CONFIG = ModelConfig(name="adder", inputs=(tensor("A", "FP32", 2),), outputs=(tensor("O", "FP32", 2),))
VERSIONS = [entry(f"adder@{version}", preload=False) for version in (1, 3, 20)]
CATALOG = [
    entry("org/dense", dimensions=(8, 4)),
    entry("one/twin"),
    entry("two/twin"),
    entry("two/adder"),
    entry("org/rank", outputs={"score": OutputSpec()}),
]


def services(root: Path, *statuses: ModelStatus, **more: Any) -> Services:
    """Services with all models of this file."""
    return services_of(root, [*VERSIONS, *CATALOG], statuses, **more)


def states_of(made: Services, name: str) -> list[tuple[int, str, str]]:
    """What clients are told of each version."""
    return [(state.version, state.state, state.reason) for state in made.tensor_models.states(name)]


def refused(made: Services, name: str, version: int | None = None) -> tuple[str, str]:
    """Why a model cannot be asked."""
    with pytest.raises(UnavailableModel) as found:
        made.tensor_models.find(name, version)
    return found.value.reason, found.value.why


def test_the_latest_version_is_the_greatest_one_that_is_loaded(tmp_path: Path) -> None:
    made = services(
        tmp_path,
        loaded("adder@1", CONFIG),
        loaded("adder@3", CONFIG),
        ModelStatus("adder@20", "loading", progress=0.4),
    )
    assert made.tensor_models.find("adder").version == 3
    assert made.tensor_models.find("adder", 1).id == "adder@1"
    assert states_of(made, "adder") == [(1, "READY", ""), (3, "READY", ""), (20, "LOADING", "")]
    with pytest.raises(ModelLoading) as loading:
        made.tensor_models.find("adder", 20)
    assert loading.value.retry_after_s
    assert loading.value.message == "model 'adder' is loading, 40% of it is done"


def test_a_version_whose_changed_files_cannot_be_loaded_is_ready_and_says_why(tmp_path: Path) -> None:
    stale = loaded("adder@1", CONFIG, next="new", error_class="UNKNOWN", error_message="no such program")
    made = services(tmp_path, stale)
    assert made.tensor_models.find("adder").status is stale
    [state] = [state for state in states_of(made, "adder") if state[0] == 1]
    assert state == (1, "READY", "served as it was before its files changed: no such program")


@pytest.mark.parametrize("version", [0, 2, -1, 1 << 70])
def test_a_version_that_the_policy_does_not_choose_is_unknown(version: int, tmp_path: Path) -> None:
    assert refused(services(tmp_path, loaded("adder@1", CONFIG)), "adder", version) == ("version", "")


@pytest.mark.parametrize("name", ["", "no", "adder@1", "org", "org/", "twin", "x" * 100_000, "\udcff"])
def test_other_names_are_unknown(name: str, tmp_path: Path) -> None:
    made = services(tmp_path, loaded("adder@1", CONFIG))
    assert refused(made, name)[0] == "model"
    with pytest.raises(UnavailableModel) as found:
        made.tensor_models.states(name)
    assert len(found.value.message) < 1000


def test_catalog_models_have_version_1_and_a_short_name_where_it_is_theirs_alone(tmp_path: Path) -> None:
    made = services(tmp_path, loaded("org/dense", dims={"dense": 8}), loaded("adder@3", CONFIG))
    found = made.tensor_models.find("dense")
    assert (found.name, found.model, found.id, found.version, found.kind) == (
        "dense",
        *["org/dense"] * 2,
        1,
        "encode",
    )
    assert found.outputs["dense"].dims == (8,)
    assert made.tensor_models.find("org/dense", 1).config.name == "org/dense"
    assert made.tensor_models.find("rank").kind == "score"
    assert made.tensor_models.find("adder").id == "adder@3", "the repository's name goes before a short name"
    assert made.tensor_models.names() == [
        "adder",
        "one/twin",
        "org/dense",
        "org/rank",
        "two/adder",
        "two/twin",
    ]
    assert refused(made, "dense", 2)[0] == "version"


def test_a_catalog_model_has_its_further_names_and_the_index_has_ids_only(tmp_path: Path) -> None:
    made = services_of(tmp_path, [entry("org/dense", served_name=("org/ada", "ada"))], [])
    assert made.tensor_models.find("ada").id == made.tensor_models.find("org/ada").id == "org/dense"
    assert made.tensor_models.find("ada").config.name == "ada"
    assert made.tensor_models.names() == ["org/dense"]


def test_a_catalog_model_that_is_not_loaded_is_found_but_not_ready(tmp_path: Path) -> None:
    made = services(tmp_path, ModelStatus("org/dense", "available"))
    assert made.tensor_models.find("dense").outputs["dense"].dims == (-1,)
    assert states_of(made, "dense") == [(1, "UNAVAILABLE", "not loaded")]
    unloaded = services(tmp_path, ModelStatus("org/dense", "available", attempts=1), unloaded=["org/dense"])
    assert refused(unloaded, "dense") == ("unloaded", "")


def test_failed_versions_say_why_unless_another_one_is_coming(tmp_path: Path) -> None:
    failed = ModelStatus("adder@20", "failed", error_message="no such file", permanent=True, attempts=3)
    made = services(tmp_path, failed, ModelStatus("adder@3", "failed", error_message="older"))
    made.engine.client.channels[0].models["adder@1"] = ModelStatus("adder@1", "available")
    with pytest.raises(ModelLoading):
        made.tensor_models.find("adder")
    assert refused(made, "adder", 20) == ("failed", "no such file")
    assert states_of(made, "adder")[2] == (20, "UNAVAILABLE", "no such file")


EXPLICIT = {"repository__control": "explicit"}


def test_where_models_are_loaded_by_name_an_unloaded_one_stays_away(tmp_path: Path) -> None:
    gone = [ModelStatus(made.id, "available", attempts=1) for made in VERSIONS]
    made = services(tmp_path, *gone, unloaded=["adder"], **EXPLICIT)
    assert refused(made, "adder") == ("unloaded", "")
    assert states_of(made, "adder") == [(version, "UNAVAILABLE", "unloaded") for version in (1, 3, 20)]
    for state in ("unloading", "loading"):
        going = [ModelStatus(made.id, state, attempts=1) for made in VERSIONS]
        assert refused(services(tmp_path, *going, unloaded=["adder"], **EXPLICIT), "adder") == (
            "unloaded",
            "",
        )


def test_a_model_that_lost_its_memory_to_others_comes_back(tmp_path: Path) -> None:
    evicted = [ModelStatus(made.id, "available", attempts=1) for made in VERSIONS]
    for settings in ({}, EXPLICIT):
        made = services(tmp_path, *evicted, **settings)
        with pytest.raises(ModelLoading):
            made.tensor_models.find("adder")
        assert states_of(made, "adder")[0] == (1, "LOADING", "")


def test_an_untried_model_is_coming_only_while_the_server_starts(tmp_path: Path) -> None:
    made = services(tmp_path, *(ModelStatus(made.id, "available") for made in VERSIONS), **EXPLICIT)
    assert refused(made, "adder") == ("unloaded", "")
    made.engine.client.channels[0].preloaded = False  # type: ignore[attr-defined]
    with pytest.raises(ModelLoading):
        made.tensor_models.find("adder")


@pytest.mark.parametrize("started", [True, False])
def test_what_was_loaded_is_coming_although_the_worker_that_had_it_is_gone(
    tmp_path: Path, started: bool
) -> None:
    """By name, or at the start by a worker that alone offers it."""
    untried = ModelStatus("adder@1", "available")
    made = services_of(tmp_path, [entry("adder@1", preload=started)], [untried], **EXPLICIT)
    if not started:
        made.extensions.control.wished = lambda model: model == "adder" or None  # type: ignore[method-assign]
    with pytest.raises(ModelLoading):
        made.tensor_models.find("adder")
    assert states_of(made, "adder") == [(1, "LOADING", "")]
    Loads(made, [loaded("adder@1", CONFIG)])
    assert waiting(made, "adder").version == 1


def test_without_workers_nobody_can_say(tmp_path: Path) -> None:
    made = services(tmp_path)
    made.engine.client.channels.clear()
    with pytest.raises(NoReplica):
        made.tensor_models.find("adder")


def test_what_is_found_is_kept_until_states_or_the_catalog_change(tmp_path: Path) -> None:
    made = services(tmp_path, loaded("adder@1", CONFIG))
    first = made.tensor_models.find("adder")
    assert made.tensor_models.find("adder") is first
    channel = made.engine.client.channels[0]
    channel.models = {**channel.models, "adder@3": loaded("adder@3", CONFIG)}
    assert made.tensor_models.find("adder").version == 3
    channel.state = "absent"
    with pytest.raises(NoReplica):
        made.tensor_models.find("adder")
    channel.state = "ready"
    assert made.tensor_models.find("adder").version == 3
    made.catalog.replace(Catalog([*VERSIONS[:1], *CATALOG]))
    assert made.tensor_models.find("adder").version == 1
    made.catalog.replace(Catalog(CATALOG))
    assert made.tensor_models.find("adder").id == "two/adder"


class Loads:
    """What becomes of a model while a request waits for it."""

    def __init__(
        self, made: Services, statuses: Sequence[ModelStatus], error: Exception | None = None
    ) -> None:
        self.made, self.statuses, self.error = made, statuses, error
        made.engine.client.on_wait = self  # type: ignore[attr-defined]

    def __call__(self, model: str) -> None:
        self.made.engine.client.channels[0].models = {status.name: status for status in self.statuses}
        if self.error is not None:
            raise self.error


def waiting(made: Services, name: str, version: int | None = None) -> TensorModel:
    """`ready`, with the time of a test."""
    return asyncio.run(made.tensor_models.ready(name, version, deadline.after(60)))


def test_a_request_waits_for_the_greatest_version_that_is_coming(tmp_path: Path) -> None:
    failed = ModelStatus("adder@20", "failed", error_message="x", permanent=True)
    made = services(tmp_path, failed, ModelStatus("adder@3", "loading"), ModelStatus("adder@1", "loading"))
    Loads(made, [failed, loaded("adder@3", CONFIG)])
    assert waiting(made, "adder").version == 3
    assert made.engine.client.waited == [["adder@3", "adder@1"]]  # type: ignore[attr-defined]


def two_coming(root: Path) -> Services:
    """Services with a model of two versions, which are being loaded."""
    return services_of(root, VERSIONS[:2], [ModelStatus(made.id, "loading") for made in VERSIONS[:2]])


def test_a_request_takes_the_version_that_comes_when_the_greatest_cannot(tmp_path: Path) -> None:
    made = two_coming(tmp_path)
    failed = ModelStatus("adder@3", "failed", error_message="the file is broken", permanent=True)
    steps = [[failed, ModelStatus("adder@1", "loading")], [failed, loaded("adder@1", CONFIG)]]

    def step(model: str) -> None:
        made.engine.client.channels[0].models = {status.name: status for status in steps.pop(0)}
        if steps:
            raise ModelLoadFailed("the file is broken")

    made.engine.client.on_wait = step  # type: ignore[attr-defined]
    assert waiting(made, "adder").version == 1
    assert made.engine.client.waited == [["adder@3", "adder@1"], ["adder@1"]]  # type: ignore[attr-defined]


def test_a_version_that_can_only_fail_keeps_nobody_from_waiting_for_another(tmp_path: Path) -> None:
    """It failed for good on one worker while it leaves the other."""
    made = two_coming(tmp_path)
    status, first = made.engine.client.channels[0].models, made.engine.client.channels[0]
    lasting = ModelStatus("adder@3", "failed", error_class="UNKNOWN", error_message="broken", permanent=True)
    first.models = {**status, "adder@3": lasting}
    made.engine.client.channels.append(
        replace(first, slot=1, models={"adder@3": ModelStatus("adder@3", "unloading")})
    )  # type: ignore[type-var]
    with pytest.raises(ModelLoading):
        made.tensor_models.find("adder")
    assert refused(made, "adder", 3) == ("failed", "broken")

    def step(model: str) -> None:
        if model == "adder@3":
            raise ModelLoadFailed("broken")
        first.models = {"adder@3": lasting, "adder@1": loaded("adder@1", CONFIG)}

    made.engine.client.on_wait = step  # type: ignore[attr-defined]
    assert waiting(made, "adder").version == 1


def test_a_version_that_comes_too_late_for_one_that_is_asked_for_is_no_help(tmp_path: Path) -> None:
    made = two_coming(tmp_path)
    Loads(made, [loaded("adder@1", CONFIG)], ModelLoadFailed("the file is broken"))
    with pytest.raises(UnavailableModel):
        waiting(made, "adder", 3)
    assert made.engine.client.waited[0] == ["adder@3"]  # type: ignore[attr-defined]


def test_a_catalog_model_is_loaded_for_its_request(tmp_path: Path) -> None:
    made = services(tmp_path, ModelStatus("org/dense", "available"))
    Loads(made, [loaded("org/dense", dims={"dense": 8})])
    assert waiting(made, "dense").outputs["dense"].dims == (8,)


def test_a_loaded_model_is_not_waited_for(tmp_path: Path) -> None:
    made = services(tmp_path, loaded("adder@1", CONFIG))
    assert waiting(made, "adder").status.state == "loaded"
    assert made.engine.client.waited == []  # type: ignore[attr-defined]


def test_a_load_that_fails_makes_the_model_unavailable(tmp_path: Path) -> None:
    made = services(tmp_path, ModelStatus("adder@1", "loading"))
    Loads(made, [], ModelLoadFailed("the file is broken"))
    with pytest.raises(UnavailableModel) as found:
        waiting(made, "adder", 1)
    assert (found.value.reason, found.value.why) == ("failed", "the file is broken")


@pytest.mark.parametrize("state", ["available", "loading"])
def test_a_model_that_is_taken_away_while_a_request_waits_is_told_as_that(tmp_path: Path, state: str) -> None:
    """Also where somebody has just had it loaded once more, and taken away again."""
    made = services(tmp_path, ModelStatus("adder@1", "loading"))
    found_then = ModelStatus("adder@1", state, config=CONFIG, attempts=1)
    Loads(made, [found_then], ModelNotFound("Model 'adder@1' not found"))
    with pytest.raises(UnavailableModel) as found:
        waiting(made, "adder", 1)
    assert found.value.reason == "unloaded"


def test_two_workers_make_one_state(tmp_path: Path) -> None:
    made = services(tmp_path, ModelStatus("adder@1", "loading"))
    first = made.engine.client.channels[0]
    made.engine.client.channels.append(replace(first, slot=1, models={"adder@1": loaded("adder@1", CONFIG)}))  # type: ignore[type-var]
    assert states_of(made, "adder")[0] == (1, "READY", "")
    assert made.tensor_models.find("adder").version == 1
