"""What the settings of `cluster` say about brokers: checks before the start, secrets, certificates.

Gateway, bridge and the checks of the command line read the same files by these functions. No message names a secret.
"""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from ipc import extras
from ipc.addresses import is_loopback
from ipc.errors import ConfigError
from ipc.settings import Cluster, Settings

MOST_SECRET_BYTES = 64 << 10
MOST_PORT = 65535
_ANY = ("0.0.0.0", "::")
_LEAST = (
    ("keep_results_s", "gateway_silence_s", "an answer goes while its gateway may still ask for the answer"),
    ("keep_results_s", "ask_after_s", "an answer goes before its gateway asks for the answer again"),
)
"""Settings, what each may not be below, and why."""


def check(settings: Settings) -> None:
    """Raise `ConfigError` for settings of `cluster` that contradict one another, or whose files cannot be read.

    Plain text and a missing proof of who connects are for loopback only, unless `cluster.insecure` is set.
    """
    cluster = settings.cluster
    if not cluster.on:
        if settings.is_gateway:
            raise ConfigError("cluster.urls: expected the brokers, since server.engine is cluster")
        return
    if settings.is_gateway:
        require_client("a gateway (server.engine = cluster)")
    proofs = {name: getattr(cluster, name) for name in ("user", "token_file", "credentials_file")}
    set_ones = [name for name, value in proofs.items() if value]
    if len(set_ones) > 1:
        raise ConfigError(f"cluster.{set_ones[0]} and cluster.{set_ones[1]}: expected one of them")
    if bool(cluster.user) != bool(cluster.password_file):
        lacking = "password_file" if cluster.user else "user"
        raise ConfigError(
            f"cluster.{lacking}: expected a value, since the other half of user and password is set"
        )
    if bool(cluster.tls_cert_file) != bool(cluster.tls_key_file):
        lacking = "tls_key_file" if cluster.tls_cert_file else "tls_cert_file"
        raise ConfigError(
            f"cluster.{lacking}: expected a file, since the other half of certificate and key is set"
        )
    _check_times(cluster)
    _check_transfers(cluster)
    is_proven = bool(set_ones or cluster.tls_cert_file)
    for url in cluster.urls:
        _check_port("urls", url)
        host = host_of(url)
        if cluster.insecure or host == "localhost" or is_loopback(host):
            continue
        if not uses_tls(cluster):
            raise ConfigError(
                f"cluster.urls: {url} would carry texts and credentials in the clear; expected tls:// or "
                "cluster.tls_ca_file, or cluster.insecure"
            )
        if not is_proven:
            raise ConfigError(
                f"cluster.urls: {url} would be used without credentials; expected cluster.user, token_file, "
                "credentials_file or tls_cert_file, or cluster.insecure"
            )
    secrets_of(cluster)
    tls_of(cluster)


def _check_times(cluster: Cluster) -> None:
    """Raise `ConfigError` for times with which work would run twice, or be given up, without a fault."""
    if cluster.ack_wait_s <= 2 * cluster.extend_every_s:
        raise ConfigError(
            f"cluster.extend_every_s = {cluster.extend_every_s:g}: expected less than half of "
            f"cluster.ack_wait_s = {cluster.ack_wait_s:g}, or work goes to a second box"
        )
    if cluster.beat_s > cluster.gateway_silence_s / 2:
        raise ConfigError(
            f"cluster.beat_s = {cluster.beat_s:g}: expected at most half of cluster.gateway_silence_s = "
            f"{cluster.gateway_silence_s:g}, or a gateway counts as silent between two signs of life"
        )
    for setting, least, why in _LEAST:
        value, bound = getattr(cluster, setting), getattr(cluster, least)
        if value < bound:
            raise ConfigError(
                f"cluster.{setting} = {value:g}: expected at least cluster.{least} = {bound:g}, or {why}"
            )


def _check_port(setting: str, address: str) -> None:
    if int(address.rpartition(":")[2]) > MOST_PORT:
        raise ConfigError(f"cluster.{setting}: {address}: expected a port of at most {MOST_PORT}")


