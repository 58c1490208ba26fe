"""A run directory whose sockets have names that the kernel accepts, however long the name of the temp directory is."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.processes import paths
from penstock import own_server

LONG = "/" + "a" * 80


@pytest.mark.parametrize(("temp", "root"), [("/var/tmp", "/var/tmp"), (LONG, "/tmp")])
def test_the_default_run_directory_has_room_for_names_of_sockets(
    temp: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", temp)
    assert paths.default_run_root("8080") == Path(root) / f"penstock-{os.geteuid()}" / "8080"


def test_the_server_of_a_command_gets_a_run_directory_that_the_server_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("a" * 60)))
    Path(tempfile.gettempdir()).mkdir()
    with own_server.place("penstock-run-", tmp_path) as own:
        paths.prepare_run_dir(own)
        assert own.root.parent.parent == Path("/tmp")
        with own_server.place("penstock-run-", tmp_path):
            assert own.root.exists(), "a running server keeps the directory"
    assert not own.root.parent.exists()


def test_the_directory_of_a_user_in_the_temp_directory_belongs_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may make a directory of that name, and could exchange a run directory in it."""
    own = tmp_path / f"penstock-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o777)
    paths.prepare_run_dir(paths.RunPaths(own / "8080", "8080"))
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    foreign = tmp_path / "penstock-4711"
    foreign.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"run\.dir .*/penstock-4711 belongs to uid "):
        paths.prepare_run_dir(paths.RunPaths(foreign / "8080", "8080"))
    assert not list(foreign.iterdir())


def test_a_run_directory_that_the_operator_names_is_refused_when_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir .* is too long: a socket name may have 107 bytes"):
        paths.prepare_run_dir(paths.RunPaths(tmp_path / ("a" * 90), "8080"))
