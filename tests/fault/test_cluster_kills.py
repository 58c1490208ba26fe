"""Box workers, bridges and gateways are killed at random moments under load, and nothing of them is left.

1. Clients encode through two gateways, as those of the random schedules, and others get results of megabytes for inputs
   of megabytes, so that blocks of arenas and transfers are in use when a process dies.
2. A kill comes at a random moment once the cluster is whole after the kill before. Each kind of process comes once
   before any comes again. `TEST_CLUSTER_SEED` names another order. A gateway, a bridge and a worker are never killed:
   what deaths of others leave there adds up.
3. Afterwards nobody asks, and `left` tells what is there: blocks, leases and requests of workers, files of arenas,
   messages, consumers and connections of the broker, keys of buckets. All of that has to be what was there before the
   first kill. `grown` tells tasks, threads and descriptors, of which pools may have a few more.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nats
import pytest
from nats.js.errors import NoKeysError

from frontend.state.skills import FILE as SKILLS
from ipc.metrics import registry as metrics
from ipc.processes.liveness import is_held
from ipc.processes.paths import RunPaths
from penstock.processes import look
from tests.fault import rounds
from tests.harness.broker import PATIENCE_S, Broker, broker
from tests.harness.cluster import Box, box, gateway, living, serves
from tests.harness.history import Clients, History
from tests.harness.lives import Worker
from tests.harness.ports import free_port
from tests.harness.server import Server, sum_of, wait_until

LANES = {"near": "auto", "far": "direct", "spared": "auto"}
SPARED_BOX, SPARED_GATEWAY = "a", "spared"
"""The bridge and worker 0 of this box, and this gateway, are never killed."""
MOST_GROWN = 16
"""Tasks, threads or descriptors that kept connections and pools of threads may take."""
MODELS = ("fake/echo", "fake/wide")
MOST_PAUSE_S = 0.5
LARGE_NBYTES = 700_000
"""Of a text: more than goes inside a message."""
LARGE_ROWS = 2
"""Answers of `fake/wide`, each of 1 MiB."""


class Killed:
    """A broker, boxes of two workers, two gateways, and who is killed among them."""

    def __init__(
        self, broker: Broker, pages: int, boxes: Mapping[str, Box], gateways: Mapping[str, Server], seed: int
    ) -> None:
        """`pages`: port of the broker's own pages."""
        self.broker, self._pages, self.boxes, self.gateways = broker, pages, boxes, gateways
        self.history, self._chance = History(), random.Random(seed)

    def schedule(self, count: int) -> list[Callable[[], None]]:
        """So many kills in random order, all kinds once before any comes again."""
        kinds, drawn = (
            (self.worker, self.bridge, self.frontend, self.whole_gateway),
            list[Callable[[], None]](),
        )
        while len(drawn) < count:
            drawn += self._chance.sample(kinds, len(kinds))
        return drawn[:count]

    def pause(self) -> None:
        """Let a random time pass, which makes the moment of the next kill a random one."""
        time.sleep(self._chance.uniform(0.0, MOST_PAUSE_S))

    def worker(self) -> None:
        """Kill a worker of a box, and start another."""
        name = self._chance.choice(sorted(self.boxes))
        server = self.boxes[name].server
        slot = self._chance.randrange(name == SPARED_BOX, len(server.workers))
        server.workers[slot].kill()
        server.workers[slot].wait(PATIENCE_S)
        server.workers[slot] = Worker(slot, server.environment, server.log_path)

    def bridge(self) -> None:
        """Kill a bridge, and start another."""
        one = self.boxes[self._chance.choice(sorted(self.boxes.keys() - {SPARED_BOX}))]
        one.end(signal.SIGKILL)
        one.start_bridge()

    def frontend(self) -> None:
        """Kill the frontend of a gateway, of which the arbiter starts another."""
        name = self._chance.choice(sorted(self.gateways.keys() - {SPARED_GATEWAY}))
        with self.history.fault(f"gateway {name}"):
            [pid] = self.gateways[name].frontend_pids()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: self._is_again(name, pid), what="another frontend")
            wait_until(self.is_whole, what="the gateway again")

    def _is_again(self, name: str, before: int) -> bool:
        server = self.gateways[name]
        with suppress(OSError, http.client.HTTPException):
            return server.frontend_pids() not in ([], [before]) and server.get("/livez").status == 200
        return False

    def whole_gateway(self) -> None:
        """Kill all processes of a gateway, and start it again."""
        name = self._chance.choice(sorted(self.gateways.keys() - {SPARED_GATEWAY}))
        with self.history.fault(f"gateway {name}"):
            self.gateways[name].kill_all_processes()
            self.gateways[name].start()
            self.gateways[name].wait_ready()
            wait_until(self.is_whole, what="the gateway again")

    def is_whole(self) -> bool:
        """Whether all workers serve, and every gateway hears every box and is answered."""
        serving = all(
            worker.state == "serving" and all(model.state == "loaded" for model in worker.models)
            for one in self.boxes.values()
            for worker in look(_paths(one.server), len(one.server.workers), 5).workers
        )
        return serving and all(
            living(server) == set(self.boxes) and all(serves(server, model) for model in MODELS)
            for server in self.gateways.values()
        )

    def left(self) -> dict[str, Any]:
        """What there is while nobody asks for anything."""
        found: dict[str, Any] = {}
        for name, one in self.boxes.items():
            server = one.server
            seen = look(_paths(server), len(server.workers), 5).workers
            found[name] = {
                "workers": [(it.state, it.arena_used, it.leases, it.requests) for it in seen],
                "bridge": one.status.partition(", ")[2],
                "inputs": _inputs_used(server),
                "arenas": len(server.arenas()),
                "locks": _locks(server),
                "sockets": sorted(path.name for path in server.run_dir.glob("*.sock")),
            }
        for name, server in self.gateways.items():
            found[name] = {
                "requests": server.metric("penstock_requests_in_flight"),
                "arenas": len(server.arenas()),
                "locks": _locks(server),
            }
        return found | self._at_the_broker()

    def has_swept(self) -> bool:
        """Whether the spared gateway has opened its copies of state, as its first sweep with a broker does."""
        [pid] = self.gateways[SPARED_GATEWAY].frontend_pids()
        # A descriptor may be closed meanwhile.
        with suppress(OSError):
            return any(link.readlink().name == SKILLS for link in Path(f"/proc/{pid}/fd").iterdir())
        return False

    def grown(self) -> dict[str, int]:
        """Tasks, threads and descriptors of the processes that are never killed."""
        one = self.boxes[SPARED_BOX]
        assert one.bridge is not None
        [pid] = self.gateways[SPARED_GATEWAY].frontend_pids()
        counts = {f"{what} of the bridge": count for what, count in _counts(one.bridge.pid).items()}
        counts |= {f"{what} of the gateway": count for what, count in _counts(pid).items()}
        counts |= {
            f"{what} of the worker": count for what, count in _counts(one.server.workers[0].pid).items()
        }
        return counts | {"tasks of the bridge": one.tasks()}

    def _at_the_broker(self) -> dict[str, Any]:
        """Messages and consumers by stream, keys by bucket, subscriptions by connection."""
        with urlopen(f"http://127.0.0.1:{self._pages}/connz?subs=1&limit=4096", timeout=PATIENCE_S) as page:
            connections = json.load(page)["connections"]
        counts = sorted((_kind(each["name"]), each["subscriptions"]) for each in connections)
        return {"connections": counts, **asyncio.run(_stored(self.broker.url))}


