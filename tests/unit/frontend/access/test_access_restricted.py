"""The file of restricted endpoint groups: what it may say, who may read it, and what it lets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.access.gate import APIS, Restrictions
from ipc.errors import ConfigError, Forbidden

SECRET = "0123456789abcdef"
GOOD = f"- apis: [trace, logging]\n  header: X-Admin\n  value: {SECRET}\n"


def written(place: Path, text: str, mode: int = 0o600) -> str:
    path = place / "restricted.yaml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_only_what_is_named_needs_the_secret(tmp_path: Path) -> None:
    found = Restrictions.of(written(tmp_path, GOOD))
    for api in APIS:
        restricted = api in ("trace", "logging")
        for given, enters in (
            ({}, not restricted),
            ({"X-Admin": SECRET}, True),
            ({"X-Admin": "é"}, not restricted),
        ):
            if enters:
                found.require_secret(api, given.get)  # type: ignore[arg-type]
            else:
                with pytest.raises(Forbidden, match=f"'{api}' needs the header X-Admin"):
                    found.require_secret(api, given.get)  # type: ignore[arg-type]


def test_without_a_file_nothing_is_restricted() -> None:
    Restrictions.of("").require_secret("trace", {}.get)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + GOOD, "'trace' is restricted twice"),
        (GOOD.replace("trace", "everything"), "Invalid enum value"),
        (GOOD.replace("X-Admin", "X Admin"), "header"),
        (GOOD.replace(SECRET, "short"), "value"),
        (GOOD.replace("apis: [trace, logging]", "apis: []"), "apis"),
        (GOOD + "  more: 1\n", "more"),
        ("{", "neither YAML nor JSON"),
        ("", "restricted_file"),
    ],
)
def test_mistakes_are_named_without_the_secret(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        Restrictions.of(written(tmp_path, text))
    assert SECRET not in refusal.value.message


def test_a_file_that_all_users_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lets all users in"):
        Restrictions.of(written(tmp_path, GOOD, 0o644))
