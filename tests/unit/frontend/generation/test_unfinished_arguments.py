"""Arguments that break off, as the object of the members that are whole."""

from __future__ import annotations

import json

import pytest

from frontend.engine.events import Called
from frontend.generation.outcome import object_of

_WHOLE = '{"city":"Os\\"lo","days":[1,{"a":"b","c":[]},true],"é":{},"n":-12.5}'


def _object(arguments: str, *, is_whole: bool = False) -> str:
    return object_of(Called(0, 0, "call-1", "f", arguments, is_whole=is_whole))


def test_each_beginning_of_an_object_is_an_object() -> None:
    before = 0
    for end in range(len(_WHOLE) + 1):
        members = json.loads(_object(_WHOLE[:end]))
        assert isinstance(members, dict) and len(members) >= before
        before = len(members)
    assert json.loads(_object(_WHOLE)) == json.loads(_WHOLE)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "{}"),
        ("{", "{}"),
        ('{"a', "{}"),
        ('{"a"', "{}"),
        ('{"a":', "{}"),
        ('{"a":"x', "{}"),
        ('{"a":"x"', '{"a":"x"}'),
        ('{"a":"x","b":[1,{"c":"d', '{"a":"x","b":[1,{}]}'),
        ('{"a":123456789012345678901234567890,"b', '{"a":123456789012345678901234567890}'),
    ],
)
def test_only_members_that_are_whole_are_told(arguments: str, told: str) -> None:
    assert _object(arguments) == told


def test_whole_arguments_stay_as_they_are() -> None:
    assert _object('{"a":1,"a":2}', is_whole=True) == '{"a":1,"a":2}'
