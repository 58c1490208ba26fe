"""The token budget of a batch: it halves on memory trouble and is whole again within five minutes of calm."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.fakes.clock import Clock
from workers.device import oom
from workers.scheduling import bound
from workers.scheduling.bound import ModelBudgets, TokenBudget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the module."""
    return Clock.of(bound, monkeypatch)


def test_the_budget_halves_what_was_tried(clock: Clock) -> None:
    budget = TokenBudget(32768)
    budget.shrink(20000)
    assert budget.tokens == 10000
    budget.shrink(10000)
    assert budget.tokens == 5000


def test_the_budget_never_falls_below_its_floor(clock: Clock) -> None:
    budget = TokenBudget(3072)
    for _ in range(20):
        budget.shrink(budget.tokens)
    assert budget.tokens == bound.SMALLEST_TOKENS


def test_the_budget_does_not_grow_before_a_calm_period(clock: Clock) -> None:
    budget = TokenBudget(3072)
    budget.shrink(3072)
    clock.now += bound.GROW_AFTER_S / 2
    budget.grow()
    assert budget.tokens == 1536
    budget.shrink(1536)
    clock.now += bound.GROW_AFTER_S * 0.9
    budget.grow()
    assert budget.tokens == 768, "trouble must begin the calm period anew"


def test_trouble_of_one_model_leaves_the_batches_of_others_whole(clock: Clock) -> None:
    budgets = ModelBudgets(3072)
    budgets.shrink("large", 3072)
    assert (budgets.tokens_of("large"), budgets.tokens_of("small"), budgets.smallest) == (1536, 3072, 1536)
    for _ in range(300):
        clock.now += 1
        budgets.grow("large")
    assert budgets.tokens_of("large") == budgets.smallest == 3072


def test_a_failed_pass_keeps_no_tensor_alive() -> None:
    def forward() -> None:
        activations = torch.ones(4)
        gone.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("out of memory")

    gone: list[weakref.ref[torch.Tensor]] = []
    try:
        forward()
    except torch.OutOfMemoryError as error:
        kept = error
    assert gone[0]() is not None
    oom.forget_frames(kept)
    assert gone[0]() is None
    assert "out of memory" in str(kept)


@pytest.mark.parametrize("configured", [1, 100, 3072, 32768])
def test_the_budget_is_whole_again_within_five_minutes_of_calm(clock: Clock, configured: int) -> None:
    budget = TokenBudget(configured)
    for _ in range(20):
        budget.shrink(budget.tokens)
    for _ in range(300):
        clock.now += 1
        budget.grow()
    assert budget.tokens == configured


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
    ],
)
def test_memory_trouble_is_recognised(error: Exception) -> None:
    assert oom.is_out_of_memory(error)
    assert not oom.is_device_lost(error)


def test_other_failures_are_not_taken_for_memory_trouble() -> None:
    assert not oom.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not oom.is_device_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert oom.is_device_lost(RuntimeError("CUDA error: uncorrectable ECC error encountered"))


def test_a_model_that_is_unloading_is_remembered_with_the_limit_of_its_adapter(clock: Clock) -> None:
    budgets = ModelBudgets(2048)
    budgets.shrink("two_rows", 32, 32)
    assert budgets.tokens_of("two_rows") == 32, "it may never be larger than what the adapter takes"
    budgets.shrink("wide", 16_000, 16_000)
    assert budgets.tokens_of("wide") == 8000
    for _ in range(300):
        clock.now += 1
        budgets.grow("wide")
    assert budgets.tokens_of("wide") == 2048, "a budget that is whole again is forgotten"
