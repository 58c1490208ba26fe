"""`penstock bench` without a server: percentiles, schedules, lines, answers that fail, wrong flags."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from penstock.bench import figures
from penstock.bench.figures import Sample, percentile
from penstock.bench.load import Clock, Load, Refused, Requests, protocol_of
from penstock.cli import main
from penstock.http_client import Asker, Reply, Unreachable

_ONE_FAILED = {"items": [{}, {"error": {"code": "X"}}]}


class HandClock(Clock):
    """Time passes only in `sleep`."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


class Answers(Asker):
    """Gives the same reply to every request, and keeps the bodies."""

    def __init__(self, reply: Reply | None) -> None:
        super().__init__("http://server", "", 1, 1.0)
        self._reply, self.bodies = reply, list[bytes]()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        self.bodies.append(body)
        if self._reply is None:
            raise Unreachable("nobody there")
        return self._reply


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)])
def test_percentiles_are_values_that_occurred(percent: float, value: float) -> None:
    assert percentile(range(1, 11), percent) == value


def test_an_open_loop_counts_from_when_requests_are_due() -> None:
    clock, sent = HandClock(), list[tuple[float, float]]()

    async def send(due: float) -> bool:
        sent.append((due - 100, clock.now() - 100))
        if len(sent) == 1:
            clock.at += 1.1
        return True

    asyncio.run(Load(2.0, 8, None, 2.0).run(send, clock))
    assert [due for due, _ in sent] == [0.0, 0.5, 1.0, 1.5]
    # The second request was due while the clock stood still for the first; the last one is in time again.
    assert max(at - due for due, at in sent) >= 0.6 and sent[-1][1] >= 1.5


@pytest.mark.parametrize("requests", [1, 3, 7])
def test_a_schedule_ends_with_the_number_of_requests(requests: int) -> None:
    assert list(Load(4.0, 8, requests, None).due(4.0)) == [number / 4 for number in range(requests)]


def test_a_closed_loop_holds_its_number_of_requests() -> None:
    open_now, most, sent = 0, 0, 0

    async def send(due: float) -> bool:
        nonlocal open_now, most, sent
        open_now, sent = open_now + 1, sent + 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return True

    asyncio.run(Load(None, 3, 10, None).run(send, HandClock()))
    assert (most, sent) == (3, 10)


def test_a_closed_loop_pauses_after_failures_and_ends() -> None:
    clock, sent = HandClock(), 0

    async def send(due: float) -> bool:
        nonlocal sent
        sent += 1
        return False

    asyncio.run(Load(None, 1, None, 1.0).run(send, clock))
    assert 10 <= sent <= 11


def test_figures_count_requests_that_succeeded() -> None:
    samples = [
        Sample(0.010, tokens=5),
        Sample(0.030, tokens=7, first_s=0.02, gaps_s=[0.004]),
        Sample(9.0, "503"),
    ]
    found = figures.figures(samples, 2.0, 4)
    assert (found["requests"], found["succeeded"], found["errors"]) == (3, 2, {"503": 1})
    assert (found["requests_per_s"], found["items_per_s"], found["tokens_per_s"]) == (1.0, 4.0, 6.0)
    assert found["latency_ms"] == {"p50": 10.0, "p90": 30.0, "p99": 30.0, "max": 30.0}
    text = "\n".join(figures.lines(found))
    assert "2 requests succeeded, 1 failed, in 2.00 s" in text and "failed: 503, 1 times" in text
    assert "first token     20.00" in text and "between tokens  4.00" in text


def test_figures_without_a_success_have_no_latency() -> None:
    found = figures.figures([Sample(1.0, "404")], 1.0, 1)
    assert found["latency_ms"] is None and found["tokens_per_s"] is None
    assert "0.0 requests/s, 0.0 items/s" in list(figures.lines(found))


