"""Texts that are too long: cut right, cut left, or split, with the special tokens around every window."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny.models import build
from workers.adapters.shared.long_texts import Frame, Tokens, fit
from workers.adapters.shared.tokenizing import TextTokenizer

FRAME = Frame(1, 1)
CLS, SEP = 101, 102
WHOLE = [Tokens([CLS, 1, 2, 3, 4, SEP], None), Tokens([CLS, 5, 6, 7, SEP], None)]


@pytest.mark.parametrize(
    ("overflow", "length", "expected", "truncated"),
    [
        ("truncate", 5, [[CLS, 1, 2, 3, SEP]], True),
        ("error", 5, [[CLS, 1, 2, 3, SEP]], True),
        ("truncate_left", 5, [[CLS, 5, 6, 7, SEP]], True),
        ("chunk", 5, [[CLS, 1, 2, 3, SEP], [CLS, 4, 5, 6, SEP], [CLS, 7, SEP]], False),
        ("chunk", 9, [[CLS, 1, 2, 3, 4, 5, 6, 7, SEP]], False),
        ("truncate", 100, [[CLS, 1, 2, 3, 4, 5, 6, 7, SEP]], False),
        ("truncate", 2, [[CLS, 1, SEP]], True),
    ],
)
def test_a_long_text_is_fitted_by_its_policy(
    overflow: str, length: int, expected: list[list[int]], truncated: bool
) -> None:
    found = fit(WHOLE, overflow, length, FRAME)
    assert [part.ids for part in found.windows] == expected
    assert found.truncated is truncated


@pytest.mark.parametrize("overflow", ["truncate", "truncate_left", "chunk", "error"])
def test_a_text_that_fits_stays_as_it_is(overflow: str) -> None:
    part = Tokens([CLS, 1, SEP], [0, 1, 1])
    assert fit([part], overflow, 3, FRAME) == ([part], False, 3)


def test_what_was_cut_is_counted_with_its_frame() -> None:
    parts = [Tokens([CLS, 1, 2, SEP], None), Tokens([CLS, 3, SEP], None)]
    assert fit(parts, "error", 4, FRAME) == ([Tokens([CLS, 1, 2, SEP], None)], True, 5)


def test_segment_ids_are_cut_with_their_tokens() -> None:
    found = fit([Tokens([CLS, 1, 2, 3, SEP], [0, 1, 1, 2, 2])], "chunk", 4, FRAME)
    assert [part.types for part in found.windows] == [[0, 1, 1, 2], [0, 2, 2]]


@pytest.mark.parametrize(
    ("name", "frame"), [("dense_mean", (1, 1)), ("dense_last", (0, 1)), ("dense_xlmr", (1, 1))]
)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_windows_of_a_tokenizer_hold_every_token_of_the_text_once(
    tmp_path: Path, name: str, frame: tuple[int, int], fast: bool
) -> None:
    tokenizer = TextTokenizer.read(build(name, tmp_path / name))
    text = "the river in Paris, window and kitchen. " * 20
    whole = tokenizer.encode([text])[0].ids
    tokenizer.limit(16)
    if not fast:
        tokenizer._backend = None
    before, after = tokenizer.frame
    assert (before, after) == frame
    inner = whole[before : len(whole) - after]
    short, found = tokenizer.windows(["river", text], "chunk")
    assert len(short.windows) == 1 and not found.truncated
    assert [token for part in found.windows for token in part.ids[before : len(part.ids) - after]] == inner
    assert {len(part.ids) for part in found.windows[:-1]} == {16}
    [left] = tokenizer.windows([text], "truncate_left")
    tail = whole[len(whole) - after :]
    assert left.truncated
    assert left.windows[0].ids == whole[:before] + inner[len(inner) - 16 + before + after :] + tail
    [shorter] = tokenizer.windows([text], "truncate", 8)
    assert shorter.windows[0].ids == [*whole[: 8 - after], *tail]
