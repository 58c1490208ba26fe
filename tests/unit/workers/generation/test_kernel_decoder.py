"""Layers in few kernels: steps of the modules, kernels that are refused, and models that keep their modules.

The kernels are plain torch, or Triton's programs in the interpreter, where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ipc.settings import Generation
from tests.fakes.generating import BLOCK_TOKENS, Answers, KeptOutput, NotedMasks, engine_of, request_of
from tests.fakes.mixed_steps import MixedSteps, with_drawn_norms
from tests.fakes.replaying import ReplayedSteps
from tests.fakes.replaying import attention as replayed
from tests.fakes.torch_kernels import TorchKernels
from tests.tiny import causal, kernel_shapes
from workers.device.findings import Findings, Proof
from workers.generation import building, kernel_decoder, paged_decode, paged_tiles
from workers.generation.attention import PagedAttention
from workers.generation.captured import CapturedSteps
from workers.generation.fused import fuse_with
from workers.generation.kernel_decoder import KernelDecoder
from workers.generation.proof import Earlier, packs
from workers.generation.sampling import BatchedSampler

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Mean difference of logits, and greatest difference of cells, as a part of their size."""
LENGTHS = (1, 7, 30, 60)
SHAPE = torch.device("cuda"), torch.bfloat16, 4, torch.Size((2, 16)), torch.Size((2, 16)), BLOCK_TOKENS


def answers_of(
    model: Any,
    kernels: Any = None,
    within: PagedAttention | None = None,
    captures: type[CapturedSteps] | None = None,
) -> tuple[Answers, CapturedSteps | None]:
    """Two choices for each prompt, in chunks and with prefixes that are known."""
    within = within or PagedAttention(BLOCK_TOKENS)
    engine = engine_of(model, prefill_tokens=32, attention=within, captures=captures)
    if kernels is not None:
        within.decoder = KernelDecoder(model, within, kernels)
        kernels.calls.clear()
    for length in LENGTHS:
        prompt = random.Random(length).choices(range(5, causal.VOCABULARY), k=length)
        engine.add(request_of(length, prompt, 8, n=2))
    return Answers().run(engine), engine._captured


@pytest.mark.usefixtures("both_modes_at_length")
@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", kernel_shapes.SHAPES)
def test_answers_by_kernels_are_those_of_the_modules(shape: str) -> None:
    model, kernels = with_drawn_norms(kernel_shapes.make(shape)), TorchKernels()
    plain, _ = answers_of(model)
    found, _ = answers_of(model, kernels)
    assert found.tokens == plain.tokens
    for place, wanted in plain.logprobs.items():
        assert found.logprobs[place] == pytest.approx(wanted, abs=1e-4)
    assert {"add_norm", "turn", "gated"} <= set(kernels.calls)
    layers = model.config.num_hidden_layers
    assert (
        kernels.calls.count("add_norm")
        == 2 * kernels.calls.count("turn")
        == 2 * layers * kernels.calls.count("norm")
    )


def test_captured_steps_run_the_kernels() -> None:
    model = with_drawn_norms(kernel_shapes.make("qwen3"))
    plain, _ = answers_of(model)
    found, captured = answers_of(model, TorchKernels(), replayed(BLOCK_TOKENS), ReplayedSteps)
    assert found.tokens == plain.tokens
    assert captured is not None and captured.steps


@pytest.mark.parametrize("wrong", ["norm", "add_norm", "turn", "gated"])
def test_a_kernel_that_differs_from_a_module_is_refused(wrong: str) -> None:
    model = kernel_shapes.make("gemma3")
    with pytest.raises(RuntimeError, match="the kernel differs by"):
        KernelDecoder(model, PagedAttention(BLOCK_TOKENS), TorchKernels(**{wrong: 3.0}))


def test_a_kernel_that_writes_to_cells_of_no_row_is_refused() -> None:
    class Straying(TorchKernels):
        def turn(self, heads: Any, turns: Any, cells: Any, norms: Any) -> None:
            super().turn(heads, turns, cells, norms)
            cells.keys[5] = 1.0

    with pytest.raises(RuntimeError, match="cells of no row"):
        KernelDecoder(kernel_shapes.make("llama"), PagedAttention(BLOCK_TOKENS), Straying())


@pytest.mark.parametrize(
    ("shape", "changed", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "no kernel computes ReLU"),
        ("llama", {"head_dim": 1024}, "heads of 1024 numbers"),
    ],
)
def test_layers_of_another_form_are_refused_by_name(shape: str, changed: dict[str, Any], reason: str) -> None:
    model = kernel_shapes.make(shape, **changed)
    with pytest.raises(ValueError, match=reason):
        KernelDecoder(model, PagedAttention(BLOCK_TOKENS), TorchKernels())


