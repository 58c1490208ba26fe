"""Random deaths and standstills while clients store objects at two gateways: each reads what it wrote, at both.

The schedule is drawn as in `test_cluster_history`; `TEST_CLUSTER_SEED` names the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fault import rounds
from tests.fault.test_cluster_history import LANES, Cluster, schedule, seed
from tests.harness.agent_runs import MODEL
from tests.harness.broker import broker
from tests.harness.cluster import box, gateway, living
from tests.harness.history import History, Span
from tests.harness.server import wait_until
from tests.harness.state_history import Answer, StateClient, StateClients, StateHistory, StoredFile
from tests.tiny import chat_models

__all__ = ["seed"]


class ChatCluster(Cluster):
    """The cluster with a model of text."""

    def is_whole(self) -> bool:
        """Whether every gateway hears every box, and stores a response."""
        for server in self.gateways.values():
            if living(server) != set(self.boxes):
                return False
            asked = {"model": MODEL, "input": "x", "max_output_tokens": 1}
            answer = server.post("/v1/responses", asked)
            if answer.status != 200 or server.get(f"/v1/responses/{answer.json()['id']}").status != 200:
                return False
        return True


@pytest.fixture
def cluster(tmp_path: Path, seed: int) -> Iterator[ChatCluster]:
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", tmp_path / "chatml", context=4096))
    with ExitStack() as stack:
        one = stack.enter_context(broker(tmp_path / "broker"))
        boxes = {
            name: stack.enter_context(box(tmp_path / name, name, [one.url], models=(MODEL,), catalog=catalog))
            for name in "ab"
        }
        gateways = {
            name: stack.enter_context(gateway(tmp_path / name, [one.url], {"cluster.lane": lane}))
            for name, lane in LANES.items()
        }
        found = ChatCluster(one, boxes, gateways, random.Random(seed))
        wait_until(found.is_whole, what="the whole cluster")
        yield found


@pytest.mark.long
def test_each_client_reads_what_it_wrote_at_both_gateways_whatever_dies(
    cluster: ChatCluster,
    seed: int,
) -> None:
    faults = cluster.faults
    drawn = schedule(list(faults), rounds(short=len(faults), long=200), seed)
    history = StateHistory(cluster.history)
    ports = {name: server.port for name, server in cluster.gateways.items()}
    with StateClients(history, ports, MODEL, 4, seed):
        for fault in drawn:
            before = {name: history.done.get(name, 0) for name in ports}
            for name, count in before.items():
                wait_until(lambda at=name, n=count: history.done.get(at, 0) > n + 10, what="traffic")  # type: ignore[misc]
            faults[fault]()
            wait_until(cluster.is_whole, what=f"the whole cluster after: {fault}")
    found = [*history.violations(), *map(str, cluster.history.spans)]
    assert not history.violations(), "\n".join([f"seed {seed}", *drawn, *found])
    assert sum(history.done.values()) > 20 * len(drawn)
    for server in cluster.gateways.values():
        wait_until(lambda at=server: at.metric("penstock_requests_in_flight") == 0, what="no request")  # type: ignore[misc]


def answered(at: float, status: int, data: bytes = b"", retry_after: str = "") -> Answer:
    return Answer("near", at, at + 1.0, status, data, retry_after)


@pytest.mark.parametrize(
    ("gone", "answer", "says"),
    [
        ("no", answered(1, 200, b"x"), ""),
        ("no", answered(1, 200, b"y"), "another content"),
        ("no", answered(1, 404), "is lost"),
        ("maybe", answered(1, 404), ""),
        ("maybe", answered(1, 200, b"x"), ""),
        ("yes", answered(1, 404), ""),
        ("yes", answered(1, 200, b"x"), "deleted file"),
        ("no", answered(1, 500), "500"),
        ("no", answered(1, 503), "503"),
        ("no", answered(1, 0), "a download: 0"),
    ],
)
def test_a_history_of_state_tells_each_violation(
    monkeypatch: pytest.MonkeyPatch, gone: str, answer: Answer, says: str
) -> None:
    history = StateHistory(History())
    client = StateClient(history, {"near": 1}, MODEL, 1, 1)
    monkeypatch.setattr(client, "_call", lambda *args: answer)
    client._read(StoredFile("f", b"x", gone), "near")
    found = history.violations()
    assert found == [] if not says else (len(found) == 1 and says in found[0]), found


@pytest.mark.parametrize(
    ("answer", "excuse"),
    [
        (answered(1, 503, retry_after="1"), "broker"),
        (answered(1, 0), "gateway near"),
        (answered(1, 200, b"x"), "broker"),
    ],
)
def test_a_history_of_state_excuses_what_a_fault_may_do(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, excuse: str
) -> None:
    history = StateHistory(History())
    client = StateClient(history, {"near": 1}, MODEL, 1, 1)
    monkeypatch.setattr(client, "_call", lambda *args: answer)
    client._read(StoredFile("f", b"x", "yes"), "near")
    assert len(history.violations()) == 1
    history.history.spans = [Span(excuse, 0.0, 1.5), Span("gateway far", 0.0, 9.0)]
    assert not history.violations()
    history.history.spans[0].ended_s = 0.5
    assert len(history.violations()) == 1
