"""What clients of a gateway see of its boxes: health, models, status, and refusals of what is not built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from frontend.scope import Choice, RequestScope
from frontend.status.cluster import ClusterFeed, cluster_fields
from ipc.errors import DependencyConflict, Provisioning
from tests.fakes.boxes import BoxesDirectory
from tests.fakes.vector_server import CLASSIFIER, DENSE, SCORE, VectorServer

JSON = {"Accept": "application/json"}


class Gateway(VectorServer):
    """A gateway of two boxes: both have the dense model, one has the scorer."""

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, server__engine="cluster", cluster__urls="nats://127.0.0.1:4222", **settings)
        directory: Any = self.services.directory
        self.boxes = BoxesDirectory(directory, {"b1": [DENSE, SCORE], "b2": [DENSE]})
        self.services.directory = self.engine.directory = self.boxes

    def get(self, path: str, **headers: str) -> Any:
        """The answer, for a client that names JSON."""
        return self.client.simulate_get(path, headers={**JSON, **headers})


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


def test_health_says_that_this_is_a_gateway_and_names_its_boxes(gateway: Gateway) -> None:
    found = gateway.get("/health").json
    assert (found["type"], found["status"]) == ("gateway", "healthy")
    assert found["cluster"] == {"worker_count": 2, "gpu_count": 2, "models_loaded": 2, "total_qps": 0.0}
    assert [worker["name"] for worker in found["workers"]] == ["b1", "b2"]
    assert found["live_gpu_types"] == ["l4"]
    assert gateway.client.simulate_get("/health").text == "OK"


@pytest.mark.parametrize("change", [{"draining": True}, {"alive": False}])
def test_a_box_that_takes_no_work_is_not_healthy(gateway: Gateway, change: dict[str, bool]) -> None:
    gateway.boxes.change("b1", **change)
    found = gateway.get("/health").json
    assert found["status"] == "degraded"
    assert {worker["name"]: worker["healthy"] for worker in found["workers"]} == {"b1": False, "b2": True}
    scorer = next(model for model in found["models"] if model["name"] == SCORE)
    assert scorer["worker_count"] == 0
    gateway.boxes.change("b2", alive=False)
    assert gateway.get("/health").json["status"] == "no_workers"


def test_readiness_of_a_gateway_waits_for_no_box(gateway: Gateway) -> None:
    assert gateway.get("/readyz").json == {"status": "ready", "healthy_workers": 2}
    for box in ("b1", "b2"):
        gateway.boxes.change(box, alive=False)
    assert gateway.get("/readyz").json == {"status": "ready", "healthy_workers": 0}
    assert gateway.get("/healthz").json == {"status": "ok"}


def test_models_name_the_boxes_that_have_them(gateway: Gateway) -> None:
    found = {model["name"]: model for model in gateway.get("/v1/models").json["models"]}
    assert (found[SCORE]["workers"], found[SCORE]["worker_count"], found[SCORE]["bundles"]) == (
        ["b1"],
        1,
        ["default"],
    )
    one = gateway.get(f"/v1/models/{DENSE}").json
    assert (one["workers"], one["worker_count"], one["loaded"]) == (["b1", "b2"], 2, True)


def test_a_machine_profile_names_the_gpu_of_a_box(gateway: Gateway) -> None:
    gateway.boxes.change("b2", profile="L4-Spot")
    gpus = {worker["name"]: worker["gpu"] for worker in cluster_fields(gateway.boxes)["workers"]}
    assert gpus == {"b1": "l4", "b2": "l4-spot"}


def test_the_folder_of_kserve_does_not_swallow_configurations(gateway: Gateway) -> None:
    for path in ("/v1/configs", "/v1/configs/other"):
        answer = gateway.get(path)
        assert answer.status_code == 404 and answer.json["detail"]["error"] == "not_found"
        assert answer.json["message"] == answer.json["detail"]["message"]
    # KServe's own path answers in KServe's form.
    answer = gateway.client.simulate_post("/v1/config/reload", body=b"{}")
    assert answer.status_code != 404 and "configuration" not in answer.text


def test_a_single_server_has_none_of_these_routes(tmp_path: Path) -> None:
    single = VectorServer(tmp_path)
    for path in ("/v1/pools", "/v1/configs", "/ws/cluster-status"):
        assert single.client.simulate_get(path).status_code == 404
    found = single.client.simulate_get("/health", headers=JSON).json
    assert found == {"status": "ok", "type": "worker"}
    assert single.client.simulate_get("/healthz", headers=JSON).text == "ok"
    model = single.client.simulate_get(f"/v1/models/{DENSE}").json
    assert not {"bundles", "workers", "worker_count"} & set(model)


def test_the_rate_of_a_frame_is_that_since_the_frame_before(gateway: Gateway) -> None:
    feed = ClusterFeed(gateway.services)
    assert feed._rate(10.0, 500) == 0.0
    assert feed._rate(12.0, 600) == 50.0
    assert feed._rate(13.0, 600) == 0.0


def test_a_model_without_a_box_answers_provisioning_in_the_form_that_clients_wait_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_a_box(model: str) -> None:
        raise Provisioning("no box of the cluster serves this model now", retry_after_s=120)

    monkeypatch.setattr(gateway.boxes, "find", without_a_box)
    answer = gateway.client.simulate_post(
        f"/v1/encode/{DENSE}",
        json={"items": [{"text": "x"}]},
        headers={"X-SIE-MACHINE-PROFILE": "L4"},
    )
    assert answer.status_code == 503
    assert (answer.headers["retry-after"], answer.headers["x-sie-error-code"]) == ("120", "PROVISIONING")
    assert answer.json == {
        "detail": {"code": "PROVISIONING", "message": "no box of the cluster serves this model now"},
        "status": "provisioning",
        "gpu": "l4",
        "bundle": "default",
        "estimated_wait_s": 120,
        "message": "no box of the cluster serves this model now",
    }


def test_every_error_of_a_gateway_repeats_its_message(gateway: Gateway) -> None:
    answer = gateway.client.simulate_post("/v1/encode/no/such", json={"items": [{"text": "x"}]})
    assert answer.status_code == 404
    assert answer.json["message"] == answer.json["detail"]["message"]


def test_answers_name_version_request_and_worker(gateway: Gateway) -> None:
    answer = gateway.client.simulate_post(f"/v1/encode/{DENSE}", json={"items": [{"text": "x"}]})
    assert answer.status_code == 200
    assert answer.headers["x-sie-request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-sie-version"] == gateway.services.settings.server.version_header
    # The engine of this test names no box; one that does is in tests/process/test_cluster_sdk.py.
    assert answer.headers.get("x-sie-worker", "worker-0") == "worker-0"


def test_answers_name_the_times_on_the_way_to_a_box(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gateway.engine.run

    async def far_run(scope: RequestScope, *work: Any) -> Any:
        answer = await run(scope, *work)
        scope.worker, scope.published_ms = "b1/worker-0", 1.5
        return answer

    monkeypatch.setattr(gateway.engine, "run", far_run)
    body = {"items": [{"text": "x"}]}
    headers = gateway.client.simulate_post(f"/v1/encode/{DENSE}", json=body).headers
    assert headers["x-queue-publish-time"] == "1.50" and float(headers["x-queue-wait-time"]) >= 0
    assert "x-payload-fetch-time" not in headers

    async def large_run(scope: RequestScope, *work: Any) -> Any:
        scope.fetched_ms = 2.25
        return await far_run(scope, *work)

    monkeypatch.setattr(gateway.engine, "run", large_run)
    headers = gateway.client.simulate_post(f"/v1/encode/{DENSE}", json=body).headers
    assert headers["x-payload-fetch-time"] == "2.25"


ITEMS = [{"id": "a", "text": "one"}, {"text": "four"}]
FORMS = {
    "inputs": ({"inputs": ITEMS}, {"items": ITEMS}),
    "input": ({"input": ITEMS}, {"items": ITEMS}),
    "one input": ({"input": ITEMS[0]}, {"items": ITEMS[:1]}),
    "an item": ({**ITEMS[0], "unknown": 1}, {"items": ITEMS[:1]}),
    "input before inputs": ({"input": ITEMS[0], "inputs": ITEMS}, {"items": ITEMS[:1]}),
    "items before all": ({"items": ITEMS, "input": 1, "inputs": 2, "text": 3}, {"items": ITEMS}),
    "null is absent": ({"items": None, "input": None, "inputs": ITEMS}, {"items": ITEMS}),
}


def posted(gateway: Gateway, path: str, body: bytes, kind: str) -> Any:
    """The answer to a body of a kind, in JSON, without its times."""
    headers = {**JSON, "Content-Type": f"application/{kind}"}
    answer = gateway.client.simulate_post(path, body=body, headers=headers)
    return answer.status_code, {**answer.json, "timing": None}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("path", "params"),
    [
        (f"/v1/encode/{DENSE}", {"is_query": True}),
        (f"/v1/extract/{CLASSIFIER}", {"labels": ["even", "odd"]}),
        (f"/v1/encode/{DENSE}", None),
    ],
)
def test_a_gateway_takes_items_under_the_names_of_the_gateway_of_sie(
    gateway: Gateway, path: str, params: Any, form: str
) -> None:
    given, plain = ({**each, "params": params} for each in FORMS[form])
    wanted = posted(gateway, path, json.dumps(plain).encode(), "json")
    assert wanted[0] == 200, wanted
    assert posted(gateway, path, json.dumps(given).encode(), "json") == wanted
    assert posted(gateway, path, msgpack.packb(given), "msgpack") == wanted


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"inputs": {"text": "x"}}', "inputs"),
        (b'{"inputs": [{"text": 1}]}', "inputs[0].text"),
        (b'{"input": [{"text": 1}]}', "input"),
        (b'{"input": "x"}', "input"),
        (b'{"inputs": []}', "items"),
        (b'{"items": 1, "inputs": [{"text": "x"}]}', "items"),
        (b'{"text": 1}', "text"),
        (b'{"metadata": {}}', "items"),
        (b"{}", "items"),
        (b"[]", "object"),
        (b'{"inputs": [{"text": "x"}], "inputs": [{"text": "y"}]}', "'inputs' occurs twice"),
        (b'{"text": "x", "text": "y"}', "'text' occurs twice"),
        (b'{"input": {"text": "x", "text": "y"}}', "'text' occurs twice"),
        (b'{"inputs": [{"text": "x"}], "params": {"is_query": 1}}', "params.is_query"),
        (b'{"inputs": [' + b"[" * 5000, "JSON"),
    ],
)
def test_what_is_wrong_in_such_a_body_is_named_where_it_stands(
    gateway: Gateway, body: bytes, words: str
) -> None:
    status, answer = posted(gateway, f"/v1/encode/{DENSE}", body, "json")
    assert (status, answer["detail"]["code"]) == (400, "INVALID_INPUT"), answer
    assert words in answer["message"] and len(answer["message"]) < 300, answer


def test_a_single_server_and_a_score_take_items_alone(gateway: Gateway, tmp_path: Path) -> None:
    body = json.dumps({"inputs": ITEMS, "query": {"text": "q"}}).encode()
    assert posted(gateway, f"/v1/score/{SCORE}", body, "json")[0] == 400
    single = VectorServer(tmp_path / "single")
    for form in ({"inputs": ITEMS}, {"input": ITEMS}, ITEMS[0]):
        answer = single.client.simulate_post(f"/v1/encode/{DENSE}", json=form)
        assert answer.status_code == 400 and "items" in answer.json["detail"]["message"]


def choice(gateway: Gateway, path: str = DENSE, **headers: str) -> Choice:
    """What a served request has chosen."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"items": [{"text": "x"}]}
    assert gateway.client.simulate_post(f"/v1/encode/{path}", json=body, headers=named).status_code == 200
    return gateway.boxes.choices[-1]