@pytest.mark.parametrize("family", ["olmo2", "granite", "gpt_oss", "llama4", "qwen3_moe", "deepseek_v3"])
def test_models_of_another_form_keep_their_modules(family: str) -> None:
    assert not KernelDecoder.knows(causal.make(family))


def made(kernels: Any, tried: list[str], model: Any, attention: PagedAttention) -> KernelDecoder | None:
    """What `packs` takes, with kernels that run on a CPU; `tried` notes the calls."""
    tried.append(type(model).__name__)
    try:
        return KernelDecoder(model, attention, kernels)
    except RuntimeError:
        return None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_proof_takes_kernels_first_and_goes_on_without_those_that_fail(is_wrong: bool) -> None:
    model, attention = kernel_shapes.make("gemma2"), PagedAttention(BLOCK_TOKENS)
    kernels = TorchKernels(turn=1.0 if is_wrong else 0.0)
    assert packs(model, attention, make_kernels=partial(made, kernels, []))
    assert isinstance(attention.decoder, KernelDecoder) is not is_wrong


def test_a_step_that_differs_is_refused_though_its_kernels_agree() -> None:
    class Late(TorchKernels):
        """Errs once the layers are proven."""

        def turn(self, heads: Any, turns: Any, cells: Any, norms: Any) -> None:
            super().turn(heads, turns, cells, norms)
            if len(cells.keys) > 7:
                cells.values[cells.slots] += 1.0

    model, attention = kernel_shapes.make("llama"), PagedAttention(BLOCK_TOKENS)
    assert packs(model, attention, make_kernels=partial(made, Late(), []))
    assert not isinstance(attention.decoder, KernelDecoder)


def test_positions_by_the_length_of_a_text_keep_the_modules() -> None:
    tried: list[str] = []
    model = causal.make("llama_long")
    assert packs(model, PagedAttention(BLOCK_TOKENS), make_kernels=partial(made, TorchKernels(), tried))
    assert not tried


def test_what_a_load_with_kernels_found_is_not_taken_for_a_load_without(tmp_path: Any) -> None:
    findings = Findings(tmp_path)

    def load(make_kernels: Callable[..., KernelDecoder | None] | None) -> PagedAttention:
        proof, attention = Proof(findings), PagedAttention(BLOCK_TOKENS)
        model = kernel_shapes.make("gemma3")
        assert packs(model, attention, Earlier(proof, "model"), make_kernels=make_kernels)
        proof.keep({})
        return attention

    by_kernels = partial(made, TorchKernels(), [])
    assert isinstance(load(by_kernels).decoder, KernelDecoder)
    assert load(None).decoder is None
    assert isinstance(load(by_kernels).decoder, KernelDecoder)


