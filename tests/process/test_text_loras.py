"""LoRA adapters of a model that generates: named by the catalog or loaded by requests, on every route of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.cluster import GATEWAY, ways_to
from tests.harness.server import Answer, Server, serving, wait_until
from tests.tiny import chat_models, loras

BASE = "tiny/chat"
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
LISTED, BROUGHT, LATE = "listed", "brought", "team/late"
PROMPT = "Once upon a time"
TOKENS = 8


class Place:
    """Where the model, its adapters and the catalog lie."""

    def __init__(self, root: Path) -> None:
        self.base = chat_models.save("chatml", root / "base")
        self.loras = root / "loras"
        for seed, name in enumerate((LISTED, BROUGHT, LATE)):
            loras.write(self.loras / name, self.base, TARGETS, seed=seed, lora_alpha=60)
        empty = loras.write(self.loras / "empty", self.base, TARGETS)
        (empty / loras.WEIGHTS).write_bytes(b"")
        self.catalog = root / "catalog"
        self.catalog.mkdir()
        entry = {
            "id": BASE,
            "source": {"kind": "directory", "path": str(self.base)},
            "adapter": "causal",
            "outputs": {"chat": {}},
            "served_name": "gpt-tiny",
            "loras": {LISTED: {"kind": "directory", "path": str(self.loras / LISTED)}},
        }
        (self.catalog / "chat.yaml").write_text(json.dumps(entry))
        self._root = root

    def wanted(self, name: str) -> str:
        """What generate() continues `PROMPT` with, with an adapter merged into the weights or (empty) without."""
        directory = self.base
        if name:
            directory = self._root / f"merged-{name.replace('/', '-')}"
            if not directory.exists():
                loras.merged(self.base, self.loras / name, directory, 60 / 4)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(self.base))
        model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        return str(tokenizer.decode(found[0, ids.shape[1] :]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The files, made once."""
    return Place(tmp_path_factory.mktemp("text-loras"))


@pytest.fixture(scope="module")
def server(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, so that an adapter that one of them loads has to reach the other."""
    settings = {"worker.count": 2, "catalog.lora_dirs": place.loras, "worker.max_loras": 2}
    root = tmp_path_factory.mktemp("text-loras-run")
    with serving(root, [BASE], settings, catalog=place.catalog) as running:
        yield running


either = ways_to("server")


def complete(server: Server, model: str) -> str:
    """The continuation of `PROMPT`."""
    answer = ask(server, model)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["text"])


def ask(server: Server, model: str) -> Answer:
    """A greedy completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def load(server: Server, name: str, path: str | Path, **more: Any) -> Answer:
    """Load an adapter by name."""
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server: Server, name: str) -> Answer:
    """Unload an adapter by name."""
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def listed(server: Server) -> dict[str, dict[str, Any]]:
    """The adapters by name."""
    return {each["lora_name"]: each for each in server.get("/v1/lora_adapters").json()["data"]}


def test_an_adapter_of_the_catalog_goes_by_every_name_and_is_listed_with_its_parent(
    either: Server, place: Place
) -> None:
    texts = {
        name: complete(either, name) for name in (BASE, f"{BASE}:{LISTED}", LISTED, f"gpt-tiny:{LISTED}")
    }
    assert texts.pop(BASE) == place.wanted("")
    assert set(texts.values()) == {place.wanted(LISTED)}
    assert place.wanted(LISTED) != place.wanted(""), "an adapter that changes nothing would prove nothing"
    models = {each["id"]: each for each in either.get("/v1/models").json()["data"]}
    for name in (f"{BASE}:{LISTED}", LISTED):
        assert models[name]["parent"] == BASE, name
    assert models[f"{BASE}:{LISTED}"]["root"] == BASE
    assert models[LISTED]["root"] == f"{BASE}:{LISTED}"
    assert listed(either)[LISTED]["source"] == "catalog"


def test_every_route_of_text_takes_the_name_of_an_adapter(either: Server) -> None:
    talk = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": talk, "max_tokens": 4},
        "/v1/responses": {"input": "hi", "max_output_tokens": 4, "store": False},
        "/v1/messages": {"messages": talk, "max_tokens": 4},
        "/api/chat": {"messages": talk, "stream": False, "options": {"num_predict": 4}},
    }
    for path, body in bodies.items():
        answer = either.post(path, {"model": f"{BASE}:{LISTED}", **body})
        assert answer.status == 200, (path, answer.body)
        assert answer.json()["model"] == f"{BASE}:{LISTED}", path


def test_an_adapter_that_a_request_loads_serves_on_all_workers_until_it_is_unloaded(
    server: Server, place: Place
) -> None:
    assert ask(server, BROUGHT).status == 404
    answer = load(server, BROUGHT, BROUGHT)
    assert (answer.status, answer.body) == (
        200,
        b"Success: LoRA adapter 'brought' added successfully.",
    )
    assert listed(server)[BROUGHT] | {"state": "loaded"} == {
        "id": f"{BASE}:{BROUGHT}",
        "object": "lora_adapter",
        "lora_name": BROUGHT,
        "base_model_name": BASE,
        "state": "loaded",
        "source": "request",
    }
    texts = {complete(server, name) for name in [BROUGHT, f"{BASE}:{BROUGHT}"] * 4}
    assert texts == {place.wanted(BROUGHT)}
    again = load(server, BROUGHT, place.loras / BROUGHT)
    assert again.status == 422 and "load_inplace" in again.json()["error"]["message"]
    assert load(server, BROUGHT, BROUGHT, base_model_name=LISTED, load_inplace=True).status == 422
    assert load(server, BROUGHT, "empty", load_inplace=True).status == 422
    assert complete(server, BROUGHT) == place.wanted(BROUGHT), "a load that fails replaces nothing"
    assert load(server, BROUGHT, LATE, load_inplace=True).status == 200
    assert complete(server, BROUGHT) == place.wanted(LATE)
    assert unload(server, BROUGHT).status == 200
    assert ask(server, BROUGHT).status == 404
    assert unload(server, BROUGHT).status == 404
    assert complete(server, BASE) == place.wanted("")


