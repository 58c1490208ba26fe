"""Which LoRA adapter a request gets: its own under either name, else the profile's."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.engine.planning import resolve
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, Profile
from ipc.errors import InvalidInput
from ipc.settings import Limits

ENTRY = ModelEntry(
    "org/m",
    DirectorySource("/weights"),
    profiles={"new": Profile(runtime={"lora": "a"}), "old": Profile(runtime={"lora_id": "b"})},
)
CATALOG = Catalog([ENTRY])


def lora(options: dict[str, Any] | None, model: str = "org/m") -> str:
    """What these options resolve to."""
    return resolve(CATALOG[model], options, None, CATALOG, 1, Limits()).lora


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, ""),
        ({"lora": None}, ""),
        ({"lora": "x"}, "x"),
        ({"lora_id": "x"}, "x"),
        ({"lora": "x", "lora_id": "y"}, "x"),
        ({"profile": "new"}, "a"),
        ({"profile": "old"}, "b"),
        ({"profile": "new", "lora_id": "x"}, "x"),
        ({"profile": "old", "lora": "x"}, "x"),
        ({"profile": "new", "lora": ""}, ""),
        ({"profile": "new", "lora": None}, "a"),
    ],
)
def test_the_request_goes_before_the_profile(options: dict[str, Any] | None, expected: str) -> None:
    assert lora(options) == expected


def test_a_variant_has_the_adapter_of_its_profile() -> None:
    assert (lora(None, "org/m:new"), lora({"lora": ""}, "org/m:new")) == ("a", "")


@pytest.mark.parametrize("name", ["lora", "lora_id"])
def test_a_name_that_is_no_text_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"params\.options\.{name}"):
        lora({name: 5})
