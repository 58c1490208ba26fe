"""Builds the engine of a model: proves that packed steps suit the model, and gives the cache its size.

1. Some prompts of different lengths run through a small engine, one of them in chunks. Their logits must be those of
   plain forward passes (`packs`).
2. The cache gets the bytes of the settings, else a part of the memory that is free, but never more than all sequences
   of the longest length need (`cache_blocks`).
3. A model that does not pass the proof generates with its own cache, one request at a time (`PlainEngine`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import torch

from ipc.settings import Generation
from ipc.wire.generation import TokenLogprob
from ipc.wire.messages import GenerateCall
from workers.device.oom import is_out_of_memory
from workers.generation.attention import PagedAttention
from workers.generation.blocks import BlockPool
from workers.generation.captured import CapturedSteps
from workers.generation.engine import Engine, Masks, Sampler
from workers.generation.plain import PlainEngine
from workers.generation.request import Emission, GenerationRequest
from workers.generation.sequence import Output

log = logging.getLogger(__name__)

FREE_SHARE = {"cuda": 0.5, "cpu": 0.1}
"""Part of the free memory that a cache may take, by the kind of device."""
_SEQUENCES = {"cuda": 128, "cpu": 32}
_PREFILL_TOKENS = {"cuda": 2048, "cpu": 512}
"""What suits a kind of device, where the settings say 0."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations that name the number of experts."""
_LENGTHS = (5, 37, 70)
_LONGEST_WINDOW = 512
"""Windows of attention up to this length are part of the proof."""
_CONTINUED = 3
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_HALF = 0.1
"""Mean difference of logits, as a part of their mean size."""


