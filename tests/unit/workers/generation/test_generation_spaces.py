"""What a key has sent stays with the key: each call has its space, and what is kept is found within one space only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from ipc.wire.messages import GenerateCall, Grammar
from tests.fakes.generating import BLOCK_TOKENS, Answers, engine_of, request_of
from tests.fakes.generation_server import RecordedServer
from tests.tiny import causal, chat_tokenizers
from workers.generation.formats.table import detect
from workers.generation.grammar import Grammars

KEYS = {"one": api_keys.fresh(), "other": api_keys.fresh()}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["hi", "there"]},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


def keyed() -> Gate:
    """The gate of a server with two keys."""
    return Gate(tuple(KeyEntry(name, api_keys.hashed(key)) for name, key in KEYS.items()))


class Asked:
    """Asks a server and tells the spaces of the calls."""

    def __init__(self, server: RecordedServer, url: str, path: str) -> None:
        self._engine, self._url, self._path = server.engine, url, path

    def __call__(self, key: str = "", **fields: Any) -> str:
        """The space of a request with that key; all prompts of a request have the same."""
        headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
        self._engine.works.clear()
        response = httpx.post(self._url + self._path, json=ROUTES[self._path] | fields, headers=headers)
        assert response.status_code == 200, response.text
        [found] = {call.space for call in self._engine.calls}
        return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ROUTES)
def test_a_space_belongs_to_a_key_and_a_salt(path: str, tmp_path: Path) -> None:
    server = RecordedServer(tmp_path, keyed())
    with server.listening() as url:
        space = Asked(server, url, path)
        mine, salted = space("one"), space("one", cache_salt="sea")
        others = [space("other"), space("other", cache_salt="sea"), space("one", cache_salt="se")]
        assert len({mine, salted, *others, ""}) == 6
        assert (space("one"), space("one", cache_salt="sea")) == (mine, salted)


def test_without_keys_and_with_shared_prefixes_only_the_salt_divides(tmp_path: Path) -> None:
    open_ = RecordedServer(tmp_path / "open")
    shared = RecordedServer(tmp_path / "shared", keyed(), generation__share_prefixes=True)
    with open_.listening() as url, shared.listening() as other:
        anyone, space = Asked(open_, url, "/v1/completions"), Asked(shared, other, "/v1/completions")
        assert anyone() == space("one") == space("other") == ""
        salted = space("one", cache_salt="sea")
        assert "" != salted == space("other", cache_salt="sea") == anyone(cache_salt="sea")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cache_salt", "", "0 characters given, 1 to 1024"),
        ("cache_salt", "x" * 1025, "1025 characters given, 1 to 1024"),
        ("cache_salt", 7, "expected"),
        ("seed", 1 << 64, "18446744073709551616"),
        ("seed", -(1 << 63) - 1, "-9223372036854775809"),
        ("seed", 1 << 200, "seed"),
    ],
)
def test_salts_and_seeds_that_could_mean_others_are_refused(
    path: str, field: str, value: Any, said: str, tmp_path: Path
) -> None:
    server = RecordedServer(tmp_path)
    body = json_of(ROUTES[path] | {field: value})
    response = server.post(path, body)
    assert response.status_code in (400, 422)
    assert field in response.text and said in response.text and not server.engine.calls


def json_of(body: dict[str, Any]) -> bytes:
    """JSON with integers of any size."""
    return json.dumps(body).encode()


@pytest.mark.parametrize("seed", [0, -1, (1 << 62) + 7, (1 << 64) - 1, -(1 << 63)])
def test_a_seed_travels_as_it_is(seed: int, tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    for path, body in ROUTES.items():
        assert server.post(path, body | {"seed": seed}).status_code == 200
    assert {call.sampling.seed for call in server.engine.calls} == {seed}


def test_prompts_are_found_within_their_space_also_after_a_pause_and_a_preemption() -> None:
    prompt = random.Random(5).choices(range(5, causal.VOCABULARY), k=61)
    engine, answers = engine_of(causal.build("llama")), Answers()

    def ask(key: str, space: str) -> int:
        engine.add(request_of(key, prompt, 12, n=2, space=space))
        answers.take(engine.step())
        engine.pause(key)
        engine.resume(key)
        answers.run(engine)
        return answers.cached[key]

    found = [ask("first", "one"), ask("guess", "other"), ask("open", ""), ask("again", "one")]
    assert found == [0, 0, 0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    small, crowded = engine_of(causal.build("llama"), blocks=20), Answers()
    for space in ("one", "other", "third"):
        small.add(request_of(space, prompt, 40, space=space))
    crowded.run(small)
    assert small.statistics().preemptions > 0 and set(crowded.cached.values()) == {0}
    texts = [text[:12] for text in (*answers.tokens.values(), *crowded.tokens.values())]
    assert len(texts) == 11 and all(text == texts[0] for text in texts)


def test_a_grammar_of_another_space_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizers.save("chatml", tmp_path)
    grammars = Grammars(tokenizer, len(tokenizer), [2], detect(tokenizer, ""))
    tried: list[str] = []
    compile_ = Grammars._tried
    monkeypatch.setattr(Grammars, "_tried", lambda self, text: tried.append(text) or compile_(self, text))
    try:
        for place in ("", "one", "one", "other", ""):
            call = GenerateCall(grammar=Grammar("regex", "[ab]{3}"), space=place, splits=False)
            assert grammars.factory(call, "", 8) is not None
    finally:
        grammars.close()
    assert len(tried) == 3
