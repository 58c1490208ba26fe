"""Every series of a bridge is there from the start, and moves with the items of the box."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from frontend.bridge.meter import Meter
from ipc.errors import ModelNotLoaded
from ipc.metrics.cluster import BRIDGE, CONFIG_RESULTS, BridgeMetrics
from ipc.metrics.families import UNKNOWN
from tests.unit.frontend.bridge.test_intake import Stage


def values(metrics: BridgeMetrics) -> dict[str, float]:
    """Value of each sample by its text, of all families."""
    found: dict[str, float] = {}
    for family in BRIDGE:
        registry = CollectorRegistry()
        registry.register(getattr(metrics, family.attribute))
        for line in generate_latest(registry).decode().splitlines():
            if not line.startswith("#") and "_created" not in line and "_bucket" not in line:
                sample, _, value = line.rpartition(" ")
                found[sample] = float(value)
    return found


def test_every_series_exists_at_zero_and_moves() -> None:
    metrics = BridgeMetrics()
    metrics.touch(["m"])
    before = values(metrics)
    assert not any(before.values()) and {name.partition("{")[0] for name in before} >= {
        family.name + {"counter": "_total", "gauge": "", "histogram": "_count"}[family.kind]
        for family in BRIDGE
    }

    async def scene() -> None:
        meter = Meter(metrics, {"m"})
        stage = Stage(meter=meter)
        ack = "$JS.ACK.W.c.1.2.3.4.0"
        stage.intake.take(stage.item(), ack, 0.5)
        await stage.turn()
        held = values(metrics)
        assert held["sie_worker_inflight_batches"] == 1
        stage.engine.free.set()
        await stage.turn()
        stage.engine.error = ModelNotLoaded("no")
        stage.intake.take(stage.item(2), ack, 0.0)
        await stage.turn()
        stage.intake.draining = True
        stage.intake.take(stage.item(3), ack, 0.0)
        meter.untold(2)
        meter.disagrees("m")
        for result in CONFIG_RESULTS:
            meter.config_message(result)

    asyncio.run(scene())
    after = values(metrics)
    assert after["sie_worker_inflight_batches"] == 0
    assert after['sie_pull_loop_queue_wait_seconds_sum{model="m"}'] == 0.5
    assert after["sie_worker_messages_naked_total"] == 1 and after["sie_worker_messages_acked_total"] == 2
    assert after['sie_pull_loop_nak_unloaded_total{model="m"}'] == 1
    assert after['sie_pull_loop_model_loads_total{model="m"}'] == 2
    moved = {name for name in after if after[name] != before.get(name, 0.0)}
    still = {
        name for name in before if name not in moved and '"score"' not in name and '"extract"' not in name
    }
    assert still <= {"sie_worker_inflight_batches"}, still


def test_strangers_cannot_invent_labels() -> None:
    metrics = BridgeMetrics()
    meter = Meter(metrics, {"m"})
    for number in range(100):
        meter.ended(f"no/such-{number}", f"odd-{number}", 0.1)
        meter.lacks(f"no/such-{number}")
    labels = {name for name in values(metrics) if "{" in name}
    assert len(labels) == 3 and all(UNKNOWN in name for name in labels)
