"""What loads remember of a machine: found by the same facts only, and never read from a file that others wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.device import findings as module
from workers.device.findings import Findings, Proof

WORDS = ("plain", "laid out")


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    found = Findings(tmp_path)
    found.write("linears", ("a", 1), ["plain", "laid out"])
    return found


def read(findings: Findings, facts: object = ("a", 1)) -> list[str] | None:
    return findings.read("linears", facts, WORDS, 2)


def test_a_finding_is_found_again_by_the_same_facts_and_kind_only(findings: Findings) -> None:
    assert read(findings) == ["plain", "laid out"]
    assert read(findings, ("a", 2)) is None
    assert findings.read("packed", ("a", 1), WORDS, 2) is None
    assert Findings().read("linears", ("a", 1), WORDS, 2) is None


def test_a_proof_is_found_with_the_values_of_its_load_once_the_load_has_succeeded(tmp_path: Path) -> None:
    made, values = Proof(Findings(tmp_path)), {"encode.dense": [0.5, -0.25]}
    made.succeed("packed", "facts", "plain")
    assert Proof(Findings(tmp_path)).earlier("packed", "facts", WORDS) is None, "the load may still fail"
    made.keep({})
    assert Proof(Findings(tmp_path)).earlier("packed", "facts", WORDS) is None, "nothing to compare"
    made.keep(values)
    later = Proof(Findings(tmp_path))
    assert later.values is None
    assert (later.earlier("packed", "facts", WORDS), later.values) == ("plain", values)
    assert Proof(Findings(tmp_path)).earlier("packed", "facts", ["other words"]) is None
    Findings(tmp_path).write("packed", "facts", ["plain"])
    assert Proof(Findings(tmp_path)).earlier("packed", "facts", WORDS) is None, "another form"


def test_only_the_findings_that_were_used_last_are_kept(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    for number in range(3):
        findings.write("linears", number, ["plain", "plain"])
        for at, file in enumerate(
            sorted((tmp_path / "linears").iterdir(), key=lambda file: file.stat().st_mtime)
        ):
            os.utime(file, (at, at))
    assert len(list((tmp_path / "linears").iterdir())) == 3 and read(findings) is None, "the oldest has gone"
    assert read(findings, 0), "a finding that was read counts as used"
    (tmp_path / "linears" / "draft of a process that died").touch()
    os.utime(tmp_path / "linears" / "draft of a process that died", (0, 0))
    findings.write("linears", 3, ["plain", "plain"])
    assert [bool(read(findings, number)) for number in range(4)] == [True, False, True, True]
    findings.write("packed", 0, ["plain", "plain"])
    assert len(list((tmp_path / "linears").iterdir())) == 3, "each kind by itself"


@pytest.mark.parametrize("changed", ["torch", "processor", "threads", "environment", "version"])
def test_a_change_of_the_machine_hides_what_was_found(
    changed: str, findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif changed == "processor":
        monkeypatch.setattr(module, "_processor", lambda: ["model name : another"])
    elif changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif changed == "environment":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    else:
        monkeypatch.setattr(module, "VERSION", "99.0.0")
    module.machine_facts.cache_clear()
    try:
        assert read(findings) is None
    finally:
        monkeypatch.undo()
        module.machine_facts.cache_clear()
    assert read(findings) == ["plain", "laid out"]


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "torn": _torn,
    "no text": lambda path: path.write_bytes(b'["\xff", "plain"]'),
    "another form": lambda path: path.write_bytes(b'{"plain": 1}'),
    "other words": lambda path: path.write_bytes(b'["plain", "fast"]'),
    "too few": lambda path: path.write_bytes(b'["plain"]'),
    "huge": lambda path: path.write_bytes(b'["plain", "laid out"]' + b" " * (1 << 20)),
    "writable for others": _writable,
    "a link": _link,
    "a pipe": _pipe,
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_torn_and_hostile_files_are_as_good_as_none_and_are_replaced(
    damage: str, findings: Findings, tmp_path: Path
) -> None:
    [path] = tmp_path.rglob("*.json")
    HOSTILE[damage](path)
    assert read(findings) is None
    findings.write("linears", ("a", 1), ["laid out", "laid out"])
    assert read(findings) == ["laid out", "laid out"]


def test_a_directory_that_takes_no_files_costs_nothing_but_the_finding(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    findings = Findings(place)
    findings.write("linears", ("a", 1), ["plain", "plain"])
    assert read(findings) is None


def test_two_workers_write_at_once_and_readers_see_whole_files_only(tmp_path: Path) -> None:
    words = [["plain", "plain"], ["laid out", "laid out"]]

    def write(number: int) -> bool:
        findings = Findings(tmp_path)
        for _ in range(100):
            findings.write("linears", 1, words[number % 2])
            if findings.read("linears", 1, WORDS, 2) not in words:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(4)))
    assert len(list(tmp_path.rglob("*"))) == 2
