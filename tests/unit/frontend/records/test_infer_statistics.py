"""Statistics of tensor requests: of all slots together, by batch size, and never going back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from frontend.records.statistics import Duration, RequestStatistics, ServerStatistics, StatisticsReader
from ipc.catalog.ids import NO_VERSION, split_id
from ipc.metrics import registry as metrics
from ipc.metrics.families import LARGEST_SIZE, size_label
from ipc.processes.paths import RunPaths, prepare_run_dir
from tests.harness.lives import live

MS = 1_000_000

METRICS = """
import sys
from pathlib import Path
from ipc.metrics import registry as metrics
from ipc.processes.paths import RunPaths

metrics.configure(RunPaths(Path(sys.argv[1]), "t"), sys.argv[2])
"""
FRONTEND = """
import sys
from pathlib import Path
from types import SimpleNamespace
from frontend.records.statistics import RequestCounters, Times
from ipc import errors
from ipc.metrics import registry as metrics
from ipc.processes.paths import RunPaths

class Catalog(dict):
    versions = {"add": (1, 3)}

paths = RunPaths(Path(sys.argv[1]), "t")
metrics.configure(paths, sys.argv[2])
families = metrics.FrontendMetrics()
families.touch(["add@1", "add@3", "org/name"], 1, "0")
recorder = RequestCounters(families, Catalog({"org/name": 1}))
"""
WORKER = """
import sys
from pathlib import Path
from ipc.metrics import registry as metrics
from ipc.processes.paths import RunPaths
from workers.scheduling.job import BatchCounts

metrics.configure(RunPaths(Path(sys.argv[1]), "t"), sys.argv[2])
families = metrics.WorkerMetrics(sys.argv[2])
families.touch(["add@1", "add@3"], "cpu")
executions = BatchCounts(families)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory that no server uses."""
    found = RunPaths(tmp_path, "t")
    prepare_run_dir(found)
    return found


def run(paths: RunPaths, slot: str, script: str, before: str = "") -> None:
    """A life of a frontend or worker slot, as a process of its own; `before` takes the place of the usual preamble."""
    program = (before or (WORKER if slot.startswith("worker") else FRONTEND)) + script
    live(program, str(paths.root), slot)


def read(paths: RunPaths) -> ServerStatistics:
    """What a frontend that asks now is told."""
    return asyncio.run(StatisticsReader(paths).read())


def test_requests_of_all_frontends_are_added_up(paths: RunPaths) -> None:
    before = int(time.time() * 1000)
    script = """
recorder.succeeded("add", 3, 4, Times(1_000_000, 2_000_000, 3_000_000, 4_000_000, 11_000_000))
recorder.succeeded("add", 3, 4, Times(1_000_001, 2_000_002, 3_000_003, 4_000_004, 11_000_005), "abc")
recorder.succeeded("add", 3, 1, Times(0, 0, 1, 0, 2), "def")
recorder.failed("add", 3, 2, errors.InvalidInput.code, 5_000)
recorder.failed("add", None, 0, errors.InvalidInput.code, 7_000)
recorder.succeeded("unheard", 1, 1, Times(0, 0, 1, 0, 2))
recorder.failed("unheard", 1, 1, errors.InvalidInput.code, 1)
recorder.called("status", 5_000)
"""
    for slot in ("frontend-0", "frontend-1"):
        run(paths, slot, script)
    found = read(paths)
    assert set(found.models) == {("add", 3), ("add", -1)}
    model = found.of("add", 3)
    assert before <= model.last_inference_ms <= time.time() * 1000
    assert (model.inference_count, model.execution_count) == (2 * 9, 0)
    four = RequestStatistics(
        compute_input=Duration(4, 2 * 4_000_002),
        compute_infer=Duration(4, 2 * 6_000_003),
        compute_output=Duration(4, 2 * 8_000_004),
        success=Duration(4, 2 * 22_000_005),
        queue=Duration(4, 2 * 2_000_001),
    )
    assert model.by_request_size[4] == four
    assert model.by_request_size[1].success == Duration(2, 4)
    assert model.by_request_size[2] == RequestStatistics(fail=Duration(2, 10_000))
    assert model.requests.success == Duration(6, four.success.ns + 4)
    assert model.requests.fail == Duration(2, 10_000)
    assert model.requests.compute_infer == Duration(6, four.compute_infer.ns + 2)
    assert found.of("add", -1).by_request_size == {0: RequestStatistics(fail=Duration(2, 14_000))}
    assert found.calls == {"status": Duration(2, 10_000)}
    assert found.of("add", 1).inference_count == 0


def test_rows_from_the_cache_are_no_inferences_and_requests_of_them_alone_compute_nothing(
    paths: RunPaths,
) -> None:
    script = """
