"""The log settings of the tensor protocols: one state for all frontends, and what it lets through."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from frontend.tensors.live_settings import LogSettings
from ipc import deadline, logs, sweep
from ipc.errors import InvalidInput, Unsupported
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings, load
from ipc.store.store import Store

LEVELS = ("debug", "info", "warning", "error", "critical")


def settings_of(tmp_path: Path, level: str = "info", form: str = "json") -> Settings:
    """Settings of a server in `tmp_path`."""
    found = load(None, {"run.dir": str(tmp_path), "log.level": level, "log.format": form}, {})
    prepare_run_dir(found.paths)
    return found


def log_settings(settings: Settings) -> LogSettings:
    """The log settings of one frontend."""
    return LogSettings(settings, Store(settings.paths))


def update(log: LogSettings, changes: Mapping[str, object]) -> dict[str, Any]:
    """Change what is named."""
    return asyncio.run(log.update(changes, deadline.after(60)))


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What this process logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    found = io.StringIO()
    yield found
    root.handlers[:] = handlers
    root.setLevel(level)


def passed(settings: Settings, stream: io.StringIO, log: LogSettings) -> list[str]:
    """Names of the levels of which a line is written."""
    logs.configure(settings.log, "frontend-0", stream)
    log._applied = None
    log.apply()
    for level in LEVELS:
        getattr(logging.getLogger("anything"), level)("a line of level %s.", level)
    logs.flush()
    return [level for level in LEVELS if f"level {level}." in stream.getvalue()]


@pytest.mark.parametrize(
    ("level", "form", "expected"),
    [
        ("debug", "json", [True, True, True, 1, "ISO8601"]),
        ("info", "json", [True, True, True, 0, "ISO8601"]),
        ("warning", "text", [False, True, True, 0, "default"]),
        ("error", "text", [False, False, True, 0, "default"]),
    ],
)
def test_it_begins_with_what_the_settings_of_the_server_say(
    tmp_path: Path, level: str, form: str, expected: list[object]
) -> None:
    found = log_settings(settings_of(tmp_path, level, form)).get()
    names = ["log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"]
    assert list(found) == names
    assert list(found.values()) == ["", *expected]


def test_a_change_is_seen_by_every_frontend_and_forgotten_at_the_next_start(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    first, second = log_settings(settings), log_settings(settings)
    before = second.get()
    answer = update(first, {"log_info": False, "log_verbose_level": 3, "unheard_of": 1})
    assert answer == before | {"log_info": False, "log_verbose_level": 3} == second.get()
    sweep.forget(settings.paths)
    assert first.get() == second.get() == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["info", "warning", "error", "critical"]),
        ({"log_info": False}, ["warning", "error", "critical"]),
        ({"log_warning": False}, ["info", "error", "critical"]),
        ({"log_error": False}, ["info", "warning", "critical"]),
        ({"log_verbose_level": 1}, list(LEVELS)),
        ({"log_verbose_level": 1, "log_info": False}, ["debug", "warning", "error", "critical"]),
    ],
)
def test_levels_are_switched_one_by_one(
    tmp_path: Path, stream: io.StringIO, changes: dict[str, Any], expected: list[str]
) -> None:
    settings = settings_of(tmp_path)
    log = log_settings(settings)
    update(log_settings(settings), changes)
    assert passed(settings, stream, log) == expected


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"log_info": 1}, InvalidInput),
        ({"log_info": "true"}, InvalidInput),
        ({"log_info": None}, InvalidInput),
        ({"log_verbose_level": True}, InvalidInput),
        ({"log_verbose_level": -1}, InvalidInput),
        ({"log_verbose_level": 2**32}, InvalidInput),
        ({"log_verbose_level": 1.5}, InvalidInput),
        ({"log_file": 5}, InvalidInput),
        ({"log_file": "/etc/passwd"}, Unsupported),
        ({"log_format": "default"}, Unsupported),
        ({"log_warning": False, "log_file": "x"}, Unsupported),
    ],
)
def test_what_cannot_be_had_is_refused_and_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    log = log_settings(settings_of(tmp_path))
    before = log.get()
    with pytest.raises(error, match=next(reversed(changes))):
        update(log, changes)
    assert log.get() == before


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2**32, "4294967296"),
        (-1, "-1"),
        (10**18, "int"),
        pytest.param(10**5000, "int", id="5001 digits"),
        (True, "True"),
        (1.5, "1.5"),
    ],
)
def test_a_wrong_value_is_shown_where_it_is_short(tmp_path: Path, value: object, told: str) -> None:
    with pytest.raises(InvalidInput, match=rf"log_verbose_level: expected .*, got {told}$"):
        update(log_settings(settings_of(tmp_path)), {"log_verbose_level": value})


def test_what_is_said_again_is_no_change(tmp_path: Path) -> None:
    log = log_settings(settings_of(tmp_path))
    assert update(log, log.get()) == log.get()
