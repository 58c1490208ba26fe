"""Spares: how many are kept, who gets one, and what follows the death of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.settings import load
from tests.fakes.child import FakeChild
from tests.fakes.clock import Clock
from workers import spare
from workers.spare import Assignment
from workers.supervisor import slots as module
from workers.supervisor.slots import Spares

FIRST = Assignment(0, {"NOTIFY_SOCKET": "/run/notify-0.sock"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the spares, moved by hand."""
    return Clock.of(module, monkeypatch)


def kept(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Spares, list[FakeChild]]:
    """Spares of that number, and the children that they start."""
    made: list[FakeChild] = []
    found = Spares(load(None, {"worker.spare": str(count), "worker.device": "cpu"}, {}))

    def start(*_: object, **__: object) -> FakeChild:
        made.append(FakeChild(len(made)))
        return made[-1]

    monkeypatch.setattr(module.Child, "start", start)
    return found, made


def test_as_many_spares_as_the_setting_says_are_started(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares, made = kept(2, monkeypatch)
    assert [spares.start_if_due() for _ in range(4)] == [0, 1, None, None]
    assert len(made) == 2


def test_none_are_started_when_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    spares, made = kept(0, monkeypatch)
    assert spares.start_if_due() is None
    assert spares.take(FIRST) is None
    assert not made


def test_the_oldest_spare_is_given_the_slot_and_another_takes_its_place(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares, made = kept(2, monkeypatch)
    spares.start_if_due(), spares.start_if_due()
    assert spares.take(FIRST) is made[0]
    assert made[0].assigned == [FIRST] and not made[1].assigned
    assert not spares.reap(made[0].pidfd), "the slot waits for its own process"
    assert spares.start_if_due() == 2


def test_a_dead_spare_is_passed_over_and_is_replaced_after_a_back_off(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares, made = kept(1, monkeypatch)
    spares.start_if_due()
    made[0].dead = True
    assert spares.take(FIRST) is None
    assert spares.reap(made[0].pidfd) and made[0].waited == 1
    assert spares.start_if_due() == 1, "the first replacement comes at once"
    assert spares.reap(1)
    assert spares.start_if_due() is None
    clock.now += 1.0
    assert spares.start_if_due() == 2


def test_a_spare_that_cannot_be_started_is_tried_again_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares, made = kept(1, monkeypatch)
    start = module.Child.start

    def full(*_: object, **__: object) -> FakeChild:
        raise OSError("no memory")

    monkeypatch.setattr(module.Child, "start", full)
    assert spares.start_if_due() is None
    monkeypatch.setattr(module.Child, "start", start)
    assert spares.start_if_due() is None
    clock.now += 1.0
    assert spares.start_if_due() == 0
    assert made


def test_the_end_of_the_supervisor_ends_all_spares(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    spares, made = kept(2, monkeypatch)
    spares.start_if_due(), spares.start_if_due()
    assert spares.close() == [0, 1]
    assert all(child.signals == [signal.SIGKILL] and child.waited == 1 for child in made)
    assert spares.take(FIRST) is None


@pytest.mark.parametrize(("device", "gpus", "count"), [("auto", 2, 1), ("cpu", 2, 0), ("auto", 0, 0)])
def test_by_default_there_is_one_where_gpus_are(
    device: str, gpus: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    assert load(None, {"worker.device": device}, {}).spare_count == count


def test_the_setting_takes_a_number_or_auto() -> None:
    assert load(None, {"worker.spare": "3"}, {}).spare_count == 3
    with pytest.raises(ConfigError, match="expected auto or whole number, at least 0, at most 16"):
        load(None, {"worker.spare": "many"}, {})


def test_a_spare_takes_slot_and_environment_from_the_pipe_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spare, "PRELOADED", ("json",))
    monkeypatch.setattr(spare.processes, "title", lambda text: None)
    for name in (
        "NOTIFY_SOCKET",
        "GOMP_SPINCOUNT",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, "before")
    for name in spare.QUIET:
        monkeypatch.setenv(name, "before")
    read, write = os.pipe()
    os.write(write, b'{"slot":3,"environment":{"NOTIFY_SOCKET":"/run/notify-3.sock"}}\n')
    assert spare.wait_for_slot(read) == 3
    assert os.environ["NOTIFY_SOCKET"] == "/run/notify-3.sock"
    os.close(write)
    assert spare.wait_for_slot(read) is None
    os.close(read)


@pytest.mark.long
def test_what_a_spare_imports_asks_for_no_device_so_that_the_slot_can_still_choose_the_gpu() -> None:
    program = """
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
import importlib
from workers.spare import PRELOADED
for module in PRELOADED:
    importlib.import_module(module)
print(asked)
"""
    root = Path(__file__).resolve().parents[4]
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "[]"
