"""The cases that the default suite runs of a test marked `sample`."""

from __future__ import annotations

import itertools

from tests.harness.sampling import choice


def test_each_value_of_each_parameter_is_in_a_case_and_not_each_combination() -> None:
    values = [{("a", one), ("b", other)} for one, other in itertools.product(range(6), range(7))]
    names = [f"test[{number}]" for number in range(len(values))]
    kept = choice(names, values)
    assert set().union(*(values[at] for at in kept)) == set().union(*values)
    assert len(kept) == 7
    assert choice(names, values) == kept


def test_so_many_cases_as_are_asked_for_with_new_values_first() -> None:
    values = [{("a", number // 5)} for number in range(10)]
    names = [f"test[{number}]" for number in range(10)]
    assert {number // 5 for number in choice(names, values, 2)} == {0, 1}
    assert len(choice(names, values, 7)) == 7 and choice(names, values, 7) > choice(names, values, 2)
    assert len(choice(names, values, 1)) == 1
    assert choice(names, values, 100) == set(range(10))


def test_a_test_without_parameters_stays() -> None:
    assert choice(["test"], [set()]) == {0}
