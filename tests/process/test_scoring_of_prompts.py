"""Evaluation harnesses score the ends of prompts by `/v1/completions`, as transformers does from the same directory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.later import openai
from tests.harness.server import Server, serving
from tests.tiny import chat_models

KINDS = {"tiny/llama3": "llama3", "tiny/gemma": "gemma"}
"""A model whose tokenizer begins each text, and one with a sliding window of 64 tokens."""
WORDS = (
    "water",
    "turns",
    "the",
    "wheel",
    "and",
    "naïve",
    "people",
    "watch",
    "🙂",
    "two  blanks",
    "(x)",
    "12",
)
TOLERANCE = 1e-4
Scored = tuple[float, bool]
"""The sum of the log probabilities of the tokens of an end, and whether each is the likeliest."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scoring")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    catalog = root / "catalog"
    catalog.mkdir()
    for name, kind in KINDS.items():
        chat_models.write_entry(catalog, name, chat_models.save(kind, root / kind))
    settings = {"generation.prefill_tokens": 64, "generation.max_sequences": 6}
    with serving(root, tuple(KINDS), settings, catalog=catalog, supervised=False) as running:
        yield running


class Reference:
    """A model as transformers loads and runs its directory."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(directory))
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(directory)).eval()

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log probabilities [tokens - 1, vocabulary] of the tokens behind the first."""
        return torch.log_softmax(self.model(torch.tensor([list(ids)])).logits[0, :-1].float(), dim=-1)

    def score(self, ids: Sequence[int], context: int) -> Scored:
        """How an end of `ids` scores behind so many tokens."""
        rows, ends = self.logprobs(ids)[context - 1 :], torch.tensor(list(ids[context:]))
        greedy = bool((rows.argmax(-1) == ends).all())
        return float(rows.gather(1, ends[:, None]).sum()), greedy


def pairs_of(reference: Reference) -> list[tuple[list[int], int]]:
    """Twenty prompts as token ids, with the tokens before their ends; some ends are those that the model chooses."""
    draw, pairs = random.Random(3), []
    for number in range(20):
        text = " ".join(draw.choices(WORDS, k=draw.choice((1, 4, 20, 60))))
        context = reference.tokenizer(text)["input_ids"]
        end = reference.tokenizer(" " + draw.choice(WORDS), add_special_tokens=False)["input_ids"]
        if number % 4 == 0:
            end = [int(reference.logprobs([*context, 0])[-1].argmax())]
        pairs.append(([*context, *end], len(context)))
    return pairs


def scores(
    server: Server, model: str, batch: Sequence[tuple[list[int], int]], max_tokens: int
) -> list[Scored]:
    """What lm-evaluation-harness's `local-completions` asks and reads for one batch."""
    answer = server.post(
        "/v1/completions",
        {
            "model": model,
            "prompt": [ids for ids, _ in batch],
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    )
    assert answer.status == 200, answer.body
    found = []
    choices = sorted(answer.json()["choices"], key=itemgetter("index"))
    for choice, (ids, context) in zip(choices, batch, strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert len(told["tokens"]) == len(told["text_offset"]) == len(ids) + max_tokens
        end = slice(context, -1 if max_tokens else None)
        near = zip(told["token_logprobs"][end], told["top_logprobs"][end], strict=True)
        greedy = all(value == max(top.values()) for value, top in near)
        found.append((sum(told["token_logprobs"][end]), greedy))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("model", KINDS)
def test_a_harness_scores_twenty_prompts_as_transformers_does(
    server: Server, root: Path, model: str, max_tokens: int
) -> None:
    reference = Reference(root / KINDS[model])
    pairs = pairs_of(reference)
    wanted = [reference.score(*pair) for pair in pairs]
    assert {greedy for _, greedy in wanted} == {True, False}
    known = {"model": model, "prompt": [ids for ids, _ in pairs], "max_tokens": 2}
    assert server.post("/v1/completions", known).status == 200, "blocks of all prompts are kept"
    batches = [pairs[:1], pairs[1:4], pairs[4:12], pairs[12:]]
    with ThreadPoolExecutor(len(batches)) as callers:
        asked = [callers.submit(scores, server, model, batch, max_tokens) for batch in batches]
        found = [score for each in asked for score in each.result()]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    for (ids, context), (one, _), (other, _) in zip(pairs, found, wanted, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE * (len(ids) - context))


@pytest.mark.sample
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("model", KINDS)
def test_a_text_is_echoed_with_the_place_of_each_token(
    server: Server, root: Path, model: str, streams: bool
) -> None:
    reference = Reference(root / KINDS[model])
    prompt = " ".join(WORDS * 20)
    columns: dict[str, list[Any]] = {}
    texts = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": model, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
        answers: Any = client.completions.create(**asked, stream=streams)
        for answer in answers if streams else [answers]:
            [choice] = answer.choices
            texts.append(choice.text)
            for name, values in choice.logprobs.model_dump().items() if choice.logprobs else ():
                columns.setdefault(name, []).extend(values)
    text, ids = "".join(texts), reference.tokenizer(prompt)["input_ids"]
    assert text.startswith(prompt) and len(text) > len(prompt)
    rows = reference.logprobs(ids)
    own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert columns["token_logprobs"][1 : len(ids)] == pytest.approx(own.tolist(), abs=TOLERANCE)
    assert [max(top.values()) for top in columns["top_logprobs"][1 : len(ids)]] == pytest.approx(
        rows.amax(-1).tolist(), abs=TOLERANCE
    )
    starts = columns["text_offset"]
    assert len(columns["tokens"]) == len(ids) + 3 and starts == sorted(starts)
    for token, start in zip(columns["tokens"], starts, strict=True):
        shown = token not in reference.tokenizer.all_special_tokens and "\ufffd" not in token
        assert not shown or text[start:].startswith(token)


def test_ids_are_echoed_as_their_text(server: Server, root: Path) -> None:
    tokenizer = Reference(root / "llama3").tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in ("naïve 🙂", "hello")]
    body = {"model": "tiny/llama3", "prompt": prompts, "max_tokens": 0, "echo": True, "n": 2}
    answer = server.post("/v1/completions", body).json()
    told = [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]
    texts = [f"{tokenizer.bos_token}{text}" for text in ("naïve 🙂", "hello")]
    assert told == [(text, "length", None) for text in texts for _ in range(2)]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_prompt_as_long_as_the_context_can_be_scored_and_not_continued(server: Server, root: Path) -> None:
    reference = Reference(root / "gemma")
    longest = chat_models.CONTEXT
    ids = random.Random(1).choices(range(100, 200), k=longest)
    body = {"model": "tiny/gemma", "prompt": ids, "echo": True, "logprobs": 0}
    refused = server.post("/v1/completions", {**body, "max_tokens": 1})
    assert refused.status == 422 and f"{longest} tokens" in refused.json()["message"]
    [choice] = server.post("/v1/completions", {**body, "max_tokens": 0}).json()["choices"]
    own = reference.logprobs(ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=TOLERANCE)
    assert choice["finish_reason"] == "length"
