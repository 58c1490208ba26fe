"""The models of all boxes, without a broker and with one."""

from __future__ import annotations

import asyncio

import pytest

from frontend.cluster.boxes import Boxes
from frontend.cluster.directory import ClusterModels
from frontend.cluster.takers import MOST_REMEMBERED
from frontend.engine.boxes import by_boxes, gpu_of
from frontend.engine.planning import default_model
from frontend.generation.requests import find_generator
from frontend.scope import Choice
from frontend.tensors.models import VersionStates
from ipc import deadline
from ipc.catalog.entries import Catalog, DirectorySource, HubSource, ModelEntry
from ipc.catalog.model_config import ModelConfig
from ipc.catalog.repository import VersionEntry
from ipc.errors import DependencyConflict, PenstockError, Provisioning
from ipc.settings import Cluster, Settings
from ipc.wire.cluster import VERSION, BoxBeat, BoxHealth
from ipc.wire.cluster_names import row_key
from ipc.wire.cluster_rows import BoxRow, ModelRow, WorkerRow
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import Stats


@pytest.mark.parametrize(("up", "code"), [(True, "PROVISIONING"), (False, "QUEUE_UNAVAILABLE")])
def test_whoever_knows_no_box_is_told_whether_there_is_a_broker(up: bool, code: str) -> None:
    models = ClusterModels(Catalog(()), Boxes(Cluster()), 5.0, lambda: up)
    with pytest.raises(PenstockError) as unknown:
        models.find("m")
    with pytest.raises(PenstockError) as unloaded:
        asyncio.run(models.ensure_loaded("m", deadline.after(30)))
    with pytest.raises(PenstockError) as of_text:
        find_generator("m", models, Settings())
    with pytest.raises(PenstockError) as unnamed:
        find_generator(None, models, Settings())
    with pytest.raises(PenstockError) as of_vectors:
        default_model(models, Settings(), ("dense",))
    codes = {raised.value.code for raised in (unknown, unloaded, of_text, unnamed, of_vectors)}
    assert codes == {models.why_unavailable("m").code} == {code}


