"""States of one set of weights, what is told of it, and which models share one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, Profile
from tests.fakes.adapter import FakeAdapter
from workers.lifecycle import model_states
from workers.lifecycle.instance import NEXT, Instance, WrongTransition
from workers.loading.failure import LoadFailure

ENTRY = ModelEntry("org/m", DirectorySource("/weights"), adapter="tests.fakes.weighing:WeighingAdapter")
FAILURE = LoadFailure(error_class="OOM", permanent=False, retry_after_s=60.0, message="too large")


def loaded() -> Instance:
    """A loaded instance."""
    instance = Instance([ENTRY])
    instance.begin(demanded=True)
    instance.succeed(FakeAdapter({}, 512), 100, 2.5, 10.0)
    return instance


@given(st.lists(st.sampled_from(sorted(NEXT)), max_size=12))
def test_no_way_leads_around_the_states(steps: list[str]) -> None:
    instance = Instance([ENTRY])
    for step in steps:
        allowed = step in NEXT[instance.state]
        before = instance.state
        try:
            instance.move(step)
        except WrongTransition:
            assert not allowed and instance.state == before
        else:
            assert allowed and instance.state == step


def test_a_loaded_model_tells_its_dims_and_memory_and_an_unloaded_one_how_long_it_took() -> None:
    instance = loaded()
    status = instance.status(ENTRY, "cpu")
    assert (status.state, status.memory_bytes, status.dims, status.load_s) == (
        "loaded",
        100,
        {"dense": 16},
        2.5,
    )
    instance.drain("idle", 20.0)
    instance.rest()
    status = instance.status(ENTRY, "cpu")
    assert (status.state, status.memory_bytes, status.dims, status.load_s) == ("available", 0, {}, 2.5)
    assert instance.held_bytes == 0 and instance.known_bytes == 100


def test_a_failure_is_told_until_a_load_succeeds_and_attempts_are_counted() -> None:
    instance = Instance([ENTRY])
    instance.begin(demanded=False)
    instance.fail(FAILURE, 100.0)
    assert instance.retry_at == 160.0
    instance.begin(demanded=False)
    status = instance.status(ENTRY, "cpu")
    assert (status.state, status.error_class, status.attempts) == ("loading", "OOM", 2)
    instance.succeed(FakeAdapter({}, 512), 1, 1.0, 0.0)
    assert instance.status(ENTRY, "cpu").error_class == ""


def test_memory_that_models_share_is_told_once() -> None:
    instance, other = loaded(), ENTRY.__class__("org/m:other", ENTRY.source)
    instance.entries = [ENTRY, other]
    assert instance.status(ENTRY, "cpu").memory_bytes == 100
    assert instance.status(other, "cpu").memory_bytes == 0
    assert instance.status(other, "cpu").state == "loaded"


def entry(**fields: Any) -> ModelEntry:
    """A model of the weighing family."""
    return ModelEntry("org/m", ENTRY.source, adapter=ENTRY.adapter, **fields)


@pytest.mark.parametrize(
    ("profile", "shares"),
    [
        (Profile(output_types=("dense",)), True),
        (Profile(runtime={"prefix": "hey"}), True),
        (Profile(runtime={"dims": 8}), False),
        (Profile(loadtime={"prefix": "hey"}), False),
        (Profile(precision="bfloat16"), False),
    ],
)
def test_profiles_share_weights_unless_they_differ_in_what_is_read_at_the_load(
    profile: Profile, shares: bool
) -> None:
    catalog = Catalog([entry(profiles={"other": profile})])
    assert len(model_states.groups(catalog)) == (1 if shares else 2)


def test_a_family_that_cannot_be_imported_shares_nothing_that_differs() -> None:
    strange = ModelEntry(
        "m", ENTRY.source, adapter="no.such:Family", profiles={"p": Profile(runtime={"a": 1})}
    )
    assert len(model_states.groups(Catalog([strange]))) == 2


def test_different_models_never_share() -> None:
    alias = ModelEntry("org/alias", ENTRY.source, adapter=ENTRY.adapter)
    assert len(model_states.groups(Catalog([ENTRY, alias]))) == 2


def test_a_load_tells_its_stage_and_the_seconds_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("workers.lifecycle.instance.time.monotonic", lambda: now[0])
    instance = Instance([ENTRY])

    def told() -> tuple[str, int]:
        status = instance.status(ENTRY, "cpu")
        return status.stage, status.left_s

    instance.load_s = 9.5
    assert told() == ("", 0), "no load"
    instance.begin(demanded=True)
    now[0] += 60
    assert told() == ("", 10), "the load waits for its turn"
    instance.began = now[0]
    instance.stage, instance.progress = "weights", 0.6
    assert told() == ("weights", 10)
    now[0] += 4
    assert told() == ("weights", 6)
    now[0] += 16
    assert told() == ("weights", 8), "20 s have passed, and two fifths are to be done"
    instance.progress = 1.0
    assert told() == ("weights", 1)
    instance.load_s = 0.0
    assert told() == ("weights", 0), "nothing is known"
    instance.succeed(FakeAdapter({}, 512), 8, 2.0, now[0])
    assert told() == ("", 0)
