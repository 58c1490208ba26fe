"""LoRA adapters that requests name: loaded beside serving, kept apart, evicted, and what is said when they fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cluster import is_gateway, ways_to
from tests.harness.server import Answer, Server, serving, wait_until
from tests.harness.sie_clients import Client, each_client, printed_by, refusals
from tests.tiny import loras
from tests.tiny.models import build
from tests.tiny.texts import mixed_lengths

BASE = "tiny/base"
NAMES = ("first", "team/second", "third")
TEXTS = mixed_lengths()[:5]
LOAD_WAIT_S = 3.0


def merged(name: str) -> str:
    """The model that has this adapter in its weights."""
    return f"merged/{name.replace('/', '-')}"


def write(place: Path) -> None:
    """A base with three adapters, each merged into a model besides; the third is named by the base's entry."""
    (place / "catalog").mkdir()
    base = build("dense_mean", place / "base")
    for seed, name in enumerate(NAMES):
        lora = loras.write(place / "loras" / name, base, seed=seed)
        entry(place, merged(name), loras.merged(base, lora, place / merged(name), 2.0))
    profiles = {"default": {}, "legal": {"runtime": {"lora_id": "listed"}}}
    listed = {"listed": {"kind": "directory", "path": str(place / "loras" / "third")}}
    entry(place, BASE, base, adapter="tests.fakes.gated:GatedDenseAdapter", profiles=profiles, loras=listed)


def entry(place: Path, name: str, directory: Path, **fields: Any) -> None:
    """A catalog file."""
    found = {
        "id": name,
        "source": {"kind": "directory", "path": str(directory)},
        "adapter": "dense",
        **fields,
    }
    (place / "catalog" / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models, adapters and catalog lie."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """A worker whose models hold two adapters each."""
    write(place)
    models = [BASE, *map(merged, NAMES)]
    settings = {
        "worker.max_loras": 2,
        "worker.healthy_after_s": 0.5,
        "catalog.lora_dirs": place / "loras",
        "limits.load_wait_s": LOAD_WAIT_S,
    }
    with serving(place, models, settings, catalog=place / "catalog") as running:
        yield running


either = ways_to("server")

client = each_client


def ask(server: Server, lora: str | None, texts: list[str] = TEXTS, model: str = BASE) -> Answer:
    """Encode with an adapter; without one where it is None."""
    return server.encode(model, texts, options={} if lora is None else {"lora": lora})


def vectors(answer: Answer) -> np.ndarray:
    """float32 [texts, width] of a successful answer."""
    assert answer.status == 200, answer.body
    return np.asarray([item["dense"]["values"] for item in answer.json()["items"]], np.float32)


def expected(server: Server, lora: str | None) -> np.ndarray:
    """What the merged model gives, or the base."""
    return vectors(ask(server, None, model=BASE if lora is None else merged(lora)))


def settled(server: Server, lora: str | None, texts: list[str] = TEXTS) -> Answer:
    """The answer to a client that comes again after a 503 that asks for it."""

    def answered() -> Answer | None:
        answer = ask(server, lora, texts)
        return None if answer.status == 503 and "retry-after" in answer.headers else answer

    found: Answer = wait_until(answered, what=f"an answer with {lora}")
    return found


def patient(server: Server, lora: str | None, texts: list[str] = TEXTS) -> np.ndarray:
    """float32 [texts, width] of `settled`."""
    return vectors(settled(server, lora, texts))


def assert_loading(answer: Answer) -> None:
    """The contract's answer while an adapter is loading."""
    assert (answer.status, answer.json()["detail"]["code"]) == (503, "LORA_LOADING"), answer.body
    assert answer.headers["x-sie-error-code"] == "LORA_LOADING"
    assert answer.headers["retry-after"] == "1"


def test_the_adapter_of_a_profile_is_loaded_with_the_model_and_shares_its_weights(server: Server) -> None:
    assert f"LoRA listed of {BASE} loaded" in server.log, "it was loaded before the first request"
    memory = server.metric("sie_model_memory_bytes", model=BASE)
    expected(server, "third")
    weights = server.metric("sie_model_memory_bytes", model=merged("third"))
    assert memory == weights + 2 * 2 * (4 * 64 + 64 * 4) * 4, "two layers of two targets, rank 4, in fp32"


def test_the_adapter_of_a_profile_answers_in_every_form(server: Server, either: Server) -> None:
    got = vectors(either.encode(f"{BASE}:legal", TEXTS))
    assert np.abs(got - expected(either, "third")).max() < 1e-5
    assert np.abs(vectors(either.encode(BASE, TEXTS, options={"profile": "legal"})) - got).max() < 1e-6
    answer = either.post("/v1/embeddings", {"model": f"{BASE}:legal", "input": TEXTS})
    openai = np.asarray([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert np.abs(openai - got).max() < 1e-6, "the OpenAI form has the adapter of the profile, too"
    assert server.metric("penstock_model_loads_total", model=f"{BASE}:legal") == 0


def test_mixed_traffic_gets_the_vectors_of_its_own_adapter(either: Server) -> None:
    chosen: list[str | None] = [None, "first", "team/second"]
    wanted = {name: expected(either, name) for name in chosen}
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda n: (n % 3, patient(either, chosen[n % 3])), range(150)))
    for which, got in found:
        assert np.abs(got - wanted[chosen[which]]).max() < 1e-5, chosen[which]
    for one, other in ((None, "first"), (None, "team/second"), ("first", "team/second")):
        assert np.abs(wanted[one] - wanted[other]).max() > 1e-2, "they differ far more than the limit"


def test_one_adapter_too_many_takes_the_place_of_the_one_used_longest_ago(server: Server) -> None:
    for name in ("first", "team/second", "first"):
        patient(server, name)
    memory = server.metric("sie_model_memory_bytes", model=BASE)
    assert np.abs(patient(server, "third") - expected(server, "third")).max() < 1e-5
    assert server.log.rpartition(" leaves for another one")[0].endswith(f"LoRA team/second of {BASE}")
    assert np.abs(patient(server, "first") - expected(server, "first")).max() < 1e-5
    assert np.abs(patient(server, "team/second") - expected(server, "team/second")).max() < 1e-5
    assert server.metric("sie_model_memory_bytes", model=BASE) == memory, "what left is not counted any more"


def test_requests_wait_for_a_load_and_are_told_to_come_again_when_it_takes_longer(
    server: Server, place: Path
) -> None:
    late = loras.write(place / "loras" / "late", place / "base", seed=8)
    (late / "hold").touch()
    began = time.monotonic()
    assert_loading(ask(server, "late"))
    assert time.monotonic() - began >= LOAD_WAIT_S
    assert vectors(ask(server, None)).shape == (5, 64), "the base serves meanwhile"
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(patient, server, "late") for _ in range(4)]
        wait_until(
            lambda: server.metric("penstock_requests_in_flight", model=BASE) >= 4, what="four that wait"
        )
        (late / "hold").unlink()
        assert {answer.result().shape for answer in waiting} == {(5, 64)}
    assert server.log.count(f"LoRA late of {BASE} loaded") == 1


