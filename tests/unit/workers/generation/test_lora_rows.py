"""LoRA adapters of models that generate: each request has the tokens of the model with its adapter merged in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

from tests.fakes.generating import (
    BLOCK_TOKENS,
    Answers,
    Greedy,
    KeptOutput,
    NotedMasks,
    engine_of,
    request_of,
)
from tests.tiny import causal, loras
from workers.adapters.shared import linears
from workers.adapters.shared.linears import LaidOutLinear
from workers.adapters.shared.lora import FittedLora, TextLoras
from workers.generation.engine import Engine
from workers.generation.joined import join
from workers.generation.lora_rows import Delta, LoraProducts, StepRows, Stretch
from workers.generation.plain import PlainEngine
from workers.generation.request import PromptText
from workers.loading.lora_files import UnsupportedLora

pytestmark = pytest.mark.usefixtures("both_modes_at_length")

FAMILIES = ("llama", "llama4", "qwen2", "mistral", "gemma2", "gemma3n", "phi3", "deepseek_v3", "gpt_oss")
LONG = ("qwen2", "mistral", "gemma3n")
"""Families that repeat what others show."""
ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
OUTPUT = ("o_proj",)
ADAPTERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all": (ATTENTION + OUTPUT + MLP, {"r": 4}),
    "same": (ATTENTION + OUTPUT + MLP, {"r": 4}),
    "third": (ATTENTION + OUTPUT + MLP, {"r": 4}),
    "attention": (ATTENTION, {"r": 4, "lora_alpha": 3}),
    "wide": (
        OUTPUT + MLP,
        {"r": 6, "use_rslora": True, "ranks": {"o_proj": 2}, "rank_pattern": {"o_proj": 2}},
    ),
}
"""Targets and settings of each adapter; those of one rank share products, and some layers have some adapters only."""
LENGTHS = (1, 11, 30, 41)
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.1},
}
TOKENS = 6


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that no model here has as a special token."""
    return random.Random(1000 * seed + length).choices(range(5, causal.VOCABULARY), k=length)


