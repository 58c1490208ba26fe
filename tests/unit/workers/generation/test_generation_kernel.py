"""torch's variable-length kernel over the cache: the tokens of the grouped path, and kernels that are refused.

The kernels are stand-ins in plain torch, with the rules of the FlashAttention versions behind `varlen_attn`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.fakes import varlen
from tests.fakes.generating import BLOCK_TOKENS, Answers, engine_of, request_of
from tests.tiny import causal
from workers.generation.attention import PagedAttention
from workers.generation.paged_kernel import Form, PagedKernel, proven, select_kernel

CPU = torch.device("cpu")
LENGTHS = (1, 24, 40, 63, 100)
TOKENS = 9
Attention = Callable[..., torch.Tensor]
KERNELS: dict[Form, tuple[Attention, int]] = {
    Form.PAGES: (varlen.flash_attention_3, BLOCK_TOKENS),
    Form.COUNTED_PAGES: (varlen.flash_attention_2, 256),
    Form.GATHERED: (varlen.varlen_attn_2_11, BLOCK_TOKENS),
}
"""A kernel for each form, and the tokens of a block."""


class Noted:
    """A kernel that counts its calls."""

    def __init__(self, function: Attention) -> None:
        self._function, self.calls = function, 0
        self.__wrapped__ = function

    def __call__(self, *states: Any, **named: Any) -> torch.Tensor:
        self.calls += 1
        return self._function(*states, **named)


def answers_of(model: Any, attention: PagedAttention) -> dict[tuple[Any, int], list[int]]:
    """Tokens for prompts in chunks, with preemption and beginnings that are known."""
    blocks = 25 if attention.block_tokens == BLOCK_TOKENS else 8
    engine, answers = engine_of(model, blocks=blocks, prefill_tokens=32, attention=attention), Answers()
    for length in LENGTHS:
        engine.add(request_of(length, list(range(5, 5 + length)), TOKENS, n=2))
    answers.run(engine)
    assert engine.pool.used == 0
    return answers.tokens


def attention_with(function: Attention, block_tokens: int) -> PagedAttention:
    """Attention whose layers use `function` if the function passes its check on this device."""
    return PagedAttention(block_tokens, cache(lambda *shape: proven(function, *shape)))


FORMS = [("gemma3", Form.COUNTED_PAGES), ("llama", Form.GATHERED), ("gemma3", Form.GATHERED)]
FAMILIES = ["llama", "mistral", "gemma3", "qwen3"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "form"), [*((family, Form.PAGES) for family in FAMILIES), *FORMS])
def test_tokens_are_those_of_the_grouped_path(family: str, form: Form) -> None:
    function, block_tokens = KERNELS[form]
    model, noted = causal.build(family), Noted(function)
    wanted = answers_of(model, PagedAttention(BLOCK_TOKENS))
    attention = attention_with(noted, block_tokens)
    assert answers_of(model, attention) == wanted
    assert {kernel.form for kernel in attention._kernels.values()} == {form}
    assert noted.calls > TOKENS * model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4", "deepseek_v3"])
def test_formulas_that_no_kernel_has_stay_with_the_grouped_path(family: str) -> None:
    """Soft cap, sinks, chunks, values of another width."""
    model, noted = causal.build(family), Noted(varlen.flash_attention_3)
    wanted = answers_of(model, PagedAttention(BLOCK_TOKENS))
    engine = engine_of(model, attention=attention_with(noted, BLOCK_TOKENS))
    noted.calls = 0
    assert answers_of(model, engine.attention) == wanted
    assert noted.calls == 0


def test_one_layout_of_a_step_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal.build("gemma3")
    layouts: list[int] = []
    whole = PagedKernel.layout

    def counted(self: PagedKernel, stretches: Any, window: int, device: torch.device) -> Any:
        layouts.append(window)
        return whole(self, stretches, window, device)

    for form, kinds in ((Form.PAGES, 1), (Form.GATHERED, 2)):
        function, block_tokens = KERNELS[form]
        engine, answers = engine_of(model, attention=attention_with(function, block_tokens)), Answers()
        engine.add(request_of("a", range(5, 45), 3))
        monkeypatch.setattr(PagedKernel, "layout", counted)
        layouts.clear()
        answers.run(engine)
        monkeypatch.undo()
        assert len(layouts) == 3 * kinds, form


def broken(change: Callable[[dict[str, Any]], dict[str, Any]], function: Attention) -> Attention:
    """A kernel that understands its arguments in another way."""
    noted = Noted(function)
    noted._function = lambda *states, **named: function(*states, **change(named))
    return noted


WRONG: dict[str, tuple[Attention, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "the causal mask": (varlen.varlen_attn_2_13, lambda named: {**named, "window_size": (-1, -1)}),
    "one token of the window": (
        varlen.varlen_attn_2_13,
        lambda named: {**named, "window_size": (max(-1, named["window_size"][0] - 1), 0)},
    ),
    "the scale": (varlen.varlen_attn_2_11, lambda named: {**named, "scale": None}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_computes_wrong_is_refused(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    function, change = WRONG[wrong]
    assert proven(broken(change, function), CPU, torch.float32, 4, 2, 16, BLOCK_TOKENS) is None
    [record] = caplog.records
    assert "does not read the cache" in record.message and "differs from SDPA" in record.message


def test_a_kernel_that_reads_behind_the_end_of_a_sequence_reads_gathered_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def whole_pages(named: dict[str, Any]) -> dict[str, Any]:
        if named.get("seqused_k") is not None:
            named["seqused_k"] = (named["seqused_k"] + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return named

    class Reaching(Noted):
        def __call__(self, *states: Any, **named: Any) -> torch.Tensor:
            return self._function(*states[:6], 10_000, **whole_pages(named))

    with caplog.at_level(logging.INFO):
        kernel = proven(Reaching(varlen.varlen_attn_2_13), CPU, torch.float32, 4, 2, 16, BLOCK_TOKENS)
    assert kernel is not None and kernel.form is Form.GATHERED
    [record] = caplog.records
    assert record.message.count("differs from SDPA") == 2


def test_a_kernel_of_large_pages_gathers_small_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernel = proven(varlen.flash_attention_2, CPU, torch.float32, 4, 2, 16, 16)
    assert kernel is not None and kernel.form is Form.GATHERED
    [record] = caplog.records
    assert "by gathered keys" in record.message and "divisible by 256" in record.message


def test_a_kernel_that_raises_is_refused_with_its_words(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Noted):
        def __call__(self, *states: Any, **named: Any) -> torch.Tensor:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")

    assert proven(Raising(varlen.varlen_attn_2_13), CPU, torch.float32, 4, 2, 16, BLOCK_TOKENS) is None
    assert proven(varlen.varlen_attn_2_10, CPU, torch.float32, 4, 2, 16, BLOCK_TOKENS) is None
    first, second = caplog.records
    assert "only supports Ampere" in first.message and "more" not in first.message
    assert "no scale, window_size" in second.message


def test_memory_that_is_short_says_nothing_of_a_kernel() -> None:
    class Short(Noted):
        def __call__(self, *states: Any, **named: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        proven(Short(varlen.varlen_attn_2_13), CPU, torch.float32, 4, 2, 16, BLOCK_TOKENS)


def test_cpu_and_float32_have_no_kernel() -> None:
    assert select_kernel(CPU, torch.bfloat16, 4, 4, 64, 16) is None
    assert select_kernel(torch.device("cuda", 0), torch.float32, 4, 4, 64, 16) is None