def test_more_adapters_than_places_take_turns(server: Server, place: Place) -> None:
    assert load(server, LATE, place.loras / LATE, base_model_name=BASE).status == 200
    assert load(server, BROUGHT, BROUGHT).status == 200
    for name in (LISTED, LATE, BROUGHT) * 2:

        def answered(name: str = name) -> str | None:
            answer = ask(server, f"{BASE}:{name}")
            return None if answer.status == 503 else str(answer.json()["choices"][0]["text"])

        assert wait_until(answered, what=f"an answer with {name}") == place.wanted(name)
    for name in (LATE, BROUGHT):
        assert unload(server, name).status == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "x", "lora_path": "/etc"}, 422, "lora_path: '/etc' is no adapter below"),
        ({"lora_name": "x", "lora_path": "../base"}, 422, "lora_path: '../base' is no adapter below"),
        ({"lora_name": "x", "lora_path": "out"}, 422, "lora_path: 'out' is no adapter below"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 422, "lora_path: 'nowhere' is no adapter below"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 422, "without NUL"),
        ({"lora_name": "x", "lora_path": f"{LATE}/../../../base"}, 422, "is no adapter below"),
        ({"lora_name": "x", "lora_path": ""}, 422, "lora_path: 0 characters given, 1 to 4096"),
        ({"lora_name": "x", "lora_path": "a" * 4097}, 422, "lora_path: 4097 characters given, 1 to 4096"),
        ({"lora_name": "x", "lora_path": "a" * 4000}, 422, "is no adapter below"),
        ({"lora_name": "x", "lora_path": "."}, 422, "lora_path: '.' is no adapter below"),
        ({"lora_name": "../x", "lora_path": LATE}, 422, "is no name of one or two parts"),
        ({"lora_name": "a:b", "lora_path": LATE}, 422, "is no name of one or two parts"),
        ({"lora_name": LISTED, "lora_path": LATE}, 422, "is served already"),
        ({"lora_name": BASE, "lora_path": LATE}, 422, "is served already"),
        ({"lora_name": "x", "lora_path": LATE, "base_model_name": "none"}, 404, "does not exist"),
        ({"lora_name": "x", "lora_path": LATE, "base_model_name": LISTED}, 422, "is a variant"),
        ({"lora_name": "x", "lora_path": "torn"}, 422, "no whole safetensors file"),
        (
            {"lora_name": "x", "lora_path": "wide"},
            422,
            r"[4, 9] and [64, 4] do not fit rank 4 and a layer of 64",
        ),
        ({"lora_name": "x", "lora_path": "head"}, 422, "lm_head: is the head over the vocabulary"),
        ({"lora_name": "x", "lora_path": "dora"}, 422, "use_dora is not supported"),
        ({"lora_name": 7, "lora_path": LATE}, 422, "lora_name"),
        ({"lora_path": LATE}, 422, "lora_name"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_loaded_is_refused_by_name_and_leaves_nothing(
    server: Server, place: Place, body: dict[str, Any], status: int, said: str
) -> None:
    out = place.loras / "out"
    if not out.exists():
        out.symlink_to(place.base)
        torn = loras.write(place.loras / "torn", place.base, TARGETS) / loras.WEIGHTS
        torn.write_bytes(torn.read_bytes()[:-9])
        loras.write_layers(place.loras / "wide", {"model.layers.0.self_attn.q_proj": (64, 9)}, ("q_proj",))
        loras.write_layers(place.loras / "head", {"lm_head": (64, 64)}, ("lm_head",))
        loras.write(place.loras / "dora", place.base, TARGETS, use_dora=True)
    before = listed(server)
    answer = server.post("/v1/load_lora_adapter", body)
    assert answer.status == status, answer.body
    assert said in answer.json()["error"]["message"]
    assert listed(server).keys() == before.keys()
    assert str(place.loras) not in answer.body.decode()


def test_an_adapter_of_the_catalog_is_not_unloaded_by_a_request(server: Server) -> None:
    answer = unload(server, LISTED)
    assert answer.status == 422 and "is named by the catalog" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["nobody", "", "../listed", f"{BASE}:{LISTED}", "n" * 100_000])
def test_an_adapter_that_nobody_has_loaded_is_not_found(server: Server, name: str) -> None:
    answer = unload(server, name)
    assert answer.status == 404 and len(answer.body) < 2_000
    assert "no LoRA adapter" in answer.json()["error"]["message"]


@pytest.mark.parametrize("either", [GATEWAY], indirect=True)
def test_an_adapter_that_a_request_loads_at_a_box_serves_through_a_gateway_until_it_is_unloaded(
    server: Server, either: Server, place: Place
) -> None:
    name = f"{BASE}:{BROUGHT}"
    assert ask(either, name).status == 404
    assert load(server, BROUGHT, BROUGHT).status == 200
    wait_until(lambda: ask(either, name).status == 200, what="the adapter at the gateway")
    assert complete(either, name) == place.wanted(BROUGHT)
    assert unload(server, BROUGHT).status == 200
    wait_until(lambda: ask(either, name).status == 404, what="the end of the adapter at the gateway")
    assert complete(either, BASE) == place.wanted("")