recorder.succeeded("org/name", 1, 4, Times(1_000, 2_000, 3_000, 4_000, 20_000), "abc")
recorder.succeeded("org/name", 1, 4, Times(1_000, 2_000, 3_000, 4_000, 20_000), "abc", 3)
recorder.succeeded("org/name", 1, 4, Times(0, 0, 0, 0, 500), "", 4)
"""
    run(paths, "frontend-0", script)
    model = read(paths).of("org/name", 1)
    assert model.inference_count == 5
    expected = RequestStatistics(
        compute_input=Duration(2, 4_000),
        compute_infer=Duration(2, 6_000),
        compute_output=Duration(2, 8_000),
        success=Duration(3, 40_500),
        queue=Duration(3, 2_000),
        cached=Duration(1, 0),
    )
    assert model.requests == model.by_request_size[4] == expected


def test_figures_go_on_when_a_slot_is_started_again(paths: RunPaths) -> None:
    script = 'recorder.succeeded("org/name", 1, 2, Times(0, 0, 5, 0, 9))\n'
    last = 0
    for life in range(1, 4):
        run(paths, "frontend-0", script)
        model = read(paths).of("org/name", 1)
        assert (model.inference_count, model.requests.success) == (2 * life, Duration(life, 9 * life))
        assert model.last_inference_ms >= last > -1
        last = model.last_inference_ms
    run(paths, "frontend-0", "")
    assert read(paths).of("org/name", 1).last_inference_ms == last > 0


def test_runs_of_all_workers_are_added_up_by_their_batch_size(paths: RunPaths) -> None:
    for slot, uuid in (("worker-0", "abc"), ("worker-1", "def")):
        device = f'families.touch(["add@3"], "{uuid}")\n'
        run(paths, slot, device + 'for rows in (1, 8, 8): executions.note_run("add@3", rows, 10, 20, 30)\n')
    model = read(paths).of("add", 3)
    assert model.execution_count == 6
    assert set(model.by_run_size) == {1, 8}
    eight = model.by_run_size[8]
    phases = (eight.compute_input, eight.compute_infer, eight.compute_output)
    assert phases == (Duration(4, 40), Duration(4, 80), Duration(4, 120))


@pytest.fixture
def counting(paths: RunPaths) -> Iterator[RunPaths]:
    """A frontend that counts all the time."""
    script = """
while not (paths.root / "stop").exists():
    for _ in range(200):
        recorder.succeeded("add", 1, 1, Times(1, 2, 3, 4, 12))
"""
    thread = threading.Thread(target=run, args=(paths, "frontend-0", script))
    thread.start()
    yield paths
    (paths.root / "stop").touch()
    thread.join(60)


def test_figures_never_go_back_while_they_are_counted(counting: RunPaths) -> None:
    async def scenario() -> None:
        readers = [StatisticsReader(counting), StatisticsReader(counting)]
        until, seen, looks = time.monotonic() + 60, [0] * 6, 0
        while (looks < 200 or not seen[0]) and time.monotonic() < until:
            for reader in readers:
                model = (await reader.read()).of("add", 1)
                known = model.requests
                now = [
                    model.inference_count,
                    known.success.count,
                    known.success.ns,
                    known.queue.ns,
                    known.compute_output.ns,
                    model.last_inference_ms,
                ]
                assert all(new >= old for new, old in zip(now, seen, strict=True)), (now, seen)
                seen, looks = now, looks + 1
        assert looks >= 200 and seen[0] > 0

    asyncio.run(scenario())


def test_a_reading_is_shared_only_by_those_who_asked_before_it_began(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[ServerStatistics] = []
    first, go_on = threading.Event(), threading.Event()

    def look(self: StatisticsReader) -> ServerStatistics:
        began.append(ServerStatistics())
        first.set()
        assert go_on.wait(60)
        return began[-1]

    monkeypatch.setattr(StatisticsReader, "look", look)

    async def scenario() -> None:
        reader = StatisticsReader(paths)
        early = [asyncio.create_task(reader.read()) for _ in range(3)]
        assert await asyncio.to_thread(first.wait, 20)
        late = [asyncio.create_task(reader.read()) for _ in range(3)]
        late[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        results = [await task for task in (*early, *late[1:])]
        assert [result is began[0] for result in results] == [True] * 3 + [False] * 2
        assert results[3] is results[4] is began[1]

    asyncio.run(scenario())
    assert len(began) == 2


def test_sizes_in_labels_are_few_and_never_below_what_they_stand_for() -> None:
    sizes = {rows: size_label(rows) for rows in (*range(5000), 10**6, 10**12)}
    assert all(label >= min(rows, LARGEST_SIZE) for rows, label in sizes.items())
    assert all(sizes[rows] == rows for rows in range(33))
    assert len({size_label(rows) for rows in range(0, 1 << 20, 31)}) <= 33 + 15
    assert size_label(-5) == 0


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("add@3", ("add", 3)),
        ("org/name", ("org/name", 1)),
        ("a@b@12", ("a@b", 12)),
        ("a@b", ("a@b", 1)),
        ("m@", ("m", NO_VERSION)),
        ("m@\u00b2", ("m@\u00b2", 1)),
        ("m@\u0663", ("m@\u0663", 1)),
        ("m@" + "9" * 18, ("m", 10**18 - 1)),
        ("m@" + "9" * 5000, ("m@" + "9" * 5000, 1)),
    ],
    ids=range(9),
)
def test_ids_are_split_into_name_and_version(entry: str, expected: tuple[str, int]) -> None:
    assert split_id(entry) == expected


def test_the_names_of_other_servers_show_the_same_figures(paths: RunPaths) -> None:
    run(
        paths,
        "frontend-0",
        """
