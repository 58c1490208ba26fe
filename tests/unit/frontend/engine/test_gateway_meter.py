"""Demand and leases of a gateway by machine profile and bundle. The clock is moved by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from frontend.engine.boxes import DEMAND_S, GatewayMeter
from frontend.engine.interface import BoxView
from frontend.scope import Choice
from ipc.catalog.entries import AdapterSource, Catalog, ModelEntry
from ipc.metrics.cluster import GATEWAY, POOLS, GatewayMetrics


class Stage:
    """A meter over one box `a` of the machine profile `l4`."""

    def __init__(self, configured: Sequence[str] = ()) -> None:
        self.now_s, self.counts = 0.0, dict[tuple[str, str], float]()
        directory: Any = SimpleNamespace(
            catalog=Catalog(()),
            workers=list,
            boxes=lambda: [BoxView("a", "default", "default", True, False, profile="l4")],
        )
        self.metrics = GatewayMetrics()
        self.meter = GatewayMeter(
            self.metrics, directory, lambda: self.counts, configured, lambda: self.now_s
        )
        self.meter.report()

    def ended(self, profile: str, *, error: str = "", worker: str = "", bundle: str = "") -> None:
        scope: Any = SimpleNamespace(
            operation="encode",
            worker=worker,
            error=error,
            choice=Choice(profile=profile, bundle=bundle),
            phases={"total": 1.0},
        )
        self.meter.finished(scope, "503" if error else "200")

    def value(self, family: str, *labels: str) -> float:
        self.meter.report()
        return float(getattr(self.metrics, family).labels(*labels)._value.get())


def test_a_request_without_a_box_is_demand_of_its_profile_for_two_minutes() -> None:
    stage = Stage(configured=("h100", "l4"))
    before = stage.value("demand", "h100", "default")
    stage.ended("h100", error="PROVISIONING")
    stage.now_s = 60.0
    stage.ended("h100", error="PROVISIONING", bundle="no-such-bundle")
    assert (before, stage.value("demand", "h100", "default")) == (0, 2)
    stage.now_s = DEMAND_S + 1
    assert stage.value("demand", "h100", "default") == 1
    stage.now_s = DEMAND_S + 61
    assert stage.value("demand", "h100", "default") == 0


def test_a_request_that_a_box_of_another_profile_served_is_demand() -> None:
    stage = Stage(configured=("h100", "l4"))
    stage.ended("h100", worker="a/worker-0")
    stage.ended("l4", worker="a/worker-0")
    stage.ended("", worker="a/worker-0")
    assert stage.value("demand", "h100", "default") == 1
    assert stage.value("demand", "l4", "default") == stage.value("demand", "", "default") == 0


def test_boxes_with_a_model_are_counted_once_each_in_one_look_for_all_models() -> None:
    looks: list[int] = []

    def worker(box: str, **states: str) -> Any:
        models = {model: SimpleNamespace(state=state) for model, state in states.items()}
        return SimpleNamespace(box=box, models=models, device="cpu", stats=None)

    def workers() -> list[Any]:
        looks.append(1)
        return [worker("a", m0="loaded", m1="loading"), worker("a", m0="loaded"), worker("gone", m0="loaded")]

    stage = Stage()
    directory: Any = stage.meter._directory
    directory.workers = workers
    entries = tuple(ModelEntry(f"m{number}", AdapterSource()) for number in range(20))
    directory.catalog.replace(Catalog(entries))
    stage.meter.report()
    assert len(looks) == 1
    assert [stage.value("model_workers", f"m{number}") for number in range(3)] == [1, 0, 0]


def test_a_profile_that_only_a_request_names_is_no_label() -> None:
    stage = Stage()
    stage.ended("invented", error="PROVISIONING")
    assert stage.value("demand", "", "default") == 1
    assert {
        sample.labels["machine_profile"] for each in stage.metrics.demand.collect() for sample in each.samples
    } == {""}


def test_boxes_that_pools_need_are_a_gauge_that_falls_again() -> None:
    stage = Stage()
    stage.counts["leased", "l4 default"] = 2
    stage.counts["leased", "h100 big"] = 1
    assert stage.value("leased", "l4", "default") == 2
    assert stage.value("leased", "", "big") == 1, "no box has that profile, and no setting names the profile"
    stage.counts["leased", "l4 default"] = 1
    del stage.counts["leased", "h100 big"]
    assert stage.value("leased", "l4", "default") == 1 and stage.value("leased", "", "big") == 0


OF_BOXES = {"model_workers", "box_queue", "box_memory"}
"""Families whose labels are boxes or models of boxes: they begin with the first box."""


def test_every_family_of_a_gateway_is_there_at_zero_from_the_first_scrape() -> None:
    metrics = GatewayMetrics()
    metrics.touch()
    shown = {
        family.attribute: [
            sample.value
            for each in getattr(metrics, family.attribute).collect()
            for sample in each.samples
            if not sample.name.endswith("_created")
        ]
        for family in (*GATEWAY, *POOLS)
    }
    assert {name for name, values in shown.items() if not values} == OF_BOXES
    assert not any(value for values in shown.values() for value in values)


def test_what_requests_items_and_boxes_do_moves_its_series() -> None:
    stage = Stage()
    worker: Any = SimpleNamespace(
        box="a",
        models={},
        device="cpu",
        stats=SimpleNamespace(queues=[SimpleNamespace(items=3), SimpleNamespace(items=4)], memory_used=5),
    )
    directory: Any = stage.meter._directory
    directory.workers = lambda: [worker]
    stage.ended("", worker="a/worker-0")
    stage.ended("", error="PROVISIONING")
    stage.ended("", error="QUEUE_FULL")
    stage.counts |= {
        ("lane", "queue"): 2,
        ("lane", "direct"): 1,
        ("beats_missed", "box"): 3,
        ("claims", ""): 4,
    }
    assert stage.value("box_queue", "a", "l4", "default") == 7
    assert stage.value("box_memory", "a", "l4", "default") == 5
    assert stage.value("requests", "encode", "200", "l4") == 1
    assert stage.value("provisioning", "") == stage.value("rejected", "", "default", "queue_full") == 1
    assert stage.metrics.latency.labels("encode", "l4")._sum.get() == 0.001
    assert (stage.metrics.published._value.get(), stage.value("lane", "direct")) == (2, 1)
    assert (stage.value("beats_missed", "box"), stage.metrics.claims._value.get()) == (3, 4)
