"""Which server's form a path has that several servers know."""

from __future__ import annotations

import pytest

from frontend.protocols.shared_routes import OWNERS, chosen
from ipc.errors import ConfigError


def test_a_server_is_chosen_for_all_of_its_paths_or_for_one() -> None:
    assert chosen(()) == {}
    assert chosen(["tei"]) == {"/rerank": "tei", "/tokenize": "tei"}
    assert chosen(["vllm:/classify"]) == {"/classify": "vllm"}
    assert chosen(["tei", "vllm:/classify"])["/classify"] == "vllm"
    assert chosen(["vllm", "vllm"]) == {path: "vllm" for path, owners in OWNERS.items() if "vllm" in owners}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["tei", "vllm"], r"'tei' and 'vllm' both choose the form of /rerank.*vllm:/rerank"),
        (
            ["vllm:/classify", "infinity"],
            r"'vllm:/classify' and 'infinity' both choose the form of /classify",
        ),
        (["tei:/rerank", "tei"], "'tei:/rerank' and 'tei' both"),
        (["tei:/embed"], r"'tei:/embed': tei shares /rerank, /tokenize"),
    ],
)
def test_two_choices_for_a_path_are_refused(entries: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(entries)
