"""The brokers of deploy/nats take their files, let gateways and bridges do their part, and refuse anything else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.errors import Error
from nats.js.api import KeyValueConfig, StreamConfig
from nats.js.errors import ServerError

from frontend.cluster.queue import made
from ipc.settings import Cluster
from ipc.wire.cluster_names import Names
from tests.conformance.required_tool import required_tool
from tests.harness.broker import PATIENCE_S, Broker, nats_server
from tests.harness.cluster import box, gateway, serves
from tests.harness.server import eventually, wait_until
from tools.source_tree import ROOT

NATS = ROOT / "deploy" / "nats"
LOGIN = {"gateway": "g-secret", "bridge": "b-secret", "config": "c-secret", "watch": "w-secret"}
PASSWORDS = {f"PENSTOCK_{user.upper()}_PASSWORD": password for user, password in LOGIN.items()}
ITEM = {"items": [{"text": "x"}]}
CONFIGURATION = b"""
sie_id: acme/m
package_backed: true
tasks: {encode: {dense: {dim: 8}}}
profiles: {default: {adapter_path: "tests.fakes.adapter:FakeAdapter", adapter_options: {loadtime: {dims: 8}}}}
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of three hosts, made by the script."""
    required_tool("openssl")
    root = tmp_path_factory.mktemp("certificates")
    done = subprocess.run(
        [str(NATS / "certificates.sh"), str(root), "broker-1", "10.0.0.7", "box-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root


def copied(place: Path, name: str, certificates: Path) -> Path:
    """A configuration with what it includes, whose files lie below `place`."""
    shutil.copytree(NATS, place, dirs_exist_ok=True)
    for file in (certificates / "broker-1").iterdir():
        shutil.copy(file, place)
    for path in place.glob("*.conf"):
        text = path.read_text().replace("/etc/penstock/nats", str(place))
        path.write_text(text.replace("/var/lib/penstock-nats", str(place / "store")))
    return place / name


@pytest.mark.parametrize("name", ["one.conf", "three.conf"])
def test_a_broker_takes_the_configuration(tmp_path: Path, certificates: Path, name: str) -> None:
    file = copied(tmp_path, name, certificates)
    done = subprocess.run(
        [nats_server(), "-t", "-c", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | PASSWORDS,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_single_broker_takes_the_configuration_without_its_cluster(
    tmp_path: Path, certificates: Path
) -> None:
    file = copied(tmp_path, "three.conf", certificates)
    file.write_text(file.read_text().partition("\ncluster {")[0])
    done = subprocess.run(
        [nats_server(), "-t", "-c", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | PASSWORDS,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_broker_tells_the_name_that_its_certificate_has(certificates: Path) -> None:
    """A broker that tells the number of its address is not found again: no certificate holds for the number."""
    for host in ("broker-1", "10.0.0.7"):
        own, routes = ((certificates / host / name).read_text() for name in ("own.conf", "own-routes.conf"))
        assert own == f'server_name: "{host}"\nclient_advertise: "{host}:4333"\n'
        assert routes == f'advertise: "{host}:6333"\n'
    text = (NATS / "three.conf").read_text()
    assert "include own.conf" in text.partition("\ncluster {")[0]
    assert "include own-routes.conf" in text.partition("\ncluster {")[2]


def test_a_mistake_in_the_configuration_is_noticed(tmp_path: Path, certificates: Path) -> None:
    file = copied(tmp_path, "one.conf", certificates)
    file.write_text(file.read_text() + "no_such_field: 1\n")
    done = subprocess.run(
        [nats_server(), "-t", "-c", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | PASSWORDS,
    )
    assert done.returncode != 0


def test_certificates_are_for_their_host_and_may_be_shown_by_both_sides(certificates: Path) -> None:
    def told(host: str) -> str:
        command = ["openssl", "x509", "-in", str(certificates / host / "own.pem"), "-noout", "-text"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "DNS:broker-1" in told("broker-1") and "IP Address:10.0.0.7" in told("10.0.0.7")
    assert "TLS Web Server Authentication, TLS Web Client Authentication" in told("box-1")
    context = ssl.create_default_context(cafile=str(certificates / "box-1" / "ca.pem"))
    context.load_cert_chain(certificates / "box-1" / "own.pem", certificates / "box-1" / "own.key")
    assert (certificates / "box-1" / "own.key").stat().st_mode & 0o077 == 0
    assert not (certificates / "box-1" / "ca.key").exists()


def test_the_script_keeps_the_authority_and_refuses_names_that_are_no_hosts(certificates: Path) -> None:
    script, before = str(NATS / "certificates.sh"), (certificates / "ca.pem").read_bytes()
    done = subprocess.run([script, str(certificates), "box-2"], capture_output=True, check=False)
    assert done.returncode == 0 and (certificates / "box-2" / "own.pem").exists()
    assert (certificates / "ca.pem").read_bytes() == before
    for arguments in ([str(certificates)], [str(certificates), "../out"], [str(certificates), "a b"]):
        assert subprocess.run([script, *arguments], capture_output=True, check=False).returncode == 2


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with the accounts of deploy/nats."""
    accounts = (NATS / "accounts.conf").read_text()
    for name, password in PASSWORDS.items():
        accounts = accounts.replace(f"${name}", f'"{password}"')
    broker = Broker(tmp_path_factory.mktemp("guarded"), more=accounts)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def played(broker: Broker, user: str, play: Callable[[Any, list[str]], Awaitable[None]]) -> list[str]:
    """Do something as a user; the errors that the broker told."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    async def run() -> None:
        client = await nats.connect(broker.url, user=user, password=LOGIN[user], error_cb=note)
        try:
            await play(client, errors)
        finally:
            await client.close()

    asyncio.run(run())
    return errors


def test_nobody_comes_in_without_a_password(guarded: Broker) -> None:
    async def try_it(**options: Any) -> None:
        with pytest.raises(Error, match=r"(?i)authorization"):
            await nats.connect(guarded.url, allow_reconnect=False, max_reconnect_attempts=0, **options)

    asyncio.run(try_it())
    asyncio.run(try_it(user="gateway", password="b-secret"))


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("bridge", "sie.work.model.default"),
        ("bridge", "penstock.box.b.l.work"),
        ("bridge", "penstock.beat.gateway.r"),
        ("bridge", "sie.config.models._all"),
        ("gateway", "$JS.API.CONSUMER.MSG.NEXT.WORK_POOL_default.default_default"),
        ("gateway", "$KV.penstock_models.b1"),
        ("gateway", "penstock.beat.box.b1"),
        ("gateway", "sie.config.models._all"),
        ("gateway", "$JS.API.STREAM.DELETE.KV_penstock_models"),
        ("bridge", "$JS.API.STREAM.DELETE.KV_penstock_models"),
        ("bridge", "$KV.penstock_pools.pools"),
        ("bridge", "$JS.API.STREAM.CREATE.KV_penstock_pools"),
        ("bridge", "$JS.API.STREAM.DELETE.KV_penstock_pools"),
        ("gateway", "$JS.API.STREAM.DELETE.KV_penstock_pools"),
        ("bridge", "$KV.penstock_configs.m"),
        ("bridge", "$KV.penstock_config_keys.k"),
        ("bridge", "$JS.API.STREAM.CREATE.KV_penstock_configs"),
        ("gateway", "$JS.API.STREAM.DELETE.KV_penstock_configs"),
        ("bridge", "$JS.API.STREAM.DELETE.KV_penstock_shared"),
        ("bridge", "$KV.penstock_agents_responses-3.responses.0"),
        ("bridge", "$JS.API.STREAM.CREATE.KV_penstock_files"),
        ("bridge", "$JS.API.STREAM.MSG.GET.KV_penstock_agents_sessions-2"),
        ("gateway", "$JS.API.STREAM.DELETE.KV_penstock_agents_responses-3"),
        ("config", "sie.work.model.default"),
        ("config", "$KV.penstock_configs.m"),
        ("config", "penstock.box.b.l.word"),
        ("config", "$JS.API.INFO"),
        ("watch", "sie.config.models._all"),
        ("watch", "sie.work.model.default"),
        ("watch", "$JS.API.STREAM.MSG.GET.DEAD_LETTERS"),
        ("watch", "$JS.API.CONSUMER.CREATE.DEAD_LETTERS"),
    ],
)
def test_a_user_may_not_say_what_is_for_others(guarded: Broker, user: str, subject: str) -> None:
    async def play(client: Any, errors: list[str]) -> None:
        await client.publish(subject, b"")
        await client.flush()

        async def is_told() -> bool:
            return any(subject.lower() in error.lower() for error in errors)

        await eventually(is_told, f"the refusal of {subject}")

    errors = played(guarded, user, play)
    assert any(re.search("(?i)permissions violation", error) for error in errors)


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("config", "_INBOX.>"),
        ("config", "sie.config.models._all"),
        ("watch", "_INBOX.>"),
        ("watch", "penstock.box.*.*.work"),
        ("watch", "sie.work.>"),
        ("watch", "$KV.penstock_configs.>"),
        ("gateway", "penstock.box.*.*.work"),
    ],
)
def test_a_user_may_not_hear_what_is_for_others(guarded: Broker, user: str, subject: str) -> None:
    async def play(client: Any, errors: list[str]) -> None:
        await client.subscribe(subject)

        async def is_told() -> bool:
            return any(subject.lower() in error.lower() for error in errors)

        await eventually(is_told, f"the refusal of {subject}")

    errors = played(guarded, user, play)
    assert any(re.search("(?i)permissions violation", error) for error in errors)


def test_a_configuration_service_is_heard_by_gateways_bridges_and_watchers(guarded: Broker) -> None:
    async def run() -> None:
        errors: list[Exception] = []

        async def note(error: Exception) -> None:
            errors.append(error)

        async def join(user: str) -> Any:
            inbox = f"_INBOX_{user.upper()}" if user == "watch" else "_INBOX"
            return await nats.connect(
                guarded.url, user=user, password=LOGIN[user], error_cb=note, inbox_prefix=inbox.encode()
            )

        subjects = {"gateway": "_all", "bridge": "default", "watch": "_all"}
        clients = {user: await join(user) for user in (*subjects, "config")}
        heard = {
            user: await clients[user].subscribe(f"sie.config.models.{bundle}")
            for user, bundle in subjects.items()
        }
        for client in clients.values():
            await client.flush()
        for bundle in ("_all", "default"):
            await clients["config"].publish(f"sie.config.models.{bundle}", b"change")
        for user, subscription in heard.items():
            assert (await subscription.next_msg(PATIENCE_S)).data == b"change", user
        assert "streams" in vars(await clients["watch"].jetstream(timeout=PATIENCE_S).account_info())
        for client in clients.values():
            await client.close()
        assert not errors

    asyncio.run(run())


@pytest.mark.parametrize("user", ["gateway", "bridge"])
def test_both_sides_may_make_the_queue_anew(
    guarded: Broker, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.cluster.queue.TIMEOUT_S", PATIENCE_S)

    async def play(client: Any, errors: list[str]) -> None:
        other = StreamConfig(name="WORK_POOL_default", subjects=["sie.work.*.default"], max_age=60)
        await client.jetstream(timeout=PATIENCE_S).delete_stream("WORK_POOL_default")

        async def is_added() -> bool:
            try:
                await client.jetstream(timeout=PATIENCE_S).add_stream(other)
            except ServerError:
                # The broker takes the files of the stream before away a moment after it has answered.
                return False
            return True

        await eventually(is_added, "a stream with other settings")
        await made(client, Names(), Cluster())

    async def begin(client: Any, errors: list[str]) -> None:
        await made(client, Names(), Cluster())

    assert not played(guarded, user, begin) and not played(guarded, user, play)


def test_a_bridge_tells_its_models_and_a_gateway_reads_them(guarded: Broker) -> None:
    async def tell(client: Any, errors: list[str]) -> None:
        bucket = await client.jetstream(timeout=PATIENCE_S).create_key_value(
            KeyValueConfig("penstock_models", history=1)
        )
        await bucket.put("b1", b"row")

    async def read(client: Any, errors: list[str]) -> None:
        bucket = await client.jetstream(timeout=PATIENCE_S).key_value("penstock_models")
        watcher = await bucket.watchall()
        # The client library may tell the end of the values before any has come.
        while (entry := await watcher.updates(PATIENCE_S)) is None:
            pass
        assert (entry.key, entry.value) == ("b1", b"row")
        await watcher.stop()

    assert played(guarded, "bridge", tell) == []
    assert played(guarded, "gateway", read) == []


def test_a_gateway_and_a_box_with_their_own_users_serve_without_a_refusal(
    guarded: Broker, tmp_path: Path
) -> None:
    files = {user: tmp_path / f"{user}.password" for user in ("gateway", "bridge")}
    for user, file in files.items():
        file.write_text(f"{LOGIN[user]}\n")

    def proof(user: str) -> dict[str, str]:
        return {"cluster.user": user, "cluster.password_file": str(files[user])}

    urls, before = [guarded.url], len(guarded.log)
    with (
        box(tmp_path / "a", "a", urls, settings=proof("bridge")) as one,
        gateway(tmp_path / "near", urls, proof("gateway")) as near,
    ):
        wait_until(lambda: serves(near), what="the first answer of a box")
        assert near.encode("fake/echo", ["x"]).headers["x-sie-worker"] == "a/worker-0"
        made = near.post("/v1/pools", {"name": "bench"})
        assert made.status == 201, made.body
        wait_until(
            lambda: near.post("/v1/encode/fake/echo", ITEM, x_sie_pool="bench").status == 200,
            what="an answer of the pool",
        )
        assert near.request("DELETE", "/v1/pools/bench").status == 200
        assert (
            near.request("POST", "/v1/configs/models", CONFIGURATION, {"Idempotency-Key": "k"}).status == 201
        )
        wait_until(lambda: near.encode("acme/m", ["x"]).status == 200, what="the configured model")
        wait_until(lambda: serves(near), what="the box in the pool of its settings")
        # Too large for a message, and without an address of its own: the bytes go through the broker in chunks.
        large = near.encode("fake/echo", ["x" * 2000] * 500)
        assert large.status == 200 and len(large.json()["items"]) == 500
        # Stored objects: a row in parts, its replacement and its end.
        for text in ("x" * 400_000, "x"):
            session = {"messages": [{"role": "user", "content": text}]}
            assert near.request("PUT", "/v1/sessions/s", json.dumps(session).encode()).status == 200
            assert text in near.get("/v1/sessions/s").body.decode()
        assert near.request("DELETE", "/v1/sessions/s").status == 200
        for log in (one.log, near.log, guarded.log[before:]):
            assert "violation" not in log.lower(), log[-3000:]
            assert not any(secret in log for secret in LOGIN.values())
