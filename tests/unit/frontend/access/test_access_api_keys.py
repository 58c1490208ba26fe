"""Keys and the file of their hashes: what is kept, and that every mistake is named without showing a key."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.access import api_keys
from ipc.errors import ConfigError

HASH = "sha256:" + "0" * 16 + ":" + "a" * 64
OTHER = "sha256:" + "1" * 16 + ":" + "a" * 64


def written(tmp_path: Path, content: Any, mode: int = 0o640) -> Path:
    """A keys file."""
    path = tmp_path / "keys.yaml"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    path.chmod(mode)
    return path


def test_a_key_has_256_random_bits_and_its_hash_is_the_plain_sha256_of_it() -> None:
    made = {api_keys.fresh() for _ in range(100)}
    assert len(made) == 100
    key = made.pop()
    assert len(key.split("_", 2)[2]) == 43, "256 bits in base64"
    assert api_keys.hashed(key) == f"sha256:{api_keys.id_of(key)}:{hashlib.sha256(key.encode()).hexdigest()}"
    assert key.split("_", 2)[2] not in api_keys.hashed(key)


@pytest.mark.parametrize(
    "text", ["", "pk_", "pk_0_x", "PK_" + "0" * 16 + "_" + "a" * 43, "pk_" + "0" * 16 + "_" + "a" * 42]
)
def test_what_has_not_the_form_of_a_key_has_no_id(text: str) -> None:
    assert api_keys.id_of(text) is None
    assert api_keys.id_of(text + "\n") is None


def test_defaults_are_one_scope_no_limit_and_an_equal_share(tmp_path: Path) -> None:
    (entry,) = api_keys.read(written(tmp_path, [{"name": "web", "hash": HASH}]))
    assert (entry.scopes, entry.requests_per_s, entry.share, entry.id) == (("infer",), 0.0, 1.0, "0" * 16)


@pytest.mark.parametrize(
    ("rate", "burst", "expected"), [(0.2, 0, 1), (2.5, 0, 3), (10, 0, 10), (10, 1, 1), (1, 50, 50)]
)
def test_the_burst_is_what_one_second_gives_unless_it_is_set(rate: float, burst: int, expected: int) -> None:
    assert api_keys.KeyEntry("a", HASH, requests_per_s=rate, burst=burst).allowed_burst == expected


def test_yaml_is_read_as_well_as_json(tmp_path: Path) -> None:
    text = f"# callers\n- name: web\n  hash: {HASH}\n  scopes: [infer, admin]\n  share: 3\n"
    (entry,) = api_keys.read(written(tmp_path, text.encode()))
    assert entry.scopes == ("infer", "admin") and entry.share == 3


GOOD = {"name": "web", "hash": HASH}
MISTAKES: list[tuple[Any, str]] = [
    ([], "at least one key; to switch authentication off, leave server.keys_file empty"),
    ({}, "expected a list"),
    (b"", "expected a list"),
    (b"[", "neither YAML nor JSON"),
    (b"\xff\xfe\x00", "neither YAML nor JSON"),
    (["web"], "entry 1: Expected `object`"),
    ([GOOD, {"hash": HASH}], "entry 2: Object missing required field `name`"),
    ([{"name": "web"}], "entry 1 (web): Object missing required field `hash`"),
    ([{**GOOD, "scops": []}], "entry 1 (web): Object contains unknown field `scops`"),
    ([{**GOOD, "scopes": ["root"]}], "entry 1 (web), field scopes[0]: Invalid enum value 'root'"),
    ([{**GOOD, "scopes": []}], "entry 1 (web), field scopes: Expected `array` of length >= 1"),
    ([{**GOOD, "share": 0}], "entry 1 (web), field share: Expected `float` >= 0.001"),
    ([{**GOOD, "requests_per_s": -1}], "field requests_per_s: Expected `float` >= 0.0"),
    (
        f"- name: web\n  hash: {HASH}\n  requests_per_s: 1.0e-300".encode(),
        "requests_per_s: 1e-300 gives a burst of 1 back in more than 1e+09 s",
    ),
    (
        [{**GOOD, "requests_per_s": 1e-4, "burst": 1_000_000}],
        "requests_per_s: 0.0001 gives a burst of 1000000 back",
    ),
    (f"- name: web\n  hash: {HASH}\n  requests_per_s: .nan".encode(), "field requests_per_s"),
    (f"- name: web\n  hash: {HASH}\n  share: .inf".encode(), "field share"),
    ([{**GOOD, "burst": 1.5}], "field burst: Expected `int`"),
    ([{**GOOD, "name": "a b"}], "entry 1 (a b), field name: expected 1 to 64 letters, digits"),
    ([{**GOOD, "name": "web\n"}], "field name"),
    ([{**GOOD, "hash": "sha256:0:0"}], "field hash: expected a hash as `penstock keys new` prints"),
    ([{**GOOD, "hash": HASH + "\n"}], "field hash"),
    ([GOOD, {**GOOD, "hash": OTHER}], "entry 2 (web), field name: as in entry 1"),
    ([GOOD, {**GOOD, "name": "other"}], "entry 2 (other), field hash: as in entry 1"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_a_mistake_names_file_entry_and_field(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        api_keys.read(path)
    assert caught.value.message.startswith(f"server.keys_file {path}: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "web", "hash": "KEY"},
        {"name": "KEY", "hash": HASH},
        {"name": "web", "hash": HASH, "KEY": 1},
        {"name": "web", "hash": HASH, "scopes": ["KEY"]},
    ],
)
def test_a_key_that_got_into_the_file_by_mistake_is_not_shown(tmp_path: Path, fields: dict[str, Any]) -> None:
    key = api_keys.fresh()
    content = msgspec.json.encode([fields]).decode().replace("KEY", key).encode()
    for broken in (content, content[:-1]):
        with pytest.raises(ConfigError) as caught:
            api_keys.read(written(tmp_path, broken))
        assert key.split("_", 2)[2] not in caught.value.message


def test_the_slowest_rate_that_gives_its_burst_back_is_taken(tmp_path: Path) -> None:
    [entry] = api_keys.read(written(tmp_path, [{**GOOD, "requests_per_s": 0.001, "burst": 1_000_000}]))
    assert entry.allowed_burst / entry.requests_per_s == 1e9
    [entry] = api_keys.read(
        written(tmp_path, [{**GOOD, "requests_per_s": 1e6, "burst": 1_000_000, "share": 1000}])
    )
    assert (entry.requests_per_s, entry.burst, entry.share) == (1e6, 1_000_000, 1000)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o666, 0o602])
def test_a_file_that_all_users_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o} lets all users in; chmod 640"):
        api_keys.read(written(tmp_path, [GOOD], mode))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, why in (("pipe", "not a file"), ("folder", "not a file"), ("nowhere", "No such file")):
        with pytest.raises(ConfigError, match=why):
            api_keys.read(tmp_path / name)


def test_a_file_over_the_limit_is_refused_and_one_at_the_limit_is_read(tmp_path: Path) -> None:
    text = f"- name: web\n  hash: {HASH}\n".encode()
    at_limit = text + b"#" * (api_keys.MAX_FILE_NBYTES - len(text))
    assert len(api_keys.read(written(tmp_path, at_limit))) == 1
    with pytest.raises(ConfigError, match="the limit is 1048576"):
        api_keys.read(written(tmp_path, at_limit + b"#"))
