"""Names at the brokers: any name of a model gives one token, and nothing of a name reaches other subjects."""

from __future__ import annotations

import pytest

from ipc.errors import InvalidInput
from ipc.wire.cluster_names import MOST_TOKEN, Names, inbox, is_id, results, row_key, token_of


@pytest.mark.parametrize(
    ("model", "token"),
    [
        ("BAAI/bge-m3", "BAAI__bge-m3"),
        ("org/model.v1.5", "org__model_dot_v1_dot_5"),
        ("a b*c>d", "a_b_c_d"),
        ("a__b", "a__b"),
        ("org/model:profile", "org__model:profile"),
    ],
)
def test_a_model_has_the_token_that_sie_gives_it(model: str, token: str) -> None:
    assert token_of(model) == token
    assert Names().work(model, "default") == f"sie.work.{token}.default"


@pytest.mark.parametrize("model", ["", "a\nb", "a\0", "\x7f", "a\r\nPUB x 0", "a\u2028b"])
def test_control_characters_never_reach_a_subject(model: str) -> None:
    with pytest.raises(InvalidInput, match="model"):
        token_of(model)


def test_a_long_name_is_cut_and_still_told_from_others() -> None:
    first, second = token_of("m" * 500 + "a"), token_of("m" * 500 + "b")
    assert len(first) == len(second) == MOST_TOKEN and first != second


def test_a_cluster_with_a_name_has_nothing_in_common_with_others() -> None:
    for one, other in ((Names(), Names("blue")), (Names("blue"), Names("green"))):
        assert one.works("p") != other.works("p") and one.stream("p") != other.stream("p")
        assert one.models != other.models and one.box_beat("*") != other.box_beat("*")
    assert Names("blue").work("m", "p") == "blue.sie.work.m.p"


def test_keys_of_rows_are_keys_whatever_the_name() -> None:
    assert row_key("a", "") == "a"
    assert row_key("a", "org/m x>*") != row_key("a", "org/m_x__") and row_key("a", "x").count(".") == 1
    assert (
        is_id("box-1")
        and not is_id("a.b")
        and inbox("r") == "_INBOX.r.>"
        and results("r").startswith("_INBOX.r.")
    )