def _check_transfers(cluster: Cluster) -> None:
    """Raise `ConfigError` for addresses of transfers that other hosts cannot use, or only in the clear."""
    bind, advertised = cluster.transfer_bind, cluster.transfer_advertise
    for setting, address in (("transfer_bind", bind), ("transfer_advertise", advertised)):
        if address:
            _check_port(setting, address)
    if advertised and not bind:
        raise ConfigError(
            "cluster.transfer_bind: expected an address, since cluster.transfer_advertise is set"
        )
    host = bind.rpartition(":")[0].strip("[]")
    if host in _ANY and not advertised:
        raise ConfigError(
            f"cluster.transfer_advertise: expected the address by which other hosts reach {bind}, got none"
        )
    if bind and not (cluster.insecure or uses_tls(cluster) or host == "localhost" or is_loopback(host)):
        raise ConfigError(
            f"cluster.transfer_bind: {bind} would carry texts in the clear; expected TLS for the brokers, or "
            "cluster.insecure"
        )


def require_client(what: str) -> None:
    """Raise `ConfigError` where the client library of brokers is not installed, which `what` needs."""
    if importlib.util.find_spec("nats") is None:
        raise ConfigError(f"{what} needs {extras.needed('cluster')}")


def host_of(url: str) -> str:
    """The host of a broker's URL, without the brackets of IPv6."""
    return urlsplit(url).hostname or ""


def uses_tls(cluster: Cluster) -> bool:
    """Whether connections to brokers, and transfers between hosts, are encrypted."""
    return bool(cluster.tls_ca_file or cluster.tls_cert_file) or any(
        url.startswith("tls://") for url in cluster.urls
    )


def secrets_of(cluster: Cluster) -> dict[str, str]:
    """Arguments of nats-py's `connect` that prove who connects: user and password, token, or user_credentials (a path).

    Raises `ConfigError` for a file that cannot be read, is empty or lacks a part, and for a missing extra.
    """
    if cluster.credentials_file:
        _check_credentials(cluster.credentials_file)
        return {"user_credentials": cluster.credentials_file}
    if cluster.token_file:
        return {"token": _first_line("token_file", cluster.token_file)}
    if cluster.user:
        return {"user": cluster.user, "password": _first_line("password_file", cluster.password_file)}
    return {}


def tls_of(cluster: Cluster, *, serves: bool = False) -> ssl.SSLContext | None:
    """How connections to brokers are encrypted, None for plain text; `serves`: those that this process accepts.

    A listener with `tls_ca_file` asks for a certificate. Raises `ConfigError` for files that are no certificates, and
    for a listener without a certificate of its own.
    """
    if not uses_tls(cluster):
        return None
    if serves and not cluster.tls_cert_file:
        raise ConfigError(
            "cluster.tls_cert_file: expected a file, since transfers are encrypted as brokers are"
        )
    try:
        if serves:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=cluster.tls_ca_file or None)
            if cluster.tls_ca_file:
                context.verify_mode = ssl.CERT_REQUIRED
        else:
            context = ssl.create_default_context(cafile=cluster.tls_ca_file or None)
        if cluster.tls_cert_file:
            context.load_cert_chain(cluster.tls_cert_file, cluster.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (cluster.tls_ca_file, cluster.tls_cert_file, cluster.tls_key_file)))
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or "no certificates"
        raise ConfigError(f"cluster.tls_ca_file, tls_cert_file, tls_key_file ({files}): {why}") from None
    return context


def _check_credentials(path: str) -> None:
    """Raise `ConfigError` for a credentials file without a JWT or a seed, with which nats-py would look without end."""
    lines = _read("credentials_file", path).splitlines()
    for part in ("NATS USER JWT", "USER NKEY SEED"):
        begins = next((number for number, line in enumerate(lines) if f"BEGIN {part}" in line), len(lines))
        if not "".join(lines[begins + 1 : begins + 2]).strip(" -"):
            raise ConfigError(f"cluster.credentials_file: {path} has no line below BEGIN {part}")
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError(f"cluster.credentials_file needs {extras.needed('cluster')}")


def _first_line(setting: str, path: str) -> str:
    line = _read(setting, path).partition("\n")[0].strip()
    if not line:
        raise ConfigError(f"cluster.{setting}: {path} has no text in its first line")
    return line


def _read(setting: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(MOST_SECRET_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"cluster.{setting}: {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"cluster.{setting}: {path} is no text") from None
