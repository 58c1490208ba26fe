"""How much of a request is prepared at once, and what is in the endpoint's thread: by all that is tokenized."""

from __future__ import annotations

import pytest

from ipc.wire.messages import (
    Call,
    EncodeCall,
    ExtractCall,
    GenerateCall,
    Grammar,
    InputItem,
    ScoreCall,
    ToolUse,
)
from workers.scheduling.preparing import (
    CHUNK_CHARACTERS,
    CHUNK_ITEMS,
    LONE_CHARACTERS,
    chunk_end,
    is_long,
    is_short,
)

TEXT = InputItem("river")
QUARTER = InputItem("a" * (CHUNK_CHARACTERS // 4))
HUGE = InputItem("a" * (CHUNK_CHARACTERS + 1))
MUCH = "a" * LONE_CHARACTERS


DEEP: dict[str, object] = {"a": MUCH}
for _ in range(5000):
    DEEP = {"a": [DEEP]}


def ends(call: Call) -> list[int]:
    """Where the chunks of a call end."""
    found = [0]
    while found[-1] < len(call.items):
        found.append(chunk_end(call, found[-1]))
    return found[1:]


def test_a_chunk_ends_at_its_characters() -> None:
    assert ends(EncodeCall([QUARTER] * 6, [])) == [4, 6]
    assert ends(EncodeCall([HUGE, HUGE, TEXT, TEXT], [])) == [1, 2, 4]
    assert ends(EncodeCall([TEXT, TEXT, HUGE, TEXT], [])) == [2, 3, 4]
    ids = InputItem(ids=[1] * (CHUNK_CHARACTERS // 8))
    assert ends(EncodeCall([ids] * 3, [])) == [2, 3]


def test_what_comes_with_every_item_counts_for_each() -> None:
    assert ends(ExtractCall([TEXT] * 40)) == [CHUNK_ITEMS, 40]
    labels = ["a" * 500] * 60
    assert ends(ExtractCall([TEXT] * 5, labels)) == [2, 4, 5]
    assert ends(EncodeCall([TEXT] * 3, [], "a" * (CHUNK_CHARACTERS // 2))) == [1, 2, 3]


def test_long_is_what_is_over_a_chunk_alone() -> None:
    assert not is_long(EncodeCall([QUARTER] * 6, []), 0)
    call = EncodeCall([TEXT, HUGE, TEXT], [])
    assert [is_long(call, start) for start in range(3)] == [False, True, False]
    assert is_long(ScoreCall([TEXT], HUGE), 0) and not is_long(ScoreCall([TEXT], QUARTER), 0)
    assert is_long(ExtractCall([TEXT], ["a" * 499] * 1000), 0)
    assert not is_long(EncodeCall([TEXT], [], options=DEEP), 0)
    assert is_long(GenerateCall(text="a" * (1 << 17)), 0) and not is_long(GenerateCall(text="a"), 0)
    assert is_long(GenerateCall(ids=[1] * (1 << 15)), 0)


@pytest.mark.parametrize(
    ("tools", "compiles"),
    [
        (ToolUse([]), False),
        (ToolUse([], choice="required"), True),
        (ToolUse([], choice="named", name="f"), True),
        (ToolUse([], strict=["f"]), True),
        (ToolUse([], allowed=["f"]), True),
    ],
)
def test_what_compiles_a_grammar_is_left_to_the_threads_of_long_work(tools: ToolUse, compiles: bool) -> None:
    call = GenerateCall(text="a", tools=tools)
    assert is_long(call, 0) == compiles == (not is_short(call))
    assert is_long(GenerateCall(text="a", grammar=Grammar("regex", "a")), 0)


def test_pictures_of_a_conversation_are_left_to_the_threads_of_long_work() -> None:
    message = {"role": "user", "content": [{"type": "image"}]}
    seeing, blind = GenerateCall([message], images=[b"a"]), GenerateCall([message])
    assert [is_long(call, 0) for call in (seeing, blind)] == [True, False]
    assert [is_short(call) for call in (seeing, blind)] == [False, True]


@pytest.mark.parametrize(
    ("call", "short"),
    [
        (EncodeCall([TEXT], []), True),
        (EncodeCall([InputItem(MUCH)], []), True),
        (EncodeCall([InputItem(MUCH + "a")], []), False),
        (EncodeCall([TEXT], [], MUCH), False),
        (EncodeCall([TEXT], [], options={"text_template": MUCH}), False),
        (EncodeCall([TEXT], [], options={"a": {"b": ["c", MUCH]}}), False),
        (EncodeCall([TEXT], [], options=DEEP), False),
        (EncodeCall([TEXT], [], options={"threshold": 0.5, "flat": True, "none": None}), True),
        (EncodeCall([InputItem(images=[b"a"])], []), False),
        (ScoreCall([TEXT], TEXT), True),
        (ScoreCall([TEXT] * 10, InputItem("a" * 500)), False),
        (ExtractCall([TEXT], ["person", "city"]), True),
        (ExtractCall([TEXT], ["a" * 499] * 10), False),
        (ExtractCall([TEXT], output_schema={"properties": {"a" * 200: {}}}), True),
        (ExtractCall([TEXT], output_schema={"properties": {MUCH: {}}}), False),
    ],
)
def test_only_what_is_short_in_all_its_parts_is_prepared_at_once(call: Call, short: bool) -> None:
    assert is_short(call) == short
