"""Inputs of /v1/embeddings: a text, texts, token ids, or lists of token ids, each within its own limit."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.protocols.sie.inputs import check_inputs, inputs_of
from ipc.catalog.entries import HubSource, ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits

LIMITS = Limits(max_items=3, max_text_bytes=40)


def test_the_items_limit_does_not_count_the_ids_of_one_input() -> None:
    given = list(range(10))
    check_inputs(given, "input", LIMITS)
    inputs = inputs_of(given, "input", ModelEntry("m", HubSource("m")))
    assert [entry.ids for entry in inputs] == [list(range(10))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "input: may not be empty"),
        ([[]], r"input\[0\]: may not be empty"),
        (list(range(11)), "input: 11 token ids, the limit is 10"),
        (["a"] * 4, "input: 4 given, the limit is 3"),
        ([[1]] * 4, "input: 4 given, the limit is 3"),
        (["a", 1], "got a mix"),
    ],
)
def test_what_is_refused_names_its_limit(given: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_inputs(given, "input", LIMITS)


def test_a_model_that_takes_no_texts_is_refused_as_encode_does() -> None:
    images = ModelEntry("org/clip", HubSource("org/clip"), inputs=("image",))
    both = ModelEntry("org/clip", HubSource("org/clip"), inputs=("text", "image"))
    for given in ("a", ["a"], [1], [[1]]):
        with pytest.raises(InvalidInput, match=r"input.*org/clip.*takes no text, only image"):
            inputs_of(given, "input", images)
        assert len(inputs_of(given, "input", both)) == 1