class Stage:
    """The directory of a gateway that hears boxes; the clock of signs of life is moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.boxes = Boxes(Cluster(), lambda: self.now_ns)
        self.models = ClusterModels(Catalog(()), self.boxes, 0.0, lambda: True)
        self.models.read({})

    def box(self, name: str, bundle: str, *models: str, device: str = "cpu") -> None:
        """A box of a bundle lives, and has loaded these models; a variant has the name of its entry before a colon."""
        entries = sorted({model.partition(":")[0] for model in models})
        worker = WorkerRow("worker-0", 0, "ready", True, True, device, 1)
        self.beat(name)
        for entry in entries:
            states = [ModelStatus(each, "loaded") for each in models if each.partition(":")[0] == entry]
            row = ModelRow(VERSION, f"life-{name}", None, None, {"worker-0": states})
            self.models.take(row_key(name, entry), row)
        self.models.take(
            name, BoxRow(VERSION, name, f"life-{name}", "default", bundle, [worker], True, entries)
        )

    def beat(self, name: str, *, pool: str = "default", draining: bool = False, room_s: float = 1.0) -> None:
        """A sign of life of a box."""
        self.boxes.take(BoxBeat(VERSION, name, f"life-{name}", pool, 1, draining, room_s, 0.0))

    def loaded(self, model: str, bundle: str) -> ModelStatus:
        return asyncio.run(self.models.ensure_loaded(model, deadline.after(30), (), Choice(bundle=bundle)))


@pytest.mark.parametrize("model", ["org/m", "org/m:fast", "org/m:no-such-variant"])
def test_a_bundle_without_the_model_is_a_conflict_that_names_the_others(model: str) -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m", "org/m:fast")
    stage.box("b", "big", "org/m", "org/m:fast")
    stage.box("c", "wanted", "org/other")
    with pytest.raises(DependencyConflict) as conflict:
        stage.loaded(model, "wanted")
    assert conflict.value.detail == {"compatible_bundles": ["big", "plain"]}
    assert "'wanted'" in conflict.value.message and f"'{model}'" in conflict.value.message


def test_a_box_of_the_bundle_that_is_only_away_is_no_conflict() -> None:
    stage = Stage()
    stage.box("a", "wanted", "org/m")
    for _ in range(3):
        stage.now_ns += 400_000_000
        stage.boxes.tick()
    assert not stage.boxes.is_alive("life-a")
    stage.box("b", "plain", "org/m")
    with pytest.raises(Provisioning):
        stage.loaded("org/m", "wanted")
    assert stage.loaded("org/m", "plain").state == "loaded"


def test_a_model_that_no_box_has_and_a_request_without_a_bundle_are_no_conflict() -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m")
    with pytest.raises(Provisioning):
        stage.loaded("org/unknown", "wanted")
    assert stage.loaded("org/m", "").state == stage.loaded("org/m", "plain").state == "loaded"


def test_a_model_that_a_box_has_unloaded_or_that_left_with_its_box_is_loaded_no_longer() -> None:
    stage, asked = Stage(), list[str]()

    async def ensure(model: str, *more: object) -> None:
        asked.append(model)
        raise Provisioning("nobody loads")

    stage.models.ensure = ensure
    stage.box("a", "plain", "org/m")
    assert [stage.loaded("org/m", "").state for _ in range(2)] == ["loaded"] * 2
    row = ModelRow(VERSION, "life-a", None, None, {"worker-0": [ModelStatus("org/m", "available")]})
    stage.models.take(row_key("a", "org/m"), row)
    with pytest.raises(Provisioning):
        stage.loaded("org/m", "")
    assert asked == ["org/m"]
    stage.box("a", "plain", "org/m")
    assert stage.loaded("org/m", "").state == "loaded"
    for _ in range(3):
        stage.now_ns += 400_000_000
        stage.boxes.tick()
    with pytest.raises(Provisioning):
        stage.loaded("org/m", "")


def test_a_request_goes_to_the_box_whose_machine_profile_pages_show() -> None:
    stage = Stage()
    large = Stats(0, 80 << 30, 0, 0.0, 0.0, None, None, 0, 0, 0, 0, 0, 0, [], [])
    for name in ("a", "b"):
        stage.box(name, "plain", "org/m", device="NVIDIA A100")
    stage.models.told(BoxHealth(VERSION, "b", "life-b", {"worker-0": large}))
    by_box = by_boxes(stage.models)
    shown = {box.name: gpu_of(box, by_box[box.name]) for box in stage.models.boxes()}
    assert shown == {"a": "a100-40gb", "b": "a100-80gb"}
    for box, profile in shown.items():
        chosen = stage.models.takers.choose("org/m", (), Choice(profile=profile))
        assert chosen is not None and chosen.name == box


def test_the_queue_is_for_models_that_all_boxes_of_the_pool_have() -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m", "org/only")
    stage.box("b", "plain", "org/m")
    assert stage.models.takers.queue_of("org/m", Choice()) == "plain"
    assert stage.models.takers.queue_of("org/only", Choice()) == "", (
        "box b would get items that it cannot run"
    )


def test_what_is_remembered_of_boxes_is_forgotten_with_each_change() -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m")
    stage.box("b", "plain", "org/m")
    takers, any_box = stage.models.takers, Choice()

    def may_have() -> tuple[str, str]:
        """The queue of a request, and the box that has no `items` yet."""
        box = takers.choose("org/m", ("life-a",))
        return takers.queue_of("org/m", any_box), box.name if box is not None else ""

    assert may_have() == ("plain", "b")
    stage.boxes.unheard(stage.boxes.by_name["b"])
    assert may_have() == ("plain", "")
    stage.beat("b")
    assert may_have() == ("plain", "b")
    stage.beat("b", pool="other")
    assert may_have() == ("plain", "")
    assert takers.queue_of("org/m", Choice("other")) == "plain"
    stage.beat("b", draining=True)
    assert takers.queue_of("org/m", Choice("other")) == ""
    stage.beat("b")
    stage.box("c", "special")
    assert may_have() == ("", "b"), "boxes of two bundles pull from two queues"


def test_choices_that_clients_make_up_are_not_all_remembered() -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m")
    for number in range(MOST_REMEMBERED + 1):
        choice = Choice(profile=f"made-up-{number}")
        assert stage.models.takers.choose("org/m", (), choice) is not None
        assert stage.models.takers.queue_of("org/m", choice) == "plain"
    assert len(stage.models.takers._found) == len(stage.models.takers._queues) == 1


@pytest.mark.parametrize(
    ("items", "room_s", "starved"),
    [
        ((27, 2, 20), 1.0, True),
        ((27, 2, 20), 0.0, False),
        ((17, 15, 16), 1.0, False),
        ((8, 3, 2), 1.0, True),
        ((5, 0, 5), 1.0, False),
        ((50,), 1.0, False),
    ],
)
def test_a_box_is_starved_with_half_of_the_items_of_others_and_room(
    items: tuple[int, ...], room_s: float, starved: bool
) -> None:
    stage = Stage()
    for name, count in zip("abc", items, strict=False):
        stage.box(name, "plain", "org/m")
        stage.beat(name, room_s=room_s)
        stage.boxes.by_name[name].items = {f"r.{number}" for number in range(count)}
    box = stage.models.takers.choose("org/m", ())
    assert box is not None and len(box.items) == min(items)
    assert stage.models.takers.is_starved(box, "org/m", Choice()) is starved


@pytest.mark.parametrize(("wait_s", "sent"), [(0.003, {"a": 2, "b": 2}), (0.5, {"a": 0, "b": 4})])
def test_items_between_two_signs_of_life_do_not_all_go_to_the_box_that_had_no_batch(
    wait_s: float, sent: dict[str, int]
) -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m")
    stage.box("b", "plain", "org/m")
    stage.boxes.by_name["a"].wait_s = wait_s
    for number in range(4):
        box = stage.models.takers.choose("org/m", ())
        assert box is not None
        box.items.add(f"r.{number}")
    assert {box.name: len(box.items) for box in stage.boxes} == sent


def test_a_configured_model_is_known_before_a_box_has_it_and_bundles_tell_their_adapters() -> None:
    stage = Stage()
    stage.box("a", "plain", "org/m")
    entry = ModelEntry("org/new", HubSource("org/new"))
    stage.models.configure({"org/new": entry})
    assert stage.models.find("org/new") == entry and stage.models.entry_at_boxes("org/new") is None
    [(box, bundle, adapters, told)] = stage.models.configured_boxes()
    assert (box, bundle, told) == ("a", "plain", None) and "dense" in adapters
    with pytest.raises(Provisioning):
        stage.loaded("org/new", "")


def versioned(stage: Stage, box: str, by_name: bool, wished: bool | None = None) -> None:
    """A box has version 1 of a model of a repository, which is not loaded."""
    worker = WorkerRow("worker-0", 0, "ready", True, True, "cpu", 1)
    entry = VersionEntry(
        id="m@1", source=DirectorySource("/m"), model="m", version=1, preload=False, config=ModelConfig("m")
    )
    states = {"worker-0": [ModelStatus("m@1", "available")]}
    row = ModelRow(VERSION, f"life-{box}", None, entry, states, wished=wished)
    stage.boxes.take(BoxBeat(VERSION, box, f"life-{box}", "default", 1, False, 1.0, 0.0))
    stage.models.take(row_key(box, "m@1"), row)
    stage.models.take(
        box,
        BoxRow(VERSION, box, f"life-{box}", "default", "plain", [worker], True, ["m@1"], by_name=by_name),
    )


@pytest.mark.parametrize(
    ("told", "wished"),
    [
        ({"a": False}, False),
        ({"a": False, "b": False}, False),
        ({"a": False, "b": None}, None),
        ({"a": False, "b": True}, True),
        ({"a": None}, None),
        ({}, None),
    ],
)
def test_a_model_is_unloaded_by_name_where_each_box_was_told_so(
    told: dict[str, bool | None], wished: bool | None
) -> None:
    stage = Stage()
    for box, each in told.items():
        versioned(stage, box, by_name=True, wished=each)
    assert stage.models.wished("m") is wished


def test_requests_load_a_version_that_no_box_has_unless_all_boxes_load_models_by_name() -> None:
    stage = Stage()
    states = VersionStates(stage.models, "none", stage.models.wished)
    assert stage.models.is_by_name("m@1") is None
    found = []
    for box, by_name in (("a", True), ("b", False)):
        versioned(stage, box, by_name)
        found.append((stage.models.is_by_name("m@1"), states.of(1, "m@1").state))
    assert found == [(True, "UNAVAILABLE"), (False, "LOADING")]
