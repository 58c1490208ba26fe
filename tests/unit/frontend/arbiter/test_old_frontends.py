"""A start beside what a dead arbiter has left: its frontends close their listeners, other programs do not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.arbiter import hooks
from ipc.errors import ConfigError
from ipc.processes.liveness import SlotLock, is_held
from ipc.processes.paths import SERVER, prepare_run_dir
from ipc.settings import Settings, load
from tests.harness.ports import free_port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that listens on a port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", free_port())) as found:
        yield found


def settings(tmp_path: Path, listener: socket.socket) -> Settings:
    """Settings of a server at the address of `listener`."""
    bind = f"127.0.0.1:{listener.getsockname()[1]}"
    environ = {
        "PENSTOCK_RUN__DIR": str(tmp_path),
        "PENSTOCK_RUN__INSTANCE": "one",
        "PENSTOCK_SERVER__BIND": bind,
        # The default port of gRPC may be another program's.
        "PENSTOCK_GRPC__ENABLED": "false",
    }
    return load(environ=environ)


def test_a_frontend_that_frees_its_lock_before_its_address_is_waited_for(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, listener)
    prepare_run_dir(config.paths)
    frontend = SlotLock(config.paths.lock("frontend-0"))
    endings = iter([frontend.release, listener.close])
    monkeypatch.setattr("time.sleep", lambda _: next(endings)())
    with hooks.take_run_directory(config):
        assert is_held(config.paths.lock(SERVER))
    assert next(endings, None) is None


def test_an_address_of_another_program_is_told_at_the_second_look(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, listener)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with pytest.raises(ConfigError, match=r"server\.bind"):
        hooks.take_run_directory(config)
    assert len(pauses) == 1
    assert not is_held(config.paths.lock(SERVER))
