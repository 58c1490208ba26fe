"""Which addresses and names the server connects to for a client."""

from __future__ import annotations

import ipaddress

import pytest

from frontend.web.addresses import AddressRefused, Guard, is_local_name, is_public, networks_of
from ipc.errors import ConfigError

PRIVATE = (
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:53aa:64c::1",
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
)


@pytest.mark.parametrize("text", PRIVATE)
def test_addresses_of_no_server_on_the_internet_are_refused(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    with pytest.raises(AddressRefused):
        Guard(()).check(text)


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "198.20.0.1", "2606:4700::1111", "2a00::1"]
)
def test_addresses_of_the_internet_are_public(text: str) -> None:
    Guard(()).check(text)


@pytest.mark.parametrize("text", ["", "a", "127.1", "0x7f.0.0.1", "1.1.1.1/32"])
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressRefused):
        Guard(()).check(text)


def test_networks_of_the_operator_are_allowed_and_their_neighbours_are_not() -> None:
    guard = Guard(networks_of(["10.1.0.0/16", "fd00:1::/64"]))
    guard.check("10.1.2.3")
    guard.check("fd00:1::5")
    for text in ("10.2.0.1", "fd00:2::1", "::ffff:10.1.2.3"):
        with pytest.raises(AddressRefused):
            guard.check(text)


def test_a_text_that_is_no_network_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"fetch\.allowed_networks: '10\.0\.0\.1/8' is no network"):
        networks_of(["10.0.0.1/8"])


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("localhost", True),
        ("localhost.", True),
        ("a.LOCALHOST", True),
        ("wiki", True),
        ("2130706433", True),
        ("printer.local", True),
        ("metadata.google.internal", True),
        ("nas.home.arpa", True),
        ("example.com", False),
        ("local.example.com", False),
        ("notlocalhost.com", False),
    ],
)
def test_names_of_local_networks(name: str, local: bool) -> None:
    assert is_local_name(name) is local


def test_a_local_name_needs_an_allowed_network_and_one_refused_address_refuses_the_name() -> None:
    guard = Guard(networks_of(["10.1.0.0/16"]))
    guard.check_name("wiki", ["10.1.0.1"])
    guard.check_name("example.com", ["8.8.8.8", "10.1.0.1"])
    for name, addresses in (("wiki", ["8.8.8.8"]), ("example.com", ["8.8.8.8", "127.0.0.1"])):
        with pytest.raises(AddressRefused):
            guard.check_name(name, addresses)
