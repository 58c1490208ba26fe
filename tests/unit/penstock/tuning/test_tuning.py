"""What `penstock tune` tries, which of it it takes, and how it writes a settings file."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from ipc import machine
from ipc.catalog.entries import ModelEntry
from ipc.errors import ConfigError
from ipc.processes.paths import RunPaths
from ipc.settings import load
from penstock.own_server import Server
from penstock.tuning import command, trial
from penstock.tuning.command import Choice, Result, Space, best, search, topologies
from penstock.tuning.trial import Measured

FILE = """\
# our server
server:
  bind: 0.0.0.0:80   # behind a proxy

worker:
    # a comment of ours
    count: 1  # one is enough
    drain_timeout_s: 5
log:
  level: info
"""
VALUES = {"worker.count": 2, "worker.torch_threads": 1, "batch.max_tokens": 4096}


def result(workers: int, rate: float, memory: int = 1, **changed: str | int) -> Result:
    """A result with one thread a worker."""
    fields = {"threads": 1, "tokens": 2048, "precision": "float32"} | changed
    return Result(Choice(workers=workers, **fields), Measured(rate, 1.0, 1.0, memory))  # type: ignore[arg-type]


def test_topologies_share_all_cores_or_all_but_one() -> None:
    assert topologies(1, quick=False) == [(1, 1)]
    assert topologies(2, quick=False) == [(1, 2), (2, 1)]
    assert topologies(8, quick=True) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert topologies(8, quick=False) == [(1, 8), (1, 7), (2, 4), (2, 3), (4, 2), (4, 1), (8, 1)]


def test_the_fastest_is_best_and_of_equals_the_smallest() -> None:
    assert best([result(1, 100, 1), result(2, 110, 2)]) == result(2, 110, 2)
    assert best([result(1, 100, 1), result(2, 102, 2)]) == result(1, 100, 1)
    assert best([Result(Choice(1, 1, 1, "float32"), None, "no room")]) is None


def test_budgets_and_precisions_are_tried_with_the_best_topology() -> None:
    space = Space([(1, 2), (2, 1)], [2048, 4096], ["float32", "bfloat16"])
    rates = {(1, 2048): 100.0, (2, 2048): 120.0, (2, 4096): 150.0}
    tried: list[Choice] = []

    def run(choice: Choice) -> Result:
        tried.append(choice)
        rate = rates[choice.workers, choice.tokens]
        return Result(choice, Measured(rate, 1.0, 1.0, choice.workers))

    found = list(search(space, run))
    assert [one.choice for one in found] == tried
    assert len(tried) == space.trials
    assert tried == [
        Choice(1, 2, 2048, "float32"),
        Choice(2, 1, 2048, "float32"),
        Choice(2, 1, 4096, "float32"),
        Choice(2, 1, 4096, "bfloat16"),
    ]


def test_when_every_topology_fails_nothing_else_is_tried() -> None:
    space = Space([(1, 2)], [2048, 4096], ["float32"])
    assert len(list(search(space, lambda choice: Result(choice, None, "no")))) == 1


def test_values_are_put_in_and_all_other_lines_stay(tmp_path: Path) -> None:
    text = command.with_values(FILE, VALUES)
    assert "    count: 2  # one is enough" in text.splitlines()
    assert "    torch_threads: 1" in text.splitlines()
    assert text.endswith("batch:\n  max_tokens: 4096\n")
    assert not set(FILE.splitlines()) - set(text.splitlines()) - {"    count: 1  # one is enough"}
    path = tmp_path / "server.yaml"
    path.write_text(FILE)
    path.chmod(0o640)
    command.write_settings(path, text, VALUES)
    found = load(path, None, {})
    assert (found.worker.count, found.worker.torch_threads, found.batch.max_tokens) == (2, 1, 4096)
    assert found.worker.drain_timeout_s == 5
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["server.yaml"]


def test_a_file_that_cannot_be_changed_by_lines_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("worker: {count: 1}\n")
    text = command.with_values(path.read_text(), VALUES)
    with pytest.raises(ConfigError):
        command.write_settings(path, text, VALUES)
    assert path.read_text() == "worker: {count: 1}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["server.yaml"]


def entry(**fields: object) -> ModelEntry:
    """A model of the catalog."""
    given: dict[str, object] = {
        "id": "m",
        "source": {"kind": "hub", "repo": "m"},
        "adapter": "dense",
    } | fields
    import msgspec

    return msgspec.convert(given, ModelEntry)


def test_models_that_neither_encode_nor_score_texts_are_refused() -> None:
    assert command.operation_of(entry(inputs=["text"], outputs={"dense": {}})) == "encode"
    assert command.operation_of(entry(inputs=["text"], outputs={"score": {}})) == "score"
    for fields in (
        {"inputs": ["text"], "outputs": {"json": {}}},
        {"inputs": ["image"], "outputs": {"dense": {}}},
    ):
        with pytest.raises(ConfigError, match="encode or score texts"):
            command.operation_of(entry(**fields))


def test_what_is_tried_follows_cores_gpus_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dense = entry(inputs=["text"], outputs={"dense": {}})
    space = command.space_of(load(None, {"batch.max_tokens": "3000"}, {}), dense, quick=False)
    assert space.topologies == topologies(4, quick=False)
    assert list(space.tokens) == [3000, 1024, 2048, 4096]
    assert list(space.precisions) == ["float32", "bfloat16"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    space = command.space_of(load(None, {}, {}), dense, quick=True)
    assert (list(space.topologies), list(space.tokens), list(space.precisions)) == (
        [(2, 0)],
        [32768],
        ["bfloat16"],
    )
    chosen = load(None, {"worker.precision": "bfloat16", "worker.device": "cpu"}, {})
    assert list(command.space_of(chosen, dense, quick=False).precisions) == ["bfloat16", "float32"]


def options(**given: object) -> argparse.Namespace:
    """The options of the command."""
    return argparse.Namespace(
        **{"model": "fake/echo", "quick": True, "seconds": 1.0, "write": None, "config": None, "json": False}
        | given
    )


def tuned(monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], **given: object) -> int:
    """Run the command on two cores with made measurements; a rate of 0 is a server that fails."""

    def measure(load: trial.Load, environment: dict[str, str], workers: int, seconds: float) -> Measured:
        assert environment["PENSTOCK_WORKER__COUNT"] == str(workers)
        assert environment["PENSTOCK_CATALOG__MODELS"] == "fake/echo"
        if not rates[workers]:
            raise trial.TrialFailed("it fell over")
        return Measured(rates[workers], 2.0, 1.0, workers * 10**8)

    monkeypatch.setattr(trial, "measure", measure)
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    catalog = Path(__file__).resolve().parents[3] / "fakes" / "catalog"
    config = load(None, {"catalog.dirs": str(catalog), "worker.device": "cpu"}, {})
    return command.run(options(**given), config, {"worker.device": "cpu"})


def test_the_table_and_the_settings_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    assert tuned(monkeypatch, {1: 100.0, 2: 120.0}) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].split() == ["workers", "threads", "tokens", "precision", "texts/s", "p50", "ms", "alone", "ms",
                                "memory", "MB"]  # fmt: skip
    assert lines[1].split() == ["2", "1", "2048", "float32", "120.0", "2.0", "1.0", "200"]
    assert "worker:\n  count: 2\n  torch_threads: 1\n" in told.out
    assert "2/2 after" in told.err


def test_a_script_gets_all_results_and_the_best_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(monkeypatch, {1: 100.0, 2: 0.0}, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "texts" and found["settings"]["worker.count"] == 1
    by_workers = {one["choice"]["workers"]: one for one in found["results"]}
    assert by_workers[1]["measured"]["rate"] == 100.0 and by_workers[2]["failure"] == "it fell over"
    assert tuned(monkeypatch, {1: 0.0, 2: 0.0}, json=True) == 1
    assert json.loads(capsys.readouterr().out)["settings"] is None


def test_a_file_given_is_written_and_one_in_use_only_after_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "server.yaml"
    used.write_text(FILE)
    rates = {1: 100.0, 2: 120.0}
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert tuned(monkeypatch, rates, config=str(used)) == 0
    assert used.read_text() == FILE
    assert "+    count: 2  # one is enough" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert tuned(monkeypatch, rates, config=str(used)) == 0
    assert used.read_text() == FILE
    assert tuned(monkeypatch, rates, config=str(used), write=tmp_path / "new.yaml") == 0
    assert load(tmp_path / "new.yaml", None, {}).worker.count == 2
    assert used.read_text() == FILE
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert tuned(monkeypatch, rates, config=str(used)) == 0
    assert load(used, None, {}).worker.count == 2


def test_failed_trials_are_shown_and_cost_nothing_but_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    assert tuned(monkeypatch, {1: 100.0, 2: 0.0}) == 0
    assert "failed: it fell over" in capsys.readouterr().out
    assert tuned(monkeypatch, {1: 0.0, 2: 0.0}) == 1


def test_workers_that_would_not_fit_into_memory_are_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setattr(machine, "free_memory_nbytes", lambda: 150 * 10**6)
    assert tuned(monkeypatch, {1: 100.0, 2: 999.0}) == 0
    assert "2 workers would take 200 MB" in capsys.readouterr().out


def test_requests_differ_so_that_no_item_is_computed_once_for_two() -> None:
    load_made = trial.load_of("m", "score")
    assert load_made.path == "/v1/score/m"
    assert len(set(load_made.bodies)) == len(load_made.bodies)
    assert b'"query"' in load_made.single[0] and b'"query"' not in trial.load_of("m", "encode").single[0]


def test_a_trial_whose_model_fails_to_load_ends_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A load that failed for want of the network would be tried again for ten minutes."""
    log = tmp_path / "log"
    log.write_text("model m failed to load: NETWORK\n")
    failed = 'penstock_model_state{model="m",state="failed",worker="worker-0"} 1.0'
    monkeypatch.setattr(Server, "get", lambda server, path: [failed])
    with subprocess.Popen(["sleep", "60"]) as process:
        server = Server(process, 1, RunPaths(tmp_path, "m"), log)
        try:
            with pytest.raises(trial.TrialFailed, match="did not load: model m failed to load: NETWORK"):
                trial._await(server, 1)
        finally:
            process.kill()
