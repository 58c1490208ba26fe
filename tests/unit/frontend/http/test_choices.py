"""Messages about words that a field does not take: the word, the field, and the words that it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from frontend.http.fields import mismatch_of

Kind = Annotated[Literal["float", "int8"] | None, msgspec.Meta(description="A type.")]


class Entry(msgspec.Struct):
    """An entry with a word."""

    form: Literal["a"] | int = "a"


class Body(msgspec.Struct):
    """A body with words at several depths."""

    kind: Kind = None
    kinds: list[Kind] | str | None = None
    entries: dict[str, list[Entry]] = {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kind": "int4"}, "Invalid enum value 'int4', expected 'float' or 'int8' - at `$.kind`"),
        ({"kinds": ["float", ""]}, "Invalid enum value '', expected 'float' or 'int8' - at `$.kinds[1]`"),
        (
            {"entries": {"x": [{"form": "b"}]}},
            "Invalid enum value 'b', expected 'a' - at `$.entries[...][0].form`",
        ),
        ({"kind": 5}, "Expected `str | null`, got `int` - at `$.kind`"),
        (5, "Expected `object`, got `int`"),
    ],
)
def test_the_words_of_the_field_are_told(body: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Body)
    assert mismatch_of(caught.value, Body) == said


def test_a_long_word_is_cut_and_the_field_still_found() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"kind": " - at `$.x" * 10_000}, Body)
    found = mismatch_of(caught.value, Body)
    assert found.endswith("..., expected 'float' or 'int8' - at `$.kind`") and len(found) < 300