def test_a_request_chooses_pool_machine_profile_and_bundle(gateway: Gateway) -> None:
    assert choice(gateway) == Choice()
    assert choice(gateway, X_SIE_Pool=" Bench ") == Choice("bench")
    assert choice(gateway, X_SIE_MACHINE_PROFILE="Bench/L4") == Choice("bench", "l4")
    assert choice(gateway, X_SIE_Pool="other", X_SIE_MACHINE_PROFILE="bench/l4") == Choice("other", "l4")
    assert choice(gateway, X_SIE_MACHINE_PROFILE="h100") == Choice("", "h100")
    assert choice(gateway, f"Mine:/{DENSE}") == Choice("", "", "mine")


def test_a_bundle_may_stand_in_the_body_of_embeddings(gateway: Gateway) -> None:
    body = {"model": f"mine:/{DENSE}", "input": "x"}
    assert gateway.client.simulate_post("/v1/embeddings", json=body).status_code == 200
    assert gateway.boxes.choices[-1].bundle == "mine"


def test_a_bare_machine_profile_stands_for_its_spot_form(gateway: Gateway) -> None:
    gateway.boxes.change("b2", profile="h100-spot")
    assert choice(gateway, X_SIE_MACHINE_PROFILE="H100").profile == "h100-spot"
    assert choice(gateway, X_SIE_MACHINE_PROFILE="l4").profile == "l4"