@pytest.mark.long
def test_the_client_of_sie_waits_for_an_adapter(
    client: Client, either: Server, place: Path, request: pytest.FixtureRequest
) -> None:
    name = f"for-{request.node.callspec.id}"
    hold = loras.write(place / "loras" / name, place / "base", seed=len(name)) / "hold"
    hold.touch()
    began = refusals(either)
    with client.encodes(either, BASE, TEXTS[1], options={"lora": name}) as process:
        wait_until(lambda: refusals(either) > began, what="an answer that asks to come again")
        hold.unlink()
        vector = printed_by(process)
    assert np.abs(vector - patient(either, name, [TEXTS[1]])[0]).max() < 1e-5


def test_a_failed_load_is_remembered_until_the_files_change(
    server: Server, either: Server, place: Path
) -> None:
    name = "broken-at-a-box" if is_gateway(either) else "broken"
    broken = loras.write(place / "loras" / name, place / "base", seed=9, use_dora=True)
    for _ in range(3):
        answer = settled(either, name)
        detail = answer.json()["detail"]
        assert (answer.status, detail["code"]) == (500, "INFERENCE_ERROR")
        assert detail["message"] == "LoRA load failed: adapter_config.json: use_dora is not supported"
    assert server.log.count(f"LoRA {name} of {BASE} failed to load") == 1
    loras.write(broken, place / "base", seed=0)
    assert np.abs(patient(either, name) - expected(either, "first")).max() < 1e-5


@pytest.mark.parametrize(
    "name", ["nope", "../base", "/etc/passwd", "first/..", "a/b/c", "..", "f\u00edrst", "x" * 5000]
)
def test_a_name_that_is_no_adapter_is_refused_by_its_field(either: Server, name: str) -> None:
    answer = ask(either, name)
    detail = answer.json()["detail"]
    assert (answer.status, detail["code"]) == (400, "INVALID_INPUT")
    assert "params.options.lora" in detail["message"] and len(detail["message"]) < 400


@pytest.mark.long
def test_a_killed_worker_loads_its_adapters_again(server: Server) -> None:
    wanted = {name: expected(server, name) for name in ("first", "team/second")}
    for name in wanted:
        patient(server, name)
    before = server.worker_pid()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    for name, vector in wanted.items():
        assert np.abs(patient(server, name) - vector).max() < 1e-5
    assert server.worker_pid() not in (None, before)
