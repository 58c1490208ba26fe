"""Which worker takes a request, and what is said when none can."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.engine.local import routing
from frontend.engine.streams.homes import STREAMS_APART, beginning_of, home
from ipc.catalog.model_config import InstanceGroup, ModelConfig
from ipc.errors import (
    DependencyConflict,
    ModelLoadFailed,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
    QueueFull,
    SequenceUnknown,
)
from ipc.wire.messages import Credits, EncodeCall, GenerateCall, ModelStatus, Step, Work
from tests.fakes.channel import FakeChannel

LOADED = ModelStatus("m", "loaded")


def channel(slot: int, *statuses: ModelStatus, **state: Any) -> Any:
    """A channel whose worker has these models; without any, it has `m` loaded."""
    return FakeChannel(slot, {status.name: status for status in statuses or (LOADED,)}, **state)


def work(lora: str = "") -> Work:
    """A request for `m`."""
    return Work("m", EncodeCall([], [], lora=lora), 2**62, 16, "req")


def test_the_least_outstanding_work_wins() -> None:
    channels = [channel(0, work_s=3.0), channel(1, work_s=1.0), channel(2, work_s=2.0)]
    assert routing.pick(channels, work()).slot == 1


def test_work_is_measured_in_time_and_not_in_tokens() -> None:
    fast = channel(0, cost=800, work_s=0.8)
    slow = channel(1, cost=100, work_s=10.0)
    assert routing.pick([slow, fast], work()) is fast


def test_a_worker_whose_step_runs_for_seconds_is_taken_only_when_the_others_have_more_to_do() -> None:
    stuck = channel(0, work_s=0.1, credits=Credits(1000, 0, 100.0, step_s=4))
    free = channel(1, work_s=3.0)
    assert routing.pick([stuck, free], work()) is free
    full = channel(1, work_s=2.0, foreign_s=4.0)
    assert routing.pick([stuck, full], work()) is stuck


def text(*messages: str, n: int = 1) -> Work:
    """A request for text; messages of the user and of the model take turns."""
    roles = ("user", "assistant")
    told = [{"role": roles[at % 2], "content": content} for at, content in enumerate(messages)]
    return Work("m", GenerateCall(messages=told, n=n), 2**62, 16, "req")


def streaming(slot: int, count: int, **state: Any) -> Any:
    """A channel with so many streams of text."""
    return channel(slot, streams=SimpleNamespace(texts=dict.fromkeys(range(count))), **state)


def test_text_goes_to_a_worker_with_few_streams_and_never_far_from_the_fewest() -> None:
    crowded, idle = streaming(0, STREAMS_APART + 1), streaming(1, 0)
    assert all(routing.pick([crowded, idle], text(str(n))) is idle for n in range(20))
    stuck = streaming(1, 0, credits=Credits(1000, 0, 100.0, step_s=1))
    assert all(routing.pick([crowded, stuck], text(str(n))) is crowded for n in range(20))


def test_turns_of_a_conversation_go_to_one_worker_and_conversations_to_all() -> None:
    channels = [streaming(0, 0), streaming(1, STREAMS_APART), streaming(2, 1)]
    chosen = set()
    for n in range(50):
        first = routing.pick(channels, text(f"question {n}"))
        assert routing.pick(channels, text(f"question {n}", "answer", "and then?")) is first
        chosen.add(first.slot)
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (GenerateCall(text="a" * 64 + "b"), GenerateCall(text="a" * 64 + "c"), True),
        (GenerateCall(text="a"), GenerateCall(text="b"), False),
        (GenerateCall(ids=[7] * 64 + [1]), GenerateCall(ids=[7] * 64 + [2]), True),
        (GenerateCall(ids=[1]), GenerateCall(ids=[2]), False),
        (GenerateCall(messages=[{"role": "system"}]), GenerateCall(messages=[{"role": "tool"}]), False),
    ],
)
def test_prompts_that_begin_alike_are_known_by_their_beginning(
    first: GenerateCall, second: GenerateCall, same: bool
) -> None:
    assert (beginning_of(first) == beginning_of(second)) is same


def test_a_worker_that_has_the_lora_goes_before_one_with_less_work_as_long_as_it_has_credit() -> None:
    having = ModelStatus("m", "loaded", loras={"legal": "loading"})
    idle, busy = channel(0), channel(1, having, work_s=9.0)
    assert routing.pick([idle, busy], work("legal")) is busy
    assert routing.pick([idle, busy], work("other")) is idle
    assert routing.pick([idle, busy], work()) is idle
    full = channel(1, having, credit=False)
    assert routing.pick([idle, full], work("legal")) is idle


def test_equal_workers_are_taken_in_the_order_of_their_slots() -> None:
    assert routing.pick([channel(2), channel(1), channel(3)], work()).slot == 1


@pytest.mark.parametrize(
    "unable",
    [
        {"responsive": False},
        {"statuses": [ModelStatus("m", "loading")]},
        {"statuses": [ModelStatus("m", "unloading")]},
        {"statuses": [ModelStatus("m", "failed")]},
        {"statuses": [ModelStatus("other", "loaded")]},
    ],
    ids=str,
)
def test_a_worker_that_is_silent_or_lacks_the_model_is_not_taken(unable: dict[str, Any]) -> None:
    statuses = unable.pop("statuses", [LOADED])
    channels = [channel(0, *statuses, **unable), channel(1, work_s=9.0)]
    assert routing.pick(channels, work()).slot == 1


def test_a_worker_without_credit_is_not_taken() -> None:
    assert routing.pick([channel(0, credit=False), channel(1, work_s=9.0)], work()).slot == 1


def test_the_worker_to_avoid_is_left_out_while_there_is_another() -> None:
    channels = [channel(0), channel(1, work_s=5.0)]
    assert routing.pick(channels, work(), avoid={0}).slot == 1
    assert routing.pick(channels, work(), avoid={0, 1}).slot == 0


def waiting(wait_s: float, bulk_wait_s: float = 0.0) -> Credits:
    """A worker with so many seconds of work before new queries, and before new bulk work."""
    return Credits(0.0, wait_s, 100.0, bulk_wait_s=bulk_wait_s)


@pytest.mark.parametrize(("lane", "seconds"), [("interactive", 3), ("bulk", 13)])
def test_no_credit_anywhere_is_a_full_queue_with_the_drain_time_of_the_emptiest(
    lane: str, seconds: int
) -> None:
    told = [waiting(10.0, 12.5), waiting(2.5, 17.0)]
    channels = [channel(slot, credit=False, credits=each) for slot, each in enumerate(told)]
    with pytest.raises(QueueFull) as caught:
        routing.pick(channels, msgspec.structs.replace(work(), lane=lane))
    assert caught.value.retry_after_s == seconds, "in whole seconds"


@pytest.mark.parametrize(
    ("waits_s", "seconds"), [([], 1), ([0.0], 1), ([1.01], 2), ([90.0, 1.0], 1), ([90.0, 5.0], 5)]
)
def test_retry_after_is_whole_seconds_and_at_least_one(waits_s: list[float], seconds: int) -> None:
    channels = [channel(slot, credits=waiting(each)) for slot, each in enumerate(waits_s)]
    assert routing.retry_after_s(channels, "interactive") == seconds


FAILED = ModelStatus(
    "m", "failed", error_class="NETWORK", error_message="no route", attempts=2, permanent=False
)

LASTING = ModelStatus("m", "failed", error_class="NOT_FOUND", attempts=1, permanent=True)


@pytest.mark.parametrize(
    ("channels", "kind"),
    [
        ([], NoReplica),
        ([channel(0, state="connecting", responsive=False)], NoReplica),
        ([channel(0, responsive=False)], NoReplica),
        ([channel(0, ModelStatus("m", "loading"))], ModelLoading),
        ([channel(0, ModelStatus("m", "unloading"))], ModelNotLoaded),
        ([channel(0, ModelStatus("m", "available"))], ModelLoading),
        ([channel(0, ModelStatus("other", "loaded"))], ModelNotLoaded),
        ([channel(0, FAILED)], ModelLoadFailed),
        ([channel(0, FAILED), channel(1, ModelStatus("m", "loading"))], ModelLoading),
        ([channel(0, FAILED), channel(1, ModelStatus("m", "available"))], ModelLoading),
        ([channel(0, LASTING), channel(1, ModelStatus("m", "available"))], ModelLoadFailed),
        ([channel(0, ModelStatus("m", "failed", error_class="DEPENDENCY"))], DependencyConflict),
    ],
)
def test_the_error_says_why_no_worker_can_run_the_model(
    channels: list[Any], kind: type[PenstockError]
) -> None:
    with pytest.raises(kind):
        routing.pick(channels, work())


def test_a_failed_load_carries_its_facts() -> None:
    error = routing.explain([channel(0, FAILED)], "m")
    assert error.message == "no route"
    assert error.detail == {"error_class": "NETWORK", "attempts": 2, "permanent": False}
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("load_s", "progress", "seconds"), [(40.0, 0.25, 30), (40.0, 0.99, 1), (0.0, 0.5, 5)]
)
def test_retry_after_of_a_load_is_what_it_is_still_expected_to_take(
    load_s: float, progress: float, seconds: int
) -> None:
    loading = ModelStatus("m", "loading", load_s=load_s, progress=progress)
    assert routing.explain([channel(0, loading)], "m").retry_after_s == seconds


@pytest.mark.parametrize(
    ("status", "told", "seconds"),
    [
        (
            ModelStatus("m", "loading", progress=0.6, load_s=20.0, stage="weights", left_s=7),
            "Model 'm' is loading: weights, 60% done, about 7 s left",
            7,
        ),
        (
            ModelStatus("m", "loading", progress=0.6, stage="weights"),
            "Model 'm' is loading: weights, 60% done",
            5,
        ),
        (
            ModelStatus("m", "loading", load_s=12.0, left_s=12),
            "Model 'm' is loading: the load waits for its turn, about 12 s left",
            12,
        ),
        (
            ModelStatus("m", "available", load_s=8.2),
            "Model 'm' is loading: the load is about to begin, about 9 s left",
            9,
        ),
        (ModelStatus("m", "available"), "Model 'm' is loading: the load is about to begin", 5),
    ],
)
def test_a_load_is_told_with_its_stage_and_what_is_known_of_its_end(
    status: ModelStatus, told: str, seconds: int
) -> None:
    error = routing.explain([channel(0, status)], "m")
    assert (error.message, error.retry_after_s) == (told, seconds)


def test_a_model_that_is_not_loaded_on_demand_is_not_said_to_be_loading() -> None:
    error = routing.explain([channel(0, ModelStatus("m", "available"))], "m", on_demand=False)
    assert isinstance(error, ModelNotLoaded)
    assert error.retry_after_s


def test_a_model_that_failed_on_one_worker_and_leaves_another_may_be_loaded_there_again() -> None:
    passing = msgspec.structs.replace(FAILED, permanent=False)
    error = routing.explain([channel(0, passing), channel(1, ModelStatus("m", "unloading"))], "m")
    assert isinstance(error, ModelNotLoaded) and error.retryable
    lasting = msgspec.structs.replace(FAILED, permanent=True)
    error = routing.explain([channel(0, lasting), channel(1, ModelStatus("m", "unloading"))], "m")
    assert isinstance(error, ModelLoadFailed)


def test_retry_after_of_a_model_that_was_loaded_before_is_what_its_last_load_took() -> None:
    known = ModelStatus("m", "available", load_s=12.3)
    assert routing.explain([channel(0, known)], "m").retry_after_s == 13


def homes(slots: Sequence[int], ids: range = range(200)) -> dict[int, int]:
    """The slot of each sequence."""
    return {name: home(slots, "m", name) for name in ids}


def test_sequences_are_spread_over_the_slots_in_whatever_order_these_are_named() -> None:
    found = homes(range(4))
    assert homes([2, 0, 3, 1]) == found
    assert all(list(found.values()).count(slot) > 20 for slot in range(4)), "they are not spread"


def test_only_the_sequences_of_a_slot_that_is_taken_away_move() -> None:
    before, after = homes(range(4)), homes(range(3))
    assert all(after[name] == slot for name, slot in before.items() if slot != 3)


def test_the_id_the_model_and_the_caller_decide_and_a_text_is_no_number() -> None:
    def of(model: str, kind: type[int] | type[str], caller: str = "") -> list[int]:
        return [home(range(8), model, kind(name), caller) for name in range(1, 50)]

    assert of("m", int) != of("n", int) and of("m", int) != of("m", str)
    assert of("m", int, "ann") == of("m", int, "ann") != of("m", int, "bob")
    assert of("m", int) == [homes(range(8))[name] for name in range(1, 50)]


def test_a_sequence_has_its_home_among_the_configured_workers_that_offer_the_model() -> None:
    config = ModelConfig("m", instance_groups=(InstanceGroup(kind="KIND_GPU", gpus=(1, 3)),))
    loaded = msgspec.structs.replace(LOADED, config=config)

    def slots(*channels: Any, workers: int = 4) -> set[int | None]:
        return {routing.sequence_slot(channels, "m", name, "", workers) for name in range(50)}

    assert slots(channel(1, loaded, uuid="GPU-1")) == {1, 3}, "whether the other is up makes no difference"
    assert slots(channel(1, loaded, uuid="GPU-1"), workers=1) == {0}
    assert slots(channel(1, loaded)) == {0, 1, 2, 3}, "without GPUs every worker offers it"
    assert slots(channel(0)) == {0, 1, 2, 3}
    assert slots() == slots(channel(0, state="connecting")) == {None}
    available, other = ModelStatus("m", "available"), ModelStatus("other", "loaded")
    up = channel(0, other, uuid="GPU-0"), channel(1, available, uuid="GPU-1"), channel(2, other, uuid="GPU-2")
    assert slots(*up) == {1, 3}, "nobody tells the configuration, but two do not offer the model"
    assert slots(*up, channel(3, loaded, uuid="GPU-3")) == {1, 3}, (
        "one that has not loaded the model tells none"
    )


def keeper(
    channels: list[Any],
    slot: int | None,
    start: bool = False,
    *,
    workers: int = 2,
    is_open: tuple[int, ...] = (),
) -> int:
    """The slot of the worker that gets a request of a sequence whose home is `slot`; workers live in `is_open`."""
    return routing.keeper(channels, work(), Step(7, start), slot, workers, lambda at: at in is_open).slot


def test_a_sequence_goes_to_its_own_worker_whatever_that_has_to_do_and_nowhere_else() -> None:
    assert keeper([channel(0), channel(1, work_s=9.0)], 1) == 1
    with pytest.raises(QueueFull):
        keeper([channel(0), channel(1, credit=False)], 1)
    for channels in ([channel(0)], [channel(0), channel(1, responsive=False)], []):
        for start in (False, True):
            with pytest.raises(NoReplica):
                keeper(channels, 1, start, is_open=(1,))


def test_a_worker_that_has_not_loaded_the_model_of_a_sequence_is_waited_for() -> None:
    with pytest.raises(ModelLoading):
        keeper([channel(0), channel(1, ModelStatus("m", "available"))], 1)


@pytest.mark.parametrize("state", ["absent", "connecting", "leaving"])
def test_what_goes_on_with_a_sequence_of_a_worker_that_has_gone_is_refused_and_a_start_waits(
    state: str,
) -> None:
    gone = channel(1, state=state, responsive=False)
    with pytest.raises(SequenceUnknown, match="for sequence 7 to model 'm' must specify the START flag"):
        keeper([channel(0), gone], 1)
    with pytest.raises(NoReplica):
        keeper([channel(0), gone], 1, start=True)
    is_left = (SequenceUnknown,) if state == "leaving" else (NoReplica,)
    with pytest.raises(is_left):
        keeper([channel(0), gone], 1, is_open=(0, 1))


def test_what_goes_on_with_a_sequence_while_all_workers_are_gone_is_refused_and_a_start_waits() -> None:
    """Nobody tells then which workers offer the model."""
    for channels in ([], [channel(0, state="absent", responsive=False)], [channel(0, state="leaving")]):
        with pytest.raises(SequenceUnknown, match="its worker has gone"):
            keeper(channels, None)
        with pytest.raises(NoReplica, match="no worker is up"):
            keeper(channels, None, start=True)
    with pytest.raises(NoReplica):
        keeper([], None, is_open=(1,))
    with pytest.raises(SequenceUnknown):
        keeper([channel(1, state="leaving")], None, is_open=(1,))
    with pytest.raises(ModelNotLoaded):
        keeper([channel(0, ModelStatus("other", "loaded"))], None)
