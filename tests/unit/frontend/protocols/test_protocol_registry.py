"""Which protocol answers a path, and so gives its errors their form."""

from __future__ import annotations

import pytest

from frontend.protocols.registry import MOST_KEPT_CHARACTERS, MOST_KEPT_PATHS, protocols


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/encode/m", "sie"),
        ("/v1", "sie"),
        ("/v1/configs", "sie"),
        ("/v1/configs/models", "sie"),
        ("/v1/configuration", "sie"),
        ("/v1/config", "kserve"),
        ("/v1/config/", "kserve"),
        ("/v1/config/reload", "kserve"),
        ("/v2", "kserve"),
        ("/v2/models/m/infer", "kserve"),
        ("/v2beta/models", "sie"),
        ("/v22", "sie"),
        ("/api/status", "trtis_v1"),
        ("/api/infer/m", "trtis_v1"),
        ("/api", "ollama"),
        ("/api/chat", "ollama"),
        ("/api/nothing", "ollama"),
        ("/api/healthy", "ollama"),
        ("/apiary", "sie"),
        ("/", "sie"),
        ("", "sie"),
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "chat"),
        ("/v1/models/unload", "chat"),
        ("/v1/models/unloaded", "sie"),
        ("/v1/models", "sie"),
        ("/re_isq", "chat"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/messages/batches", "messages"),
        ("/v1/messagesx", "sie"),
        ("/nothing/v2/models", "sie"),
    ],
)
def test_a_prefix_is_of_whole_segments(path: str, name: str) -> None:
    assert protocols().of(path).name == name


def test_facts_of_a_path_are_kept_within_bounds() -> None:
    known = protocols()
    first, long = known.at("/v1/encode/m"), "/v1/encode/" + "x" * MOST_KEPT_CHARACTERS
    assert first[1:] == ("encode", "m", "infer", True, True) and first.protocol.name == "sie"
    assert known.at("/v1/encode/m") is first
    assert known.at(long) == known.at(long) and known.at(long) is not known.at(long)
    for number in range(MOST_KEPT_PATHS):
        known.at(f"/v1/encode/{number}")
    assert known.at("/v1/encode/m") is not first and known.at("/v1/encode/m") == first