def linears_of(model: nn.Module, targets: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the plain linear layers of a model whose paths end with one of `targets`, by path."""
    return {
        path: tuple(layer.weight.shape)
        for path, layer in model.named_modules()
        if type(layer) is nn.Linear and path.rpartition(".")[2] in targets
    }


def write(directory: Path, model: nn.Module, name: str) -> Path:
    """The files of an adapter of `ADAPTERS` for a model."""
    targets, config = ADAPTERS[name]
    shapes = linears_of(model, targets)
    seed = sorted(ADAPTERS).index(name)
    return loras.write_layers(directory / name, shapes, targets, seed=seed, spread=0.3, **config)


def merged(model: nn.Module, lora: Path, name: str) -> Any:
    """A copy of a model with W + scale * B A."""
    copied = copy.deepcopy(model)
    config = ADAPTERS[name][1]
    tensors = load_file(lora / loras.WEIGHTS)
    for key, down in tensors.items():
        if "lora_A" in key:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up, rank = tensors[key.replace("lora_A", "lora_B")], down.shape[0]
            scale = config.get("lora_alpha", 8) / (rank**0.5 if config.get("use_rslora") else rank)
            copied.get_submodule(path).weight.data += (scale * (up.double() @ down.double())).float()
    return copied


@torch.inference_mode()
def generated(model: Any, prompt: list[int], allowed: set[int] | None = None) -> list[int]:
    """The tokens of generate(), all of them or `allowed` ones."""
    held = {} if allowed is None else {"prefix_allowed_tokens_fn": lambda *_: sorted(allowed)}
    model.set_attn_implementation("eager")
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        **held,
    )[0]
    return ids[len(prompt) :].tolist()  # type: ignore[no-any-return]


class Case:
    """One family with its adapters, and the tokens that each of them gives alone, merged into the weights."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        model = causal.build(family)
        self.files = {name: write(root / family, model, name) for name in ADAPTERS}
        models = {"": model} | {name: merged(model, path, name) for name, path in self.files.items()}
        self.wanted = {
            (name, length): generated(each, prompt_of(length))
            for name, each in models.items()
            for length in LENGTHS
        }

    def engine(self, make: Callable[..., Engine] = engine_of, model: Any = None, **options: Any) -> Engine:
        """An engine over `model`, or the model that tests share, with all adapters."""
        model = model or causal.build(self.family)
        engine = make(model, **options)
        engine.loras = layers = TextLoras(model)
        for name, path in self.files.items():
            layers.install(name, layers.fit(path))
        return engine


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of a family, made once."""
    return cache(lambda family: Case(family, tmp_path_factory.mktemp("loras")))


def every(case: Case, **options: Any) -> dict[Any, list[int]]:
    """The tokens of all prompts with all adapters and without, in one engine."""
    engine, answers = case.engine(**options), Answers()
    for length in LENGTHS:
        for name in ("", *ADAPTERS):
            engine.add(request_of((name, length), prompt_of(length), TOKENS, lora=name))
    answers.run(engine)
    assert engine.pool.used == 0
    return {key: answers.tokens[key, 0] for key in case.wanted}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in FAMILIES]
)
def test_requests_in_company_have_the_tokens_of_their_merged_models(
    case: Callable[[str], Case], family: str
) -> None:
    found = case(family)
    assert every(found) == found.wanted
    changed = [key for key, tokens in found.wanted.items() if tokens != found.wanted["", key[1]]]
    assert len(changed) > len(ADAPTERS), "adapters that change nothing would prove nothing"


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"prefill_tokens": 20},
    "few at a time": {"max_sequences": 3},
    "preempted": {"blocks": 24, "prefill_tokens": 64},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunks_company_and_preemption_change_nothing(
    case: Callable[[str], Case], family: str, way: str
) -> None:
    found = case(family)
    assert every(found, **WAYS[way]) == found.wanted


def test_one_model_that_is_no_packed_one_runs_its_own_passes_with_adapters(
    case: Callable[[str], Case],
) -> None:
    found, answers = case("llama"), Answers()

    def plain(model: Any) -> Engine:
        return PlainEngine(model, causal.CONTEXT, Greedy(), NotedMasks(), KeptOutput, scored_tokens=8)

    engine = found.engine(plain, causal.make("llama"))
    for name in ("attention", "", "wide"):
        engine.add(request_of((name, 30), prompt_of(30), TOKENS, lora=name))
    answers.run(engine)
    for name in ("attention", "", "wide"):
        assert answers.tokens[(name, 30), 0] == found.wanted[name, 30]


def test_adapters_never_share_blocks_and_one_adapter_finds_its_own(case: Callable[[str], Case]) -> None:
    engine, answers = case("llama").engine(), Answers()
    prompt = prompt_of(41)
    for key, name in (("a", "all"), ("b", ""), ("c", "same"), ("d", "all"), ("e", ""), ("f", "same")):
        engine.add(request_of(key, prompt, TOKENS, lora=name))
        answers.run(engine)
    whole = 40 // BLOCK_TOKENS * BLOCK_TOKENS
    assert answers.cached == {"a": 0, "b": 0, "c": 0, "d": whole, "e": whole, "f": whole}
    layers: Any = engine.loras
    before = layers.get("all")
    layers.install("all", layers.fit(case("llama").files["all"]))
    assert layers.get("all").serial != before.serial
    engine.add(request_of("again", prompt, TOKENS, lora="all"))
    answers.run(engine)
    assert answers.cached["again"] == 0, "an adapter that was loaded anew may have other weights"


def test_choices_told_prompts_and_grammars_have_the_adapter_of_their_request(
    case: Callable[[str], Case],
) -> None:
    found = case("llama")
    allowed = set(range(40, 60))
    sampler = Greedy(lambda sequence: allowed if sequence.request.key == "held" else None)
    engine, answers = found.engine(sampler=sampler, scored_tokens=7), Answers()
    prompt = prompt_of(30)
    scored: dict[str, list[float]] = {}
    engine.add(request_of("n", prompt, TOKENS, n=3, lora="wide"))
    engine.add(request_of("held", prompt, TOKENS, lora="wide"))
    for name in ("", "wide"):
        request = request_of(f"told {name}", prompt, 1, lora=name)
        request.call = replace(request.call, prompt_logprobs=0, tells_prompt=True)
        request.prompt_text = PromptText("x" * 30, range(30), lambda token: b"x")
        engine.add(request)
    while engine.has_work:
        emitted = engine.step()
        answers.take([each for each in emitted if not each.prompt])
        for each in emitted:
            told = [one.logprob for one in each.prompt or () if one.logprob is not None]
            scored.setdefault(str(each.key), []).extend(told)
    assert all(answers.tokens["n", choice] == found.wanted["wide", 30] for choice in range(3))
    model = merged(causal.build("llama"), found.files["wide"], "wide")
    assert answers.tokens["held", 0] == generated(model, prompt, allowed)
    for name, each in (("", causal.make("llama")), ("wide", model)):
        logits = each(torch.tensor([prompt])).logits[0].log_softmax(-1)
        wanted = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert scored[f"told {name}"] == pytest.approx(wanted, abs=1e-3)


def test_an_adapter_may_come_and_another_go_while_requests_run(case: Callable[[str], Case]) -> None:
    found, answers = case("llama"), Answers()
    engine = found.engine()
    layers: Any = engine.loras
    for name in ("all", "attention", ""):
        engine.add(request_of((name, 30), prompt_of(30), TOKENS, lora=name))
    for _ in range(3):
        answers.take(engine.step())
    gone = layers.get("wide")
    layers.remove("wide", gone)
    layers.install("late", layers.fit(found.files["wide"]))
    engine.add(request_of("late", prompt_of(30), TOKENS, lora="late"))
    answers.run(engine)
    assert answers.tokens["late", 0] == found.wanted["wide", 30]
    for name in ("all", "attention", ""):
        assert answers.tokens[(name, 30), 0] == found.wanted[name, 30]
    with pytest.raises(KeyError):
        engine.add(request_of("wide", prompt_of(30), TOKENS, lora="wide"))


def test_steps_without_adapters_run_without_hooks(case: Callable[[str], Case]) -> None:
    engine, answers = case("llama").engine(model=causal.make("llama")), Answers()
    model = engine.model

    def hooked() -> bool:
        return any(module._forward_hooks for module in model.modules())

    engine.add(request_of("with", prompt_of(11), 2, lora="all"))
    answers.take(engine.step())
    assert hooked()
    answers.run(engine)
    engine.add(request_of("without", prompt_of(11), 2))
    answers.run(engine)
    assert not hooked()
    layers: Any = engine.loras
    for name in ADAPTERS:
        layers.remove(name, layers.get(name))
    assert not layers, "a model without adapters is not asked for any"


def test_captured_steps_are_left_to_requests_without_adapters(case: Callable[[str], Case]) -> None:
    found, answers = case("llama"), Answers()
    engine = found.engine()
    asked: list[int] = []
    engine._captured = SimpleNamespace(logits=lambda spans, unread: asked.append(len(spans)))  # type: ignore[assignment]
    engine.add(request_of(("all", 30), prompt_of(30), TOKENS, lora="all"))
    answers.run(engine)
    assert answers.tokens[("all", 30), 0] == found.wanted["all", 30] and not asked
    engine.add(request_of("bare", prompt_of(30), TOKENS))
    answers.run(engine)
    assert asked == [1] * (TOKENS - 1)


def test_a_proof_runs_alone_and_loses_nothing_of_the_others(case: Callable[[str], Case]) -> None:
    found, answers = case("llama"), Answers()
    engine = found.engine(max_sequences=2)
    for name in ("all", "", "wide"):
        engine.add(request_of((name, 30), prompt_of(30), TOKENS, lora=name))
    engine.add(request_of("rests", prompt_of(11), TOKENS))
    engine.pause("rests")
    for _ in range(2):
        answers.take(engine.step())
    with engine.alone():
        engine.add(request_of(None, prompt_of(11), 2))
        alone = Answers().run(engine)
    assert {key for key, _ in alone.tokens} == {None}
    answers.run(engine)
    for name in ("all", "", "wide"):
        assert answers.tokens[(name, 30), 0] == found.wanted[name, 30]
    assert ("rests", 0) not in answers.tokens, "a request whose client does not read still rests"


def test_layers_laid_out_for_onednn_take_adapters(case: Callable[[str], Case]) -> None:
    if not linears.laid_out_dtypes():
        pytest.skip("this torch has no oneDNN linear operators")
    found, answers = case("llama"), Answers()
    model = causal.make("llama")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, LaidOutLinear(child))
    engine = found.engine(model=model)
    for name in ("all", "wide", ""):
        engine.add(request_of((name, 30), prompt_of(30), TOKENS, lora=name))
    answers.run(engine)
    for name in ("all", "wide", ""):
        assert answers.tokens[(name, 30), 0] == found.wanted[name, 30]


def test_layers_joined_to_one_product_take_adapters(case: Callable[[str], Case]) -> None:
    found, answers = case("llama"), Answers()
    model = causal.make("llama")
    assert join(model.model.layers) == 2 * len(model.model.layers)
    engine = found.engine(model=model)
    for name in ("all", "wide", ""):
        engine.add(request_of((name, 30), prompt_of(30), TOKENS, lora=name))
    answers.run(engine)
    for name in ("all", "wide", ""):
        assert answers.tokens[(name, 30), 0] == found.wanted[name, 30]


@pytest.mark.parametrize(
    ("family", "path", "said"),
    [
        ("llama", "lm_head", "lm_head: is the head over the vocabulary"),
        ("llama", "model.embed_tokens", "is a Embedding, only linear layers"),
        ("llama", "model.layers.0.mlp.experts.0.up_proj", "the model has no such layer"),
        ("llama4", "model.layers.0.feed_forward.router", "is a Llama4Router, only plain linear layers"),
    ],
)
def test_layers_that_cannot_take_an_adapter_are_refused_by_name(
    tmp_path: Path, family: str, path: str, said: str
) -> None:
    files = loras.write_layers(tmp_path, {path: (8, 48)}, (path.rpartition(".")[2],))
    with pytest.raises(UnsupportedLora, match=said):
        TextLoras(causal.build(family)).fit(files)


def test_a_layer_that_runs_on_other_rows_than_tokens_is_refused(case: Callable[[str], Case]) -> None:
    engine = case("llama").engine()
    rows = StepRows(3, [Stretch(engine.loras.get("all").serial, 0, 3)], [])  # type: ignore[union-attr]
    layers: Any = engine.loras
    layer = engine.model.model.layers[0].mlp.up_proj
    with (
        torch.inference_mode(),
        pytest.raises(UnsupportedLora, match="runs on 2 rows in a step of 3 tokens"),
        layers.traced("all"),
        layers.over(rows),
    ):
        layer(torch.zeros(1, 2, 48))


@pytest.mark.parametrize(
    "counts",
    [(2, 2, 2), (1, 3, 2), (1, 9, 1), (4, 0, 0), (0, 2, 2), (1, 0, 1), (5, 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_rows_of_any_number_get_the_product_of_their_adapter(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(sum(counts))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    weights = [FittedLora({"x": Delta(drawn(2, 6), drawn(5, 2))}) for _ in counts]
    products = LoraProducts()
    products.arrange(weights)
    singles, row = [], 1
    for each, count in zip(weights, counts, strict=True):
        if count:
            singles.append(Stretch(each.serial, row, row + count))
        row += count
    parts = [Stretch(weights[-1].serial, row, row + 4)]
    states, result = drawn(row + 5, 6), drawn(row + 5, 5)
    wanted = result.clone().float()
    for serial, start, stop in singles + parts:
        assert stop is not None
        down, up = next(each.deltas["x"] for each in weights if each.serial == serial)
        wanted[start:stop] += (states[start:stop] @ down.t() @ up.t()).float()
    products.add("x", StepRows(row + 5, singles, parts), states, result)
    torch.testing.assert_close(result, wanted.to(dtype), **TOLERANCES[dtype])