def _kind(name: str) -> str:
    """What a connection is for: its name without the id of a life."""
    kind, *rest = name.split()
    return f"{kind} {rest[0]}" if kind == "bridge" else kind


def _paths(server: Server) -> RunPaths:
    return RunPaths(server.run_dir, server.environment["PENSTOCK_RUN__INSTANCE"])


def _locks(server: Server) -> list[str]:
    """Locks of living processes, but for that of the figures over time, which one frontend takes later."""
    held = (path.name for path in server.run_dir.glob("*.lock") if is_held(path))
    return sorted(name for name in held if name != "history.lock")


def _inputs_used(server: Server) -> float:
    return sum_of(metrics.render(_paths(server)).decode(), "penstock_input_shm_bytes_used")


def _counts(pid: int) -> dict[str, int]:
    """Threads and descriptors of a process."""
    return {
        what: len(list(Path(f"/proc/{pid}/{folder}").iterdir()))
        for what, folder in (("threads", "task"), ("descriptors", "fd"))
    }


async def _stored(url: str) -> dict[str, Any]:
    client = await nats.connect(url)
    try:
        stream = client.jetstream(timeout=PATIENCE_S)
        streams, keys = {}, {}
        for info in await stream.streams_info():
            name = str(info.config.name)
            consumers = sorted(it.name for it in await stream.consumers_info(name) if it.config.durable_name)
            if name.startswith("KV_"):
                bucket = await stream.key_value(name.removeprefix("KV_"))
                with suppress(NoKeysError):
                    keys[name] = sorted(await bucket.keys())
                streams[name] = consumers
            else:
                pending = sum(it.num_ack_pending or 0 for it in await stream.consumers_info(name))
                streams[name] = [*consumers, f"{info.state.messages} messages", f"{pending} pending"]
        return {"streams": streams, "keys": keys}
    finally:
        await client.close()


