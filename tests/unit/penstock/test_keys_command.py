"""`penstock keys list | check | revoke`: the file is edited in one step, and nothing secret is ever printed."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest

from frontend.access import api_keys
from penstock.cli import main

KEYS = {name: api_keys.fresh() for name in ("web", "ops", "night")}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three keys in YAML with comments; no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "keys.yaml"
    text = (
        "# callers\n"
        f"- name: web  # the shop\n  hash: {api_keys.hashed(KEYS['web'])}\n  requests_per_s: 2.5\n"
        "\n# the people of the night\n"
        f"- name: ops\n  hash: {api_keys.hashed(KEYS['ops'])}\n  scopes:\n    - infer\n    - admin\n"
        "# the last\n"
        f"- name: night\n  hash: {api_keys.hashed(KEYS['night'])}\n"
    )
    path.write_text(text)
    path.chmod(0o600)
    return path


def secret_free(text: str) -> bool:
    """Whether a text holds neither a key nor a hash."""
    return not any(key in text or api_keys.digest(key) in text for key in KEYS.values())


def test_list_tells_all_but_the_hashes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--file", str(file), "--json"]) == 0
    printed = capsys.readouterr().out
    shown = json.loads(printed)
    assert [each["name"] for each in shown] == ["web", "ops", "night"] and secret_free(printed)
    assert shown[0]["requests_per_s"] == 2.5 and shown[0]["burst"] == 3
    assert shown[1]["scopes"] == ["infer", "admin"] and shown[1]["id"] == api_keys.id_of(KEYS["ops"])
    assert main(["keys", "list", "--set", f"server.keys_file={file}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["ops", api_keys.id_of(KEYS["ops"]), "infer,admin", "no", "limit", "-", "1"]


def test_check_says_whose_a_key_is(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(text: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["keys", "check", "--file", str(file), "--json"])
        printed = capsys.readouterr()
        assert text.strip() not in printed.out + printed.err or not text.strip()
        return code, printed.out or printed.err

    code, told = check(KEYS["ops"] + "\n")
    assert code == 0 and [each["name"] for each in json.loads(told)] == ["ops"]
    forged = f"pk_{api_keys.id_of(KEYS['ops'])}_{'x' * 43}"
    assert check(forged) == (
        1,
        f"penstock: id {api_keys.id_of(KEYS['ops'])}: the secret is not that of the file\n",
    )
    assert check(api_keys.fresh())[1].endswith("the file has no key with this id\n")
    assert check("hello") == (1, "penstock: this text has not the form of a key\n")
    assert check("")[0] == 3
    for closed_or_bytes, code in ((None, 3), (io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"), 1)):
        monkeypatch.setattr("sys.stdin", closed_or_bytes)
        assert main(["keys", "check", "--file", str(file)]) == code
    monkeypatch.setenv("PENSTOCK_KEY", KEYS["web"])
    assert json.loads(check("")[1])[0]["name"] == "web"


@pytest.mark.parametrize("name", ["web", "ops", "night"])
def test_revoke_takes_one_entry_out_and_keeps_comments_and_mode(name: str, file: Path) -> None:
    before = file.read_text()
    by_id = str(api_keys.id_of(KEYS[name]))
    assert main(["keys", "revoke", by_id if name == "ops" else name, "--file", str(file)]) == 0
    assert [entry.name for entry in api_keys.read(file)] == [each for each in KEYS if each != name]
    after = file.read_text()
    for comment in ("# callers", "# the people of the night", "# the last"):
        assert comment in after
    assert set(after.splitlines()) < set(before.splitlines())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and list(file.parent.iterdir()) == [file]


def test_what_cannot_be_revoked_leaves_the_file_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    assert main(["keys", "revoke", "nobody", "--file", str(file)]) == 1
    assert main(["keys", "revoke", KEYS["web"], "--file", str(file)]) == 1
    assert secret_free(capsys.readouterr().err) and file.read_bytes() == before
    entry = {"name": "web", "hash": api_keys.hashed(KEYS["web"])}
    file.write_text(json.dumps([entry]))
    assert main(["keys", "revoke", "web", "--file", str(file)]) == 3
    assert "no other key" in capsys.readouterr().err
    other = {"name": "ops", "hash": api_keys.hashed(KEYS["ops"])}
    file.write_text(json.dumps([entry, other]))
    assert main(["keys", "revoke", "web", "--file", str(file)]) == 3
    assert "by hand" in capsys.readouterr().err and len(api_keys.read(file)) == 2
    assert main(["keys", "list"]) == 3