def test_a_machine_profile_that_no_setting_names_is_told_what_there_is(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, cluster__profiles="l4,a100-80gb")
    answer = gateway.client.simulate_post(
        f"/v1/encode/{DENSE}", json={"items": [{"text": "x"}]}, headers={"X-SIE-MACHINE-PROFILE": "pool/H100"}
    )
    assert (answer.status_code, answer.headers["x-sie-error-code"]) == (503, "GPU_NOT_CONFIGURED")
    body = answer.json
    assert (body["status"], body["gpu"]) == ("gpu_not_configured", "h100")
    assert body["configured_gpu_types"] == ["a100-80gb", "l4"]
    assert body["message"] == body["detail"]["message"] and body["detail"]["code"] == "GPU_NOT_CONFIGURED"
    assert choice(gateway, X_SIE_MACHINE_PROFILE="L4").profile == "l4"


@pytest.mark.parametrize("pool", ["a..b", "a b", ">", "*", "a.b", "__", "p" * 5000, "\u00e4"])
@pytest.mark.parametrize("header", ["X-SIE-Pool", "X-SIE-MACHINE-PROFILE"])
def test_what_cannot_be_a_pool_is_refused_by_name(gateway: Gateway, header: str, pool: str) -> None:
    value = pool if header == "X-SIE-Pool" else f"{pool}/l4"
    answer = gateway.client.simulate_post(
        f"/v1/encode/{DENSE}",
        json={"items": [{"text": "x"}]},
        headers={header: value.encode("latin-1").decode("latin-1")},
    )
    assert answer.status_code == 400 and answer.json["detail"]["code"] == "INVALID_INPUT"
    assert answer.json["message"].startswith(f"{header}: ") and len(answer.json["message"]) < 250


def test_only_other_bundles_having_the_model_is_a_conflict_that_names_them(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def other_bundle(*_: Any, **__: Any) -> None:
        raise DependencyConflict("not in this bundle", compatible_bundles=["a", "b"])

    monkeypatch.setattr(gateway.boxes, "ensure_loaded", other_bundle)
    answer = gateway.client.simulate_post(f"/v1/encode/x:/{DENSE}", json={"items": [{"text": "x"}]})
    assert answer.status_code == 409 and answer.json["detail"]["code"] == "DEPENDENCY_CONFLICT"
    assert answer.json["compatible_bundles"] == answer.json["detail"]["compatible_bundles"] == ["a", "b"]


@pytest.mark.parametrize("path", [f":/{DENSE}", "mine:/"])
def test_half_a_bundle_is_no_model(gateway: Gateway, path: str) -> None:
    answer = gateway.client.simulate_post(f"/v1/encode/{path}", json={"items": [{"text": "x"}]})
    assert answer.status_code == 404 and answer.json["detail"]["code"] == "MODEL_NOT_FOUND"
