"""What a bridge makes of clocks of brokers, and of other hosts with the name of its box. Clocks are moved by hand."""

from __future__ import annotations

import pytest

from frontend.bridge.bridge import CLOCK_TURN_NS, MOST_AGE_S, Ages, Namesakes
from ipc.wire.cluster import VERSION, BoxBeat

SECOND_NS = 10**9
NOW_NS = 10**18


def delivery(stored_ns: int, *, long: bool = False) -> str:
    """The subject of a delivery that the broker had at an instant of its own clock."""
    if long:
        return f"$JS.ACK.domain.hash.WORK.consumer.1.2.3.{stored_ns}.0.token"
    return f"$JS.ACK.WORK.consumer.1.2.3.{stored_ns}.0"


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("ahead_s", [0, 300, -300])
def test_the_age_of_a_delivery_is_that_of_the_brokers_clock_however_clocks_differ(
    ahead_s: int, long: bool
) -> None:
    ages, ahead_ns = Ages(), ahead_s * SECOND_NS
    for waited_s, expected in ((0, 0.0), (2, 2.0), (0, 0.0), (1000, MOST_AGE_S)):
        ack = delivery(NOW_NS + ahead_ns - waited_s * SECOND_NS, long=long)
        assert ages.of(ack, NOW_NS) == expected


def test_clocks_that_drift_are_measured_anew_and_a_new_broker_is_another_clock() -> None:
    ages, now_ns, ahead_ns = Ages(), NOW_NS, 0
    for _ in range(6):
        # The broker falls behind by ten seconds in each turn, which must not look like ten seconds of waiting for ever.
        now_ns, ahead_ns = now_ns + CLOCK_TURN_NS, ahead_ns - 10 * SECOND_NS
        ages.of(delivery(now_ns + ahead_ns), now_ns)
    assert ages.of(delivery(now_ns + ahead_ns), now_ns) <= MOST_AGE_S
    now_ns += CLOCK_TURN_NS
    ages.of(delivery(now_ns + ahead_ns), now_ns)
    now_ns += CLOCK_TURN_NS
    assert ages.of(delivery(now_ns + ahead_ns), now_ns) == 0.0
    assert ages.of(delivery(now_ns - 300 * SECOND_NS), now_ns) == MOST_AGE_S
    ages.forget()
    assert ages.of(delivery(now_ns - 300 * SECOND_NS), now_ns) == 0.0


def test_a_subject_without_an_instant_has_no_age() -> None:
    ages = Ages()
    for ack in ("", "$JS.ACK.a.b.c.d.e.f.g", "$JS.ACK", "x" * 500):
        assert ages.of(ack, NOW_NS) == 0.0


def test_an_instant_of_a_thousand_digits_is_none_and_spoils_no_other_age() -> None:
    ages = Ages()
    assert ages.of(delivery(int("9" * 1000)), NOW_NS) == 0.0
    assert ages.of(delivery(NOW_NS), NOW_NS) == 0.0
    assert ages.of(delivery(NOW_NS - 2 * SECOND_NS), NOW_NS) == 2.0


def beat(life: str, number: int, *, box: str = "a", draining: bool = False) -> BoxBeat:
    return BoxBeat(VERSION, box, life, "default", number, draining, 1.0, 0.0)


def test_a_second_host_with_the_name_of_a_box_is_refused_before_its_first_sign_of_life() -> None:
    second = Namesakes("a", "second")
    second.heard(beat("first", 40), 0)
    assert not second.refusal
    second.heard(beat("first", 41), 0)
    assert "'a'" in second.refusal and "life first" in second.refusal


@pytest.mark.parametrize(
    "heard",
    [
        [("first", 40, {})] * 3,
        [("first", 40, {"draining": True}), ("first", 41, {"draining": True})],
        [("second", 1, {}), ("second", 2, {})],
        [("first", 1, {"box": "b"}), ("first", 2, {"box": "b"})],
    ],
    ids=["a life that has just died", "a life that leaves", "its own", "another box"],
)
def test_nobody_else_is_no_reason_to_refuse(heard: list[tuple[str, int, dict[str, object]]]) -> None:
    second = Namesakes("a", "second")
    for life, number, more in heard:
        second.heard(beat(life, number, **more), 0)  # type: ignore[arg-type]
    assert not second.refusal


def test_of_two_lives_that_could_not_hear_each_other_the_younger_one_leaves() -> None:
    old, young = Namesakes("a", "old"), Namesakes("a", "young")
    old.is_alone = young.is_alone = True
    for number in (10, 11):
        old.heard(beat("young", number), 500 + number)
        young.heard(beat("old", 500 + number), number)
    assert young.refusal and not old.refusal
