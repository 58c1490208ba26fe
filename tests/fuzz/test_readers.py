"""Readers of what strangers send: kept inputs, a few new ones, and many of them with `make test-fuzz`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import corpus
from tests.fuzz.answering import sie_answer
from tests.fuzz.exploring import SEED, TooLong, explore, in_time, within_bounds
from tests.fuzz.targets import TARGETS
from tests.harness.server import ROOT

FEW = 40
EXAMPLES = int(os.environ.get("TEST_FUZZ_EXAMPLES", "3000"))
GUIDED_S = int(os.environ.get("TEST_FUZZ_GUIDED_S", "60"))
"""Examples of hypothesis, and seconds of atheris, for each target."""


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_are_read_or_refused_within_bounds(name: str) -> None:
    kept = corpus.files(name)
    assert kept, "a target without a valid input; python -m tests.fuzz.seeds writes them"
    # What a target makes once is not memory of an input.
    TARGETS[name](kept[0].read_bytes())
    for path in kept:
        try:
            within_bounds(TARGETS[name], path.read_bytes())
        except BaseException as error:
            error.add_note(str(path))
            raise


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_changed_inputs_are_read_or_refused(name: str) -> None:
    explore(name, TARGETS[name], FEW)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_many_changed_inputs_are_read_or_refused(name: str) -> None:
    began = time.monotonic()
    explore(name, TARGETS[name], EXAMPLES)
    print(f"{name}: {EXAMPLES} examples from seed {SEED} in {time.monotonic() - began:.0f} s")


@pytest.mark.fuzz
@pytest.mark.timeout(GUIDED_S + 300)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (the extra fuzz)"
)
def test_inputs_that_reach_new_code_are_read_or_refused(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", name, str(GUIDED_S), str(SEED)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=GUIDED_S + 240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(name, *(line for line in done.stderr.splitlines() if line.startswith("stat::")))


def test_a_finding_is_made_small_and_kept(tmp_path: Path) -> None:
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "valid").write_bytes(b"0123456789" * 20)

    def faulty(data: bytes) -> None:
        assert b"\xff" not in data

    with pytest.raises(AssertionError):
        explore("faulty", faulty, 500, seed=1, root=tmp_path)
    (found,) = [path for path in corpus.files("faulty", tmp_path) if path.name.startswith("found-")]
    assert b"\xff" in found.read_bytes()
    assert len(found.read_bytes()) < 250


def test_what_takes_too_long_or_too_much_is_a_finding() -> None:
    def endless(data: bytes) -> None:
        while True:
            pass

    with pytest.raises(TooLong), in_time(0.05):
        endless(b"")
    with pytest.raises(AssertionError, match="bytes of memory for an input of 1"):
        within_bounds(lambda data: bytes(32 << 20), b"x")  # type: ignore[arg-type,return-value]


def test_of_many_parts_those_are_left_that_fail_together() -> None:
    assert corpus.reduced(list(range(100)), lambda some: {17, 71} <= {*some}) == [17, 71]


def test_requests_of_the_sie_contract_are_answered_and_changed_ones_answered_or_refused() -> None:
    valid = [path for path in corpus.files("sie_answer") if not path.name.startswith("found-")]
    assert {path.name: sie_answer(path.read_bytes()) for path in valid} == {path.name: 200 for path in valid}
    explore("sie_answer", sie_answer, FEW)
