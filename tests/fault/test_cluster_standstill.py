"""A whole box that stands still until gateways have forgotten the box, and then goes on."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from frontend.cluster.boxes import SHOWN_S
from tests.fakes.holding import holding
from tests.harness.broker import broker
from tests.harness.cluster import box, gateway_over, held, living, serves
from tests.harness.load import Load
from tests.harness.server import wait_until

MOST_S = 2 * SHOWN_S


@pytest.mark.long
def test_a_box_that_stands_still_for_a_minute_costs_no_request_and_works_again(tmp_path: Path) -> None:
    with (
        broker(tmp_path / "broker") as one,
        box(tmp_path / "a", "a", [one.url]) as a,
        box(tmp_path / "b", "b", [one.url]) as b,
        gateway_over(tmp_path / "near", [one.url], {"a", "b"}, {"cluster.lane": "auto"}) as near,
        holding(tmp_path) as hold,
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(near.post, "/v1/encode/fake/echo", held(hold, f"{at}")) for at in range(2)]
        wait_until(lambda: a.items and b.items, what="an item at each box")
        assert a.bridge is not None
        pids = [a.bridge.pid, *a.server.pids()]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: living(near) == {"b"}, what="the silence of box a")
            hold.unlink()
            assert [each.result().status for each in waiting] == [200, 200]
            with Load(near.port, 3) as load:
                shown = {"Accept": "application/json"}
                wait_until(
                    lambda: b'"a"' not in near.request("GET", "/health", headers=shown).body,
                    MOST_S,
                    "a gateway that has forgotten box a",
                )
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                wait_until(lambda: living(near) == {"a", "b"}, what="box a again")
                before = load.done
                wait_until(lambda: load.done > before + 30, what="traffic at both boxes")
                outcome = load.stop()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert not outcome.failed, (outcome.statuses, outcome.broken, outcome.bodies, outcome.wrong)
        b.end(signal.SIGTERM)
        wait_until(lambda: living(near) == {"a"}, what="the end of box b")
        assert serves(near), "box a alone"
        b.start_bridge()
        wait_until(lambda: living(near) == {"a", "b"}, what="box b again")
