"""Penstock's engine, transformers' continuous batching, and generate() over padded batches, each in its own process.

The engine is built as for requests: it samples with the batched stage, makes text of all tokens and keeps prefixes. On
CPU linear layers are laid out for oneDNN where that is faster. The others give token ids alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.loops.jobs import PLAIN, Answers, Job, Run, serve
from ipc.settings import Generation
from ipc.wire.messages import Ending, GenerateCall
from ipc.wire.streams import TokenLogprob
from workers.adapters.shared.linears import GENERATED_ROWS, lay_out_linears
from workers.generation.building import build
from workers.generation.request import Emission, GenerationRequest
from workers.generation.sampling import BatchedSampler
from workers.generation.text import ChoiceOutput, Vocabulary

SEATS, BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 32, 2048, 16, 512
CONTEXT, FREE_NBYTES = BLOCKS * BLOCK_TOKENS // SEATS, 4 << 30


class NoGrammars:
    """Masks of an engine whose requests have no grammar."""

    def begin(self, sequences: Sequence[Any]) -> None:
        raise AssertionError("no request has a grammar")

    def wait(self) -> None:
        raise AssertionError("no request has a grammar")


class KeptOutput(ChoiceOutput):
    """The output of a choice that also keeps the token ids."""

    def __init__(self, vocabulary: Vocabulary, request: GenerationRequest, choice: int) -> None:
        super().__init__(vocabulary, request, choice)
        self.tokens: list[int] = []

    def push(self, token: int, logprob: TokenLogprob | None) -> list[Emission]:
        self.tokens.append(token)
        return super().push(token, logprob)


def penstock(
    model: Any,
    tokenizer: Any,
    cuda_graphs: bool = True,
    seats: int = SEATS,
    run_ahead: Literal["auto", "always", "never"] = "auto",
    step_tokens: int = STEP_TOKENS,
    kernels: bool = True,
    prompt_graphs: bool = True,
) -> Run:
    """Our engine, with `seats` sequences and `step_tokens` of prompts at most in a step; 0: as many as by default.

    The others are settings of the section `generation`.
    """
    vocabulary = Vocabulary(tokenizer)
    if model.device.type == "cpu":
        lay_out_linears(model, GENERATED_ROWS)
    outputs: dict[Any, KeptOutput] = {}

    def make_output(request: GenerationRequest, choice: int) -> KeptOutput:
        outputs[request.key] = KeptOutput(vocabulary, request, choice)
        return outputs[request.key]

    engine = build(
        model,
        CONTEXT,
        Generation(
            max_sequences=seats,
            block_tokens=BLOCK_TOKENS,
            prefill_tokens=step_tokens,
            cuda_graphs=cuda_graphs,
            run_ahead=run_ahead,
            kernels=kernels,
            prompt_graphs=prompt_graphs,
        ),
        FREE_NBYTES,
        BatchedSampler(vocabulary.raw, tokenizer.encode),
        NoGrammars(),
        make_output,
    )

    def run(jobs: Sequence[Job]) -> Answers:
        call = GenerateCall(ending=Ending(ignore_eos=True))
        for number, (prompt, tokens) in enumerate(jobs):
            engine.add(GenerationRequest(number, prompt, call, tokens, frozenset(), None))
        while engine.has_work:
            engine.step()
        return [outputs[number].tokens for number in range(len(jobs))]

    return run


def continuous(model: Any, tokenizer: Any) -> Run:
    """transformers' own continuous batching."""
    config = ContinuousBatchingConfig(
        num_blocks=BLOCKS, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=SEATS
    )
    # NOTE: transformers 5.17 has another name for the tokens of a block than later versions.
    setattr(config, "page_size" if hasattr(config, "page_size") else "block_size", BLOCK_TOKENS)
    greedy = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.start()

    def run(jobs: Sequence[Job]) -> Answers:
        names = [manager.add_request(prompt, max_new_tokens=tokens) for prompt, tokens in jobs]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            if result is None and not manager.is_running():
                raise RuntimeError(manager.background_thread_status.fatal_error)
        return [found[name] for name in names]

    return run


def static(model: Any, tokenizer: Any) -> Run:
    """generate() over batches in the order of arrival, padded on the left; each runs to its longest answer."""

    def batch(jobs: Sequence[Job]) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in jobs)
        rows = [[0] * (width - len(prompt)) + prompt for prompt, _ in jobs]
        marks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in jobs]
        ids, mask = torch.tensor([rows, marks], device=model.device)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(tokens for _, tokens in jobs),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers = found[:, width:].tolist()
        return [answer[:tokens] for answer, (_, tokens) in zip(answers, jobs, strict=True)]

    def run(jobs: Sequence[Job]) -> Answers:
        return [answer for at in range(0, len(jobs), SEATS) for answer in batch(jobs[at : at + SEATS])]

    return run


def load() -> Run:
    """The contestant that the command line names, with its model."""
    _, contestant, model_dir, precision, threads, device = sys.argv
    torch.set_num_threads(int(threads))
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, precision), attn_implementation="sdpa"
    )
    model.eval().to(device)  # type: ignore[no-untyped-call]
    contestants = {
        "penstock": penstock,
        PLAIN: partial(penstock, cuda_graphs=False),
        "continuous": continuous,
        "static": static,
    }
    return contestants[contestant](model, tokenizer)


if __name__ == "__main__":
    serve(load)
