"""A broken device context ends the process in order: by the text of the error, before another call to the device."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.generating import BLOCK_TOKENS, Answers, engine_of, request_of
from tests.fakes.replaying import attention
from tests.tiny import causal
from workers.device import oom
from workers.generation.captured import CapturedSteps, Graph, Inputs
from workers.scheduling import job

ASSERTED = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"


class Ended(BaseException):
    """Stands for the end of the process."""


class Asked(BaseException):
    """A call to the device."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a device that may not be asked any more."""

    def asked(*_: object) -> None:
        raise Asked

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("synchronize", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, asked)
    monkeypatch.setattr(oom.os, "_exit", end)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ASSERTED, 70),
        ("CUDA error: an illegal memory access was encountered", 70),
        ("CUDA error: unspecified launch failure", 70),
        ("CUDA error: uncorrectable ECC error encountered", 4),
    ],
)
@pytest.mark.parametrize("is_cause", [False, True])
def test_an_error_of_a_broken_context_ends_the_process_without_another_call(
    text: str, code: int, is_cause: bool
) -> None:
    error: Exception = torch.AcceleratorError(text)
    if is_cause:
        error, error.__cause__ = ValueError("a wrapper of the model"), error
    with pytest.raises(Ended) as ended:
        job.error_of(error)
    assert ended.value.args == (code,)


@pytest.mark.usefixtures("broken")
def test_other_errors_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Asked):
        oom.context_is_broken(RuntimeError("CUDA error: invalid configuration argument"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert isinstance(job.error_of(RuntimeError("shapes differ")), RuntimeError)


def test_words_of_a_model_on_a_processor_end_nothing() -> None:
    error = RuntimeError(ASSERTED)
    oom.end_if_broken(error)
    assert job.error_of(error) is error


@pytest.mark.usefixtures("broken")
def test_a_capture_that_breaks_the_context_runs_no_plain_step() -> None:
    class Breaking(CapturedSteps):
        def _capture(self, inputs: Inputs) -> tuple[Graph, torch.Tensor]:
            raise torch.AcceleratorError(ASSERTED)

    engine = engine_of(causal.make("llama"), attention=attention(BLOCK_TOKENS), captures=Breaking)
    engine.add(request_of("x", [5, 6, 7], 4))
    with pytest.raises(Ended):
        Answers().run(engine)
