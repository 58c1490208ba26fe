"""The routes of infinity: texts and images, the forms of answers and errors, what is refused."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.vector_server import CLASSIFIER, DENSE, SCORE, VectorServer

NOBODY = "default/not-specified"


@pytest.fixture
def server(tmp_path: Path) -> VectorServer:
    """All routes in the forms of infinity."""
    return VectorServer(tmp_path, server__compatible="infinity")


def answered(server: VectorServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fields of an answer; its id and time have been looked at."""
    found = server.post(path, body)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json
    assert re.fullmatch("infinity-[0-9a-f-]{36}", answer.pop("id")) and isinstance(answer.pop("created"), int)
    assert all(lease.releases == 1 for lease in server.engine.leases)
    return answer


def refused(server: VectorServer, path: str, body: Any) -> str:
    """The message of an error for a wrong request."""
    found = server.post(path, body)
    assert found.status_code == 400 and found.json["error"]["code"] == 400, found.text
    return str(found.json["error"]["message"])


def test_embeddings_of_texts(server: VectorServer) -> None:
    answer = answered(server, "/embeddings", {"model": NOBODY, "input": ["abc", "x" * 50]})
    for entry, size in zip(answer["data"], (3, 50), strict=True):
        length = math.hypot(size, 1)
        assert entry.pop("embedding") == pytest.approx([size / length, 1 / length, 0])
    assert answer == {
        "object": "list",
        "model": DENSE,
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
        "data": [
            {"object": "embedding", "index": 0},
            {"object": "embedding", "index": 1},
        ],
    }
    body = {"input": "ab", "modality": "text", "dimensions": 2, "encoding_format": "base64"}
    [entry] = answered(server, "/embeddings", body)["data"]
    wanted = [2 / math.sqrt(5), 1 / math.sqrt(5)]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() == pytest.approx(wanted)
    assert len(answered(server, "/embeddings", {"input": "ab", "dimensions": 0})["data"][0]["embedding"]) == 3


def test_other_modalities_are_refused_with_the_reason(server: VectorServer) -> None:
    image = "data:image/png;base64," + base64.b64encode(b"x").decode()
    assert "takes no image, only text" in refused(
        server, "/embeddings", {"model": DENSE, "input": image, "modality": "image"}
    )
    assert "'audio' is not offered" in refused(server, "/embeddings", {"input": "a", "modality": "audio"})
    assert "video" in refused(server, "/embeddings", {"input": "a", "modality": "video"})
    assert "input: may not be empty" in refused(server, "/embeddings", {"input": []})


def test_rerank(server: VectorServer) -> None:
    body = {"query": "q", "documents": ["a 1", "b 3"]}
    assert answered(server, "/rerank", body) == {
        "object": "rerank",
        "model": SCORE,
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
        "results": [
            {"relevance_score": 3, "index": 1, "document": None},
            {"relevance_score": 1, "index": 0, "document": None},
        ],
    }
    call = next(server.calls)
    assert (call.options["activation"], call.overflow) == ("sigmoid", "truncate")
    [best] = answered(server, "/rerank", {**body, "top_n": 1, "return_documents": True, "raw_scores": True})[
        "results"
    ]
    assert best["document"] == "b 3" and next(server.calls).options["activation"] == "identity"


def test_classify(server: VectorServer) -> None:
    answer = answered(server, "/classify", {"input": ["a"]})
    assert (answer["object"], answer["model"]) == ("classify", CLASSIFIER)
    assert answer["data"] == [[{"score": 0.75, "label": "odd"}, {"score": 0.25, "label": "even"}]]
    assert answered(server, "/classify", {"input": ["a"], "raw_scores": True})["data"][0][0]["score"] == 2


def test_models_say_what_they_can_do(server: VectorServer) -> None:
    found = server.client.simulate_get("/models").json
    assert found["object"] == "list"
    able = {one["id"]: one["capabilities"] for one in found["data"]}
    assert able == {DENSE: ["embed"], SCORE: ["rerank"], CLASSIFIER: ["classify"]}
    assert found["data"][0]["stats"] == {"batch_size": 512}