recorder.succeeded("add", 3, 4, Times(1_000, 2_000, 3_000, 4_000, 20_000))
recorder.succeeded("add", 3, 1, Times(1_000, 2_000, 3_000, 4_000, 10_000))
recorder.failed("add", 3, 1, errors.QueueFull.code, 1)
recorder.failed("add", 3, 1, errors.InferenceFailed.code, 1)
recorder.failed("add", 3, 1, errors.Cancelled.code, 1)
recorder.failed("add", None, 0, errors.InvalidInput.code, 1)
""",
    )
    run(paths, "worker-0", 'for rows in (1, 40): executions.note_run("add@3", rows, 10, 20, 30)\n')
    text = metrics.render(paths).decode()
    # This parser gives every counter its `_total`; the text below has none.
    found = {
        (sample.name.removesuffix("_total"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("nv_")
    }
    key = (("model", "add"), ("version", "3"))
    expected = {
        "request_success": 2,
        "count": 5,
        "exec_count": 2,
        "request_duration_us": 30,
        "queue_duration_us": 2,
        "compute_input_duration_us": 4,
        "compute_infer_duration_us": 6,
        "compute_output_duration_us": 8,
        "compute_duration_us": 18,
        "load_ratio": 30 / 18,
        "pending_request_count": 0,
    }
    for name, value in expected.items():
        assert found[(f"nv_inference_{name}", *key)] == pytest.approx(value), name
    for version, reason in (("3", "REJECTED"), ("3", "BACKEND"), ("3", "CANCELED"), ("-1", "OTHER")):
        labels = (("model", "add"), ("reason", reason), ("version", version))
        assert found[("nv_inference_request_failure", *labels)] == 1
    assert found[("nv_inference_count", ("model", "org/name"), ("version", "1"))] == 0
    assert "# TYPE nv_inference_count counter" in text and "nv_inference_count_total" not in text


@pytest.mark.parametrize(
    "name", ["counter_frontend-7.db", "gauge_sum_frontend-7.db", "histogram_worker-7.db"]
)
def test_a_process_that_died_while_it_made_a_file_costs_nobody_the_page(name: str, paths: RunPaths) -> None:
    run(paths, "frontend-0", 'recorder.failed("add", 3, 1, errors.QueueFull.code, 1)\n')
    whole = metrics.render(paths)
    (paths.metrics() / name).touch()
    assert metrics.render(paths) == whole and b'model="add"' in whole


def test_a_process_that_replaces_its_file_while_the_page_is_made_costs_nobody_the_page(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(paths, "frontend-0", 'recorder.failed("add", 3, 1, errors.QueueFull.code, 1)\n')
    whole = metrics.render(paths)
    merge, replaced = MultiProcessCollector.merge, paths.metrics() / "gauge_livesum_frontend-7.db"
    replaced.write_bytes(bytes(1 << 16))

    def replacing(files: list[str], accumulate: bool) -> Any:
        replaced.write_bytes(b"")
        return merge(files, accumulate)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(MultiProcessCollector, "merge", staticmethod(replacing))
    assert metrics.render(paths) == whole and b'model="add"' in whole


MOST = 8
FEW_TOUCHED = f"{METRICS}metrics.MOST_TOUCHED = {MOST}\n"


@pytest.mark.parametrize("count", [MOST, MOST + 1])
def test_series_of_a_long_catalog_begin_with_their_first_use(count: int, paths: RunPaths) -> None:
    names = f"[f'org/m{{n}}' for n in range({count})]"
    for slot, made in (
        ("frontend-1", f'metrics.FrontendMetrics().touch({names}, 1, "0")'),
        ("worker-1", f'metrics.WorkerMetrics("worker-1").touch({names}, "cpu")'),
    ):
        run(paths, slot, made, FEW_TOUCHED)
    scraped = metrics.render(paths).decode()
    shown = {line.partition('model="org/m')[2].partition('"')[0] for line in scraped.splitlines()} - {""}
    assert len(shown) == (count if count == MOST else 0)
