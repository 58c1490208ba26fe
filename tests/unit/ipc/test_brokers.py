"""Settings of brokers: what contradicts is refused before the start, and no message or setting holds a secret."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ipc import brokers
from ipc.errors import ConfigError
from ipc.settings import Settings, load
from tests.conformance.required_tool import required_tool

LOOPBACK = "nats://127.0.0.1:4222"


def settings_of(**values: str) -> Settings:
    return load(flags={f"cluster.{name}": value for name, value in values.items()}, environ={})


def test_without_brokers_nothing_is_checked() -> None:
    settings = settings_of(user="nobody")
    assert not settings.cluster.on
    brokers.check(settings)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"user": "u"}, "cluster.password_file: expected a value"),
        ({"password_file": "/x"}, "cluster.user: expected a value"),
        ({"token_file": "/x", "credentials_file": "/y"}, "expected one of them"),
        ({"tls_cert_file": "/x"}, "cluster.tls_key_file: expected a file"),
        ({"tls_key_file": "/x"}, "cluster.tls_cert_file: expected a file"),
        ({"transfer_bind": "127.0.0.1:70000"}, "cluster.transfer_bind: 127.0.0.1:70000: expected a port"),
        (
            {"transfer_bind": "127.0.0.1:0", "transfer_advertise": "box:70000"},
            "cluster.transfer_advertise: box:70000",
        ),
        ({"transfer_advertise": "box:7000"}, "cluster.transfer_bind: expected an address"),
        (
            {"transfer_bind": "0.0.0.0:0", "insecure": "true"},
            "cluster.transfer_advertise: expected the address",
        ),
        (
            {"transfer_bind": "[::]:7000", "insecure": "true"},
            "cluster.transfer_advertise: expected the address",
        ),
        ({"transfer_bind": "10.0.0.1:7000"}, "cluster.transfer_bind: 10.0.0.1:7000 would carry texts"),
        ({"urls": "nats://127.0.0.1:70000"}, "cluster.urls: nats://127.0.0.1:70000: expected a port"),
        ({"token_file": "/not/there"}, "cluster.token_file: /not/there: No such file"),
        ({"tls_ca_file": "/not/there"}, "/not/there"),
        ({"extend_every_s": "1", "ack_wait_s": "2"}, "cluster.extend_every_s = 1: expected less than half"),
        (
            {"keep_results_s": "1.5", "gateway_silence_s": "1.6"},
            "cluster.keep_results_s = 1.5: expected at least cluster.gateway_silence_s = 1.6",
        ),
        (
            {"keep_results_s": "3", "ask_after_s": "4"},
            "cluster.keep_results_s = 3: expected at least cluster.ask_after_s = 4",
        ),
        (
            {"beat_s": "1.5"},
            "cluster.beat_s = 1.5: expected at most half of cluster.gateway_silence_s = 2",
        ),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace(".", r"\.")):
        brokers.check(settings_of(**{"urls": LOOPBACK, **values}))


@pytest.mark.parametrize(
    "url",
    [
        "nats://user:secret@10.0.0.1:4222",
        "http://10.0.0.1:4222",
        "nats://10.0.0.1",
        "nats://10.0.0.1:4222/x",
        "nats://a b:4222",
        "tls://[::1:4222",
    ],
)
def test_an_url_that_names_no_broker_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.urls") as raised:
        settings_of(urls=url)
    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "values",
    [{"box": "a.b"}, {"box": "x" * 64}, {"pool": "Upper"}, {"pool": ".."}, {"name": "a.>"}, {"name": "*"}],
)
def test_names_that_would_part_or_widen_a_subject_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{next(iter(values))}"):
        settings_of(urls=LOOPBACK, **values)


def test_the_name_of_a_box_is_that_of_its_host_without_dots() -> None:
    assert "." not in settings_of().cluster.box_name
    assert settings_of(box="b-1").cluster.box_name == "b-1"


def test_plain_text_and_open_doors_are_for_loopback_only(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    away = "nats://10.0.0.1:4222"
    brokers.check(settings_of(urls="nats://[::1]:4222,nats://localhost:4222"))
    with pytest.raises(ConfigError, match="in the clear"):
        brokers.check(settings_of(urls=f"{LOOPBACK},{away}"))
    with pytest.raises(ConfigError, match="without credentials"):
        brokers.check(settings_of(urls="tls://10.0.0.1:4222"))
    brokers.check(settings_of(urls=away, insecure="true"))
    token = tmp_path / "token"
    token.write_text("a token\n")
    brokers.check(settings_of(urls="tls://10.0.0.1:4222", token_file=str(token)))
    own, key = map(str, certificate)
    brokers.check(settings_of(urls=away, tls_ca_file=own, tls_cert_file=own, tls_key_file=key))


CREDENTIALS = """-----BEGIN NATS USER JWT-----
eyJ0eXAi.a.b
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
SUAHIDDEN
------END USER NKEY SEED------
"""


@pytest.mark.parametrize(
    ("without", "names"),
    [
        ("BEGIN NATS USER JWT", "BEGIN NATS USER JWT"),
        ("eyJ0eXAi.a.b", "BEGIN NATS USER JWT"),
        ("BEGIN USER NKEY SEED", "BEGIN USER NKEY SEED"),
        ("SUAHIDDEN", "BEGIN USER NKEY SEED"),
    ],
)
def test_a_credentials_file_without_a_part_is_refused_by_the_name_of_the_part(
    tmp_path: Path, without: str, names: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(CREDENTIALS.replace(without, ""))
    with pytest.raises(ConfigError, match=rf"cluster\.credentials_file: .*{names}") as refused:
        brokers.secrets_of(settings_of(credentials_file=str(file)).cluster)
    assert "HIDDEN" not in str(refused.value)


def test_secrets_are_read_from_files_and_stand_in_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(" hidden \nsecond line\n")
    with_user = settings_of(urls=LOOPBACK, user="gateway", password_file=str(file))
    assert brokers.secrets_of(with_user.cluster) == {"user": "gateway", "password": "hidden"}
    assert "hidden" not in repr(with_user)
    assert brokers.secrets_of(settings_of(token_file=str(file)).cluster) == {"token": "hidden"}
    file.write_text(CREDENTIALS)
    creds = settings_of(credentials_file=str(file)).cluster
    assert brokers.secrets_of(creds) == {"user_credentials": str(file)}


@pytest.mark.parametrize("content", [b"\n", b"\xff\xfe\n"])
def test_a_file_without_a_secret_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        brokers.check(settings_of(urls=LOOPBACK, token_file=str(file)))


def test_transfers_are_encrypted_as_the_brokers_are(certificate: tuple[Path, Path]) -> None:
    own, key = map(str, certificate)
    assert brokers.tls_of(settings_of(urls=LOOPBACK).cluster, serves=True) is None
    with pytest.raises(ConfigError, match=r"cluster\.tls_cert_file"):
        brokers.tls_of(settings_of(urls=LOOPBACK, tls_ca_file=own).cluster, serves=True)
    both = settings_of(urls=LOOPBACK, tls_ca_file=own, tls_cert_file=own, tls_key_file=key).cluster
    context = brokers.tls_of(both, serves=True)
    assert context is not None
    assert context.verify_mode.name == "CERT_REQUIRED"
    with pytest.raises(ConfigError, match="tls_key_file"):
        brokers.tls_of(settings_of(urls=LOOPBACK, tls_cert_file=own, tls_key_file=own).cluster)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    root = tmp_path_factory.mktemp("certificate")
    own, key = root / "own.pem", root / "own.key"
    subprocess.run(
        [
            *(required_tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(own)),
        ],
        check=True,
        capture_output=True,
    )
    return own, key
