"""Configurations as messages of TRTIS v1 are kept for models that are asked for again, and not for ever."""

from __future__ import annotations

import pytest

from frontend.protocols.trtis_v1 import management as server_status
from ipc.catalog.model_config import ModelConfig


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages may be kept."""
    monkeypatch.setattr(server_status, "MOST_CONFIGS", 3)
    monkeypatch.setattr(server_status, "_CONFIGS", {})


def test_a_message_is_made_once_for_a_configuration() -> None:
    config, changed = ModelConfig("m"), ModelConfig("m", max_batch_size=4)
    first = server_status._rendered(config, "m")
    assert server_status._rendered(config, "m") is first
    assert server_status._rendered(changed, "m").max_batch_size == 4


def test_names_that_are_gone_make_room() -> None:
    for number in range(10):
        assert server_status._rendered(ModelConfig(f"m{number}"), f"m{number}").name == f"m{number}"
    assert list(server_status._CONFIGS) == ["m7", "m8", "m9"]
    server_status._rendered(ModelConfig("m8"), "m8")
    assert list(server_status._CONFIGS) == ["m7", "m9", "m8"]
