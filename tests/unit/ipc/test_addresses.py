"""Addresses of settings: what is no address, and who else has the reserved one."""

from __future__ import annotations

import socket

import pytest

from ipc import addresses
from ipc.errors import ConfigError
from tests.harness.ports import free_port

SETTING = "grpc.bind"


@pytest.mark.parametrize(
    ("bind", "parsed"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001)),
        ("[::1]:1", ("::1", 1)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_an_address_has_a_host_and_a_port(bind: str, parsed: tuple[str, int]) -> None:
    assert addresses.parse(bind, SETTING) == parsed


@pytest.mark.parametrize(
    "bind",
    [
        "",
        "8001",
        ":8001",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "unix:/run/a",
        "host:²",
        "::1:80",
        "[::1",
        "[]:1",
    ],
)
def test_what_is_no_address_is_refused_with_the_settings_name(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"grpc\.bind"):
        addresses.parse(bind, SETTING)


def shared(port: int) -> socket.socket:
    """What a frontend of gRPC does: listen with SO_REUSEPORT."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_a_kept_address_is_open_to_frontends_and_closed_to_other_servers() -> None:
    port = free_port()
    bind = f"127.0.0.1:{port}"
    with addresses.reserve(bind, SETTING):
        with pytest.raises(ConfigError, match=r"grpc\.bind"):
            addresses.reserve(bind, SETTING)
        with (
            shared(port),
            shared(port),
            socket.create_connection(("127.0.0.1", port), timeout=60),
            pytest.raises(ConfigError, match=r"grpc\.bind"),
        ):
            addresses.reserve(bind, SETTING)


def test_frontends_of_another_server_are_noticed_without_its_arbiter() -> None:
    port = free_port()
    with shared(port), pytest.raises(ConfigError, match="cannot be had"):
        addresses.reserve(f"127.0.0.1:{port}", SETTING)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"grpc\.bind: 203\.0\.113\.7:8001 cannot be had"):
        addresses.reserve("203.0.113.7:8001", SETTING)