class LargeClients:
    """Clients that get results of `LARGE_ROWS` MiB, one of them also sends inputs that are too large for a message."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self.answered, self.wrong = 0, list[str]()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(port, long), daemon=True)
            for port in ports.values()
            for long in (False, True)
        ]

    def __enter__(self) -> LargeClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S * 3)
            assert not thread.is_alive(), "a client hangs"

    def _run(self, port: int, long: bool) -> None:
        turn = 0
        while not self._end.is_set():
            turn += 1
            text = f"turn {turn} " + ("x" * LARGE_NBYTES if long else "")
            # The history judges failures. A gateway that is being killed refuses or breaks connections here, too.
            with suppress(OSError, http.client.HTTPException):
                self._call(port, [text] * LARGE_ROWS)
            self._end.wait(0.05)

    def _call(self, port: int, texts: list[str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            body = json.dumps({"items": [{"text": text, "id": str(at)} for at, text in enumerate(texts)]})
            headers = {"Accept": "application/msgpack", "Content-Type": "application/json"}
            connection.request("POST", "/v1/encode/fake/wide", body, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status == 200:
            with self._lock:
                self.answered += 1
                if len(data) < LARGE_ROWS << 20:
                    self.wrong.append(f"an answer of {len(data)} bytes")


@contextmanager
def killed(place: Path, count: int, seed: int) -> Iterator[Killed]:
    """A cluster that is whole."""
    with ExitStack() as stack:
        pages = free_port()
        one = stack.enter_context(broker(place / "broker", more=f'http: "127.0.0.1:{pages}"'))
        http_ = {"cluster.transfer_bind": "127.0.0.1:0"}
        of_boxes = {"cluster.keep_results_s": 5, "worker.count": 2, **http_}
        boxes = {
            name: stack.enter_context(
                box(place / name, name, [one.url], models=MODELS, settings=of_boxes, counts_tasks=True)
            )
            for name in "abc"[:count]
        }
        gateways = {
            name: stack.enter_context(gateway(place / name, [one.url], {"cluster.lane": lane, **http_}))
            for name, lane in LANES.items()
        }
        found = Killed(one, pages, boxes, gateways, seed)
        wait_until(found.is_whole, 240, "the whole cluster")
        yield found


@pytest.mark.long
def test_random_kills_leave_no_block_task_consumer_key_or_file(tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_CLUSTER_SEED", "29"))
    with killed(tmp_path, rounds(short=2, long=3), seed) as cluster:
        ports = {name: server.port for name, server in cluster.gateways.items()}
        # Pools of threads and kept connections grow with the first requests.
        with Clients(cluster.history, ports, each=3, seed=seed + 1) as clients, LargeClients(ports) as large:
            wait_until(lambda: min(map(clients.answered, ports)) > 30 and large.answered > 12, what="traffic")
        wait_until(cluster.has_swept, 240, "a sweep of the state")
        before, counts = settled(cluster), cluster.grown()
        drawn = cluster.schedule(rounds(short=8, long=200))
        with Clients(cluster.history, ports, each=3, seed=seed) as clients, LargeClients(ports) as large:
            for kill in drawn:
                seen = {name: clients.answered(name) for name in ports}
                for name, count in seen.items():
                    wait_until(lambda at=name, n=count: clients.answered(at) > n + 3, what="traffic")  # type: ignore[misc]
                cluster.pause()
                kill()
                wait_until(cluster.is_whole, 240, what=f"the whole cluster after a kill: {kill.__name__}")
        assert not cluster.history.violations(), (seed, cluster.history.violations()[:20])
        assert large.answered > len(drawn) and not large.wrong, (large.answered, large.wrong[:5])
        after = settled(cluster)
        assert after == before, differences(before, after)
        grown = {name: count - counts[name] for name, count in cluster.grown().items()}
        assert max(grown.values()) <= MOST_GROWN, grown


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """The values that differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(before.keys() | after.keys())
        return [line for at in names for line in differences(before.get(at), after.get(at), f"{path}/{at}")]
    return [] if before == after else [f"{path}: {before} before, {after} after"]


def settled(cluster: Killed) -> dict[str, Any]:
    """What is there once it does not change any more, and nothing runs."""
    found = [cluster.left()]

    def is_settled() -> bool:
        found.append(cluster.left())
        quiet = all(found[-1][name]["bridge"] == "0 items, 0 answers kept" for name in cluster.boxes)
        return quiet and found[-1] == found[-2]

    wait_until(is_settled, 120, "a cluster at rest")
    return found[-1]