def build(
    model: Any,
    context_tokens: int,
    settings: Generation,
    free_bytes: int,
    sampler: Sampler,
    masks: Masks,
    make_output: Callable[[GenerationRequest, int], Output],
) -> Engine:
    """The engine of `model`, whose longest sequence has `context_tokens` tokens.

    `free_bytes` is the memory that is free on the device. Raises MemoryError when the cache would hold no prompt.
    """
    attention, kind = PagedAttention(settings.block_tokens), model.device.type
    max_sequences = settings.max_sequences or _SEQUENCES[kind]
    if not packs(model, attention):
        log.warning(
            "%s cannot run in packed steps; requests run one by one, with transformers' own cache",
            type(model).__name__,
        )
        return PlainEngine(model, context_tokens, sampler, masks, make_output)
    most_blocks = max_sequences * -(-context_tokens // settings.block_tokens)
    blocks = cache_blocks(attention, model.device, most_blocks, settings, free_bytes)
    attention.allocate(blocks)
    return Engine(
        model,
        attention,
        BlockPool(blocks, settings.block_tokens, keeps_prefixes=settings.prefix_cache),
        sampler,
        masks,
        make_output,
        max_sequences=max_sequences,
        prefill_tokens=settings.prefill_tokens or _PREFILL_TOKENS[kind],
        captured=captured_steps(model, attention, most_blocks // max_sequences, max_sequences)
        if settings.cuda_graphs
        else None,
    )


def captured_steps(
    model: Any, attention: PagedAttention, most_blocks: int, max_sequences: int
) -> CapturedSteps | None:
    """Steps of sequences of at most `most_blocks` blocks; None on CPU, and for experts that the host chooses."""
    config = model.config.get_text_config()
    chooses_experts = any(getattr(config, name, None) for name in _EXPERTS)
    if model.device.type != "cuda" or chooses_experts or not attention.prepare_decoding():
        return None
    return CapturedSteps(model, attention, max_sequences, most_blocks)


def cache_blocks(
    attention: PagedAttention,
    device: torch.device,
    most_blocks: int,
    settings: Generation,
    free_bytes: int,
) -> int:
    """Blocks of the cache, at most `most_blocks`. Raises MemoryError when there is no room for a short sequence."""
    block_nbytes = attention.token_nbytes() * settings.block_tokens
    room = settings.cache_bytes or int(free_bytes * FREE_SHARE[device.type])
    blocks = min(most_blocks, room // block_nbytes)
    if blocks < 2:
        raise MemoryError(
            f"not enough memory for a cache of keys and values: {room} bytes, a block of "
            f"{settings.block_tokens} tokens takes {block_nbytes}"
        )
    return blocks


def packs(model: Any, attention: PagedAttention) -> bool:
    """Whether the logits of packed steps over `attention` are those of plain forward passes.

    Afterwards the model runs with `attention` if so, else with the implementation that the model had before. Raises the
    error of memory that is short, which says nothing of the model.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # NOTE: SDPA of transformers 5.17 leaves the soft cap out without a word.
        model.set_attn_implementation("eager")
    before = model.config._attn_implementation
    texts = _texts(model)
    with torch.inference_mode():
        plain = [_plain(model, tokens) for tokens in texts]
    for passes_rules in (True, False):
        attention.passes_rules = passes_rules
        try:
            model.set_attn_implementation(attention.name)
            if _agrees(model, attention, texts, plain):
                return True
        # NOTE: models that index a mask raise TypeError, those without the interface AttributeError or KeyError.
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            log.info("%s: %s: %s", type(model).__name__, type(error).__name__, error)
    model.set_attn_implementation(before)
    return False


def _texts(model: Any) -> list[list[int]]:
    """Token ids of the sequences of the proof, the same for each model of a vocabulary."""
    config, draw = model.config.get_text_config(), random.Random(0)
    window = max(int(getattr(config, name, None) or 0) for name in ("sliding_window", "attention_chunk_size"))
    longest = window + 8 if window <= _LONGEST_WINDOW else 0
    lengths = [*_LENGTHS, longest] if longest > max(_LENGTHS) else _LENGTHS
    most = int(getattr(config, "max_position_embeddings", None) or max(lengths) + _CONTINUED)
    return [
        [draw.randrange(config.vocab_size) for _ in range(min(length + _CONTINUED, most))]
        for length in lengths
    ]


def _plain(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens to continue, vocabulary] of a forward pass over one sequence."""
    ids = torch.tensor([tokens[:-1]], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, -_CONTINUED:]
    return logits.float()


def _agrees(model: Any, attention: PagedAttention, texts: list[list[int]], plain: list[torch.Tensor]) -> bool:
    attention.plan, attention.called = None, set()
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([texts[0]], device=model.device),
            position_ids=torch.arange(len(texts[0]), device=model.device)[None],
            attention_mask=torch.ones(1, len(texts[0]), dtype=torch.long, device=model.device),
            use_cache=False,
        )
    if len(attention.called) != model.config.get_text_config().num_hidden_layers:
        return False
    size = attention.block_tokens
    blocks = sum(-(-len(tokens) // size) for tokens in texts) + len(texts)
    attention.allocate(blocks)
    script = _Script(texts)
    engine = Engine(
        model, attention, BlockPool(blocks, size), script, script, lambda *_: _Some(), prefill_tokens=48
    )
    for number, tokens in enumerate(texts):
        engine.add(script.request(number, tokens))
    while engine.has_work:
        engine.step()
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_HALF)
    difference = max(
        float((torch.stack(found) - wanted).abs().mean() / wanted.abs().mean())
        for found, wanted in zip(script.logits, plain, strict=True)
    )
    if not difference <= tolerance:
        log.info("%s: packed steps differ by %.2g of the logits", type(model).__name__, difference)
    return difference <= tolerance


class _Script:
    """A sampler that notes the logits, and chooses the tokens of the texts; no request has a grammar."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def request(self, number: int, tokens: list[int]) -> GenerationRequest:
        """A request whose answer are the last tokens of a text."""
        return GenerationRequest(number, tokens[:-_CONTINUED], GenerateCall(), _CONTINUED, frozenset())

    def sample(self, logits: torch.Tensor, sequences: Any) -> list[tuple[int, TokenLogprob | None]]:
        """The tokens of the texts."""
        for row, sequence in zip(logits, sequences, strict=True):
            self.logits[sequence.request.key].append(row.float().clone())
        return [(self._texts[each.request.key][len(each.tokens)], None) for each in sequences]

    def begin(self, sequences: Any) -> None:
        """Nothing to fill."""

    def wait(self) -> None:
        """Nothing is filled."""


class _Some:
    """An `Output` without text, which ends after some tokens."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self._tokens = 0

    def push(self, token: int, logprob: Any) -> list[Emission]:
        """One token more."""
        self._tokens += 1
        self.ended = "length" if self._tokens == _CONTINUED else None
        return []

    def finish(self, reason: str) -> list[Emission]:
        """Nothing is told."""
        return []