@pytest.mark.parametrize("values", [[0.01], [0.01, 0.01], [0.001, 0.002, 0.5], [0.0, 1.0]])
def test_a_histogram_has_all_values(values: list[float]) -> None:
    rows = list(figures.histogram(values))
    assert sum(int(row.split()[3]) for row in rows) == len(values)


def _requests(reply: Reply | None, **more: object) -> tuple[Requests, Answers, list[Sample]]:
    flags = {"protocol": "embeddings", "model": "m", "items": 2, "tokens": 4, "text": None} | more
    asker, samples = Answers(reply), list[Sample]()
    return Requests(asker, argparse.Namespace(**flags), HandClock().now, samples), asker, samples


@pytest.mark.parametrize(
    ("reply", "protocol", "error"),
    [
        (Reply(429, b""), "embeddings", "429"),
        (Reply(200, b"no JSON"), "embeddings", "answer cannot be read"),
        (None, "rerank", "no answer"),
        (Reply(200, msgspec.msgpack.encode(_ONE_FAILED)), "encode", "200 with failed items"),
    ],
)  # fmt: skip
def test_failures_are_told_apart(reply: Reply | None, protocol: str, error: str) -> None:
    requests, _, samples = _requests(reply, protocol=protocol)
    assert not asyncio.run(requests.send(99.0))
    assert (samples[0].error, samples[0].latency_s) == (error, 1.0)


def test_texts_differ_and_tokens_are_read() -> None:
    requests, asker, samples = _requests(Reply(200, b'{"usage": {"total_tokens": 11}, "data": []}'))
    assert asyncio.run(requests.send(100.0)) and samples[0].tokens == 11
    first, second = msgspec.json.decode(asker.bodies[0])["input"]
    assert first != second and len(first.split()) == 4


def test_a_refused_first_request_ends_the_run() -> None:
    requests, _, samples = _requests(Reply(404, b'{"error": {"message": "no such model"}}'))
    with pytest.raises(Refused, match="404: no such model"):
        asyncio.run(requests.warm())
    assert samples == []


def test_a_server_that_is_not_there_is_asked_once() -> None:
    requests, asker, _ = _requests(None)
    with pytest.raises(Unreachable):
        asyncio.run(requests.warm())
    assert len(asker.bodies) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--protocol", "encode"], "--protocol encode needs the name of a model"),
        (["m", "--connections", "0"], "--connections 0: expected a number from 1 to 1024"),
        (["m", "--rate", "nan"], "--rate nan: expected"),
        (["m", "--requests", "-1"], "--requests -1: expected"),
        (["m", "--rate", "100000", "--duration", "100"], "above 1000000 requests"),
        (["--protocol", "chat", "--items", "2"], "--items 2: a request of chat has one text"),
        (["m", "--url", "nowhere"], "no address of a server"),
    ],
)
def test_wrong_flags_exit_with_3(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replies", "protocol"),
    [
        ([Reply(200, b'{"outputs": []}')], "chat"),
        ([Reply(200, b'{"outputs": ["dense", "score"]}')], "encode"),
        ([Reply(200, b'{"outputs": ["score"]}')], "score"),
        ([Reply(404, b""), Reply(200, b"{}")], "kserve"),
    ],
)
def test_the_model_decides_the_protocol(replies: list[Reply], protocol: str) -> None:
    asker: Any = SimpleNamespace(url="http://s", get=AsyncMock(side_effect=replies))
    assert asyncio.run(protocol_of(asker, "m")) == protocol


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([Reply(200, b'{"outputs": ["json"]}')], "m extracts"),
        ([Reply(200, b"no")], "choose a --protocol"),
        (
            [Reply(404, b'{"error": "no m"}'), Reply(404, b"")],
            "404: no m; name a model that is served there, or choose a --protocol",
        ),
    ],
)
def test_a_model_without_a_load_is_told(replies: list[Reply], why: str) -> None:
    asker: Any = SimpleNamespace(url="http://s", get=AsyncMock(side_effect=replies))
    with pytest.raises(Refused, match=why):
        asyncio.run(protocol_of(asker, "m"))