@pytest.mark.parametrize("kernels", [True, False])
def test_the_setting_says_whether_kernels_are_tried(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(building, "kernel_decoder", partial(made, TorchKernels(), tried))
    monkeypatch.setattr(building, "fuse", lambda model: tried.append("modules"))
    settings = Generation(max_sequences=2, kernels=kernels, cache_bytes=1 << 20)
    sampler = BatchedSampler(lambda token: b"", lambda text: [])
    engine = building.build(
        kernel_shapes.make("phi3"), 64, settings, 1 << 24, sampler, NotedMasks(), KeptOutput
    )
    assert tried == (["Phi3ForCausalLM", "modules"] if kernels else [])
    assert engine.attention is not None
    assert isinstance(engine.attention.decoder, KernelDecoder) is kernels


class OnCard:
    """A model that says that it is on a card."""

    device, dtype = torch.device("cuda"), torch.bfloat16


class OutOfResources(Exception):
    """Triton's error for a program that needs more shared memory than there is."""


FAILURES = (
    ImportError("No module named 'triton'"),
    RuntimeError("Failed to find C compiler.\nSet CC"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    OutOfResources("out of resource: shared memory, Required: 262144, Hardware limit: 101376."),
)
"""How Triton fails on a machine that lacks something."""


@pytest.mark.parametrize("error", FAILURES)
def test_kernels_that_cannot_be_made_leave_the_modules_in_use(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(kernel_decoder, "Kernels", fail)
    monkeypatch.setattr(KernelDecoder, "knows", staticmethod(lambda model: True))
    with caplog.at_level(logging.INFO):
        assert kernel_decoder.kernel_decoder(OnCard(), None) is None
    assert str(error).partition("\n")[0] in caplog.text and "Set CC" not in caplog.text


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize(
    ("place", "name", "select"),
    [
        (paged_decode, "PagedDecode", lambda: paged_decode.select_decode.__wrapped__(*SHAPE)),
        (paged_tiles, "PagedTiles", lambda: paged_tiles.select_tiles.__wrapped__(*SHAPE, 8)),
    ],
    ids=["single-tokens", "prompts"],
)
def test_attention_that_cannot_be_made_leaves_steps_as_they_are(
    place: Any,
    name: str,
    select: Callable[[], Any],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(place, name, fail)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1)
    )
    assert select() is None
    assert "are not captured, as" in caplog.text and str(error).partition("\n")[0] in caplog.text


def test_modules_whose_kernel_cannot_be_made_keep_their_form(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(TorchKernels):
        def norm(self, form: Any, x: torch.Tensor) -> torch.Tensor:
            raise FAILURES[-1]

    model = kernel_shapes.make("llama")
    with caplog.at_level(logging.INFO):
        assert fuse_with(model, Failing()) == model.config.num_hidden_layers  # type: ignore[arg-type]
    assert f"LlamaRMSNorm keeps its own form: {FAILURES[-1]}" in caplog.text


def test_a_model_is_proven_without_kernels_that_fail_in_a_step() -> None:
    class Failing(TorchKernels):
        """Fails once the layers are proven."""

        def turn(self, heads: Any, turns: Any, cells: Any, norms: Any) -> None:
            if len(cells.keys) > 7:
                raise FAILURES[-1]
            super().turn(heads, turns, cells, norms)

    model, attention = kernel_shapes.make("llama"), PagedAttention(BLOCK_TOKENS)
    assert packs(model, attention, make_kernels=partial(made, Failing(), []))
    assert not isinstance(attention.decoder, KernelDecoder)


def test_models_on_a_processor_keep_their_modules() -> None:
    model = kernel_shapes.make("llama").to(torch.bfloat16)
    assert kernel_decoder.kernel_decoder(model, PagedAttention(BLOCK_TOKENS)) is None


@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", kernel_shapes.SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_by_kernels_has_the_logits_and_cells_of_the_modules(shape: str, dtype: torch.dtype) -> None:
    steps = MixedSteps(with_drawn_norms(kernel_shapes.make(shape)).to(dtype), TorchKernels())
    plain, found = steps.run(by_kernels=False), steps.run(by_kernels=True)
    slots, near = steps.written(), NEAR[dtype]
    assert float((found.logits - plain.logits).abs().mean() / plain.logits.abs().mean()) <= near
    others = [slot for slot in range(plain.cache.shape[2]) if slot not in slots]
    assert torch.equal(found.cache[:, :, others], plain.cache[:, :, others])
    wanted = plain.cache[:, :, slots]
    assert float((found.cache[:, :, slots] - wanted).abs().max() / wanted.abs().max()) <= near


def interpreted(*arguments: str) -> list[list[Any]]:
    """What `tests.fakes.interpreted` prints. Skips without Triton, which may lie in the folder `TEST_TRITON`."""
    place = os.environ.get("TEST_TRITON", "")
    if not place and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here, and TEST_TRITON names no folder of it")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fakes.interpreted", *arguments],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH")))),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert list(dict.fromkeys(one[0] for one in found)) == [*arguments]
    return found


def test_the_programs_give_the_numbers_of_plain_torch_in_the_interpreter() -> None:
    rows, heads = interpreted("bfloat16")
    assert rows[1] == 12 and rows[2] <= 8e-3
    assert heads[1] == 16 and heads[2] <= 8e-3


@pytest.mark.long
def test_attention_of_captured_steps_in_the_interpreter_is_that_of_plain_torch() -> None:
    interpreted("attention")


@pytest.mark.long
def test_the_programs_give_the_numbers_of_plain_torch_in_other_precisions() -> None:
    for name, _, error in interpreted("float32", "float16"):
        assert error <= {"float32": 1e-6, "float16": 1e-3}[name]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_and_modules_of_all_shapes_in_the_interpreter_are_those_of_the_modules(
    dtype: torch.dtype,
) -> None:
    name = str(dtype).removeprefix("torch.")
    steps = [f"{shape}:{name}:step" for shape in kernel_shapes.SHAPES]
    for what, logits, cells, others in interpreted(*steps):
        assert logits <= NEAR[dtype] and cells <= NEAR[dtype] and others == 0, what
    for what, error, kept in interpreted(f"llama:{name}:modules", f"gemma3:{name}:modules"):
        assert error <= NEAR[dtype] and not kept, what
