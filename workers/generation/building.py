"""Builds the engine of a model: proves that packed steps suit the model, and gives the cache its size.

1. Packed steps must give the logits that the model gives alone, with a picture too where the model sees
   (`workers.generation.proof`).
2. On CUDA the layers of known models are computed by few kernels (`workers.generation.kernel_decoder`), and norms and
   gates of all models get kernels (`workers.generation.fused`), each proven against its module.
3. The cache gets the bytes of the settings, else a part of the memory that is free, but never more than all sequences
   of the longest length need (`cache_blocks`).
4. A model that does not pass the proof generates with its own cache, one request at a time (`PlainEngine`). So does a
   model whose pictures transformers' own processor reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ipc.settings import Generation
from workers.generation.attention import PagedAttention
from workers.generation.blocks import BlockPool
from workers.generation.captured import CapturedPrompts, CapturedSteps
from workers.generation.device_token_draw import DeviceDrawer
from workers.generation.engine import Engine
from workers.generation.features import FeatureStore
from workers.generation.flights import Drawer, Masks, Sampler
from workers.generation.fused import fuse
from workers.generation.kernel_decoder import kernel_decoder
from workers.generation.pictures.reading import PictureReader, PromptReader
from workers.generation.plain import PlainEngine
from workers.generation.proof import Earlier, obstacle, packs
from workers.generation.request import GenerationRequest
from workers.generation.sampling import BatchedSampler
from workers.generation.scheduler import Output
from workers.generation.scoring import scored_tokens
from workers.generation.tower import Tower

log = logging.getLogger(__name__)

CACHE_SETTING = "generation.cache_bytes"
FREE_SHARE = {"cuda": 0.5, "cpu": 0.1}
"""Part of the free memory that a cache may take, by the kind of device."""
_SEQUENCES = {"cuda": 128, "cpu": 32}
_PREFILL_TOKENS = {"cuda": 2048, "cpu": 512}
"""What suits a kind of device, where the settings say 0."""
FEATURE_NBYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
"""Bytes of features of pictures that a model keeps, where the settings say 0."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations that name the number of experts."""


def build(
    model: Any,
    context_tokens: int,
    settings: Generation,
    free_bytes: int,
    sampler: Sampler,
    masks: Masks,
    make_output: Callable[[GenerationRequest, int], Output],
    earlier: Earlier | None = None,
    reader: PromptReader | None = None,
) -> Engine:
    """The engine of `model`, whose longest sequence has `context_tokens` tokens.

    `free_bytes` is the memory that is free on the device; `earlier` knows the proofs of earlier loads. `reader` is
    there for a model that sees. Raises MemoryError when the cache would hold no prompt.
    """
    attention, kind = PagedAttention(settings.block_tokens), model.device.type
    scored = scored_tokens(model.config.get_text_config().vocab_size)
    max_sequences = settings.max_sequences or _SEQUENCES[kind]
    store = FeatureStore(settings.picture_cache_bytes or FEATURE_NBYTES[kind])
    tower = Tower(model, reader, store) if isinstance(reader, PictureReader) else None
    reader = _proven(model, reader)
    by_generate = reader is not None and not reader.in_steps
    make_kernels = kernel_decoder if settings.kernels else None
    if by_generate or not packs(model, attention, earlier, tower, make_kernels):
        why = "sees with generate() alone" if by_generate else "cannot run in packed steps"
        log.warning("%s %s; requests run one by one, with transformers' own cache", type(model).__name__, why)
        return PlainEngine(
            model, context_tokens, sampler, masks, make_output, scored_tokens=scored, reader=reader
        )
    if settings.kernels:
        fuse(model)
    if tower is not None:
        tower.forget()
        free_bytes = max(0, free_bytes - store.limit_nbytes)
    longest = -(-context_tokens // settings.block_tokens)
    blocks = cache_blocks(attention, model.device, max_sequences * longest, settings, free_bytes)
    if (held := blocks * settings.block_tokens) < context_tokens:
        _tell_bound(model, held, held * attention.token_nbytes(), context_tokens)
    prefill_tokens = settings.prefill_tokens or _PREFILL_TOKENS[kind]
    prompts = captured_prompts(model, attention, longest, max_sequences, prefill_tokens, settings)
    attention.allocate(blocks, spare=prompts is not None)
    return Engine(
        model,
        attention,
        BlockPool(blocks, settings.block_tokens, keeps_prefixes=settings.prefix_cache),
        sampler,
        masks,
        make_output,
        max_sequences=max_sequences,
        prefill_tokens=prefill_tokens,
        scored_tokens=scored,
        captured=captured_steps(model, attention, longest, max_sequences) if settings.cuda_graphs else None,
        prompts=prompts,
        tower=tower,
        drawer=_drawer(sampler, settings, kind),
    )


def _tell_bound(model: Any, held: int, nbytes: int, context_tokens: int) -> None:
    log.warning(
        "the cache of %s holds %d tokens in %d bytes, the context of the model is %d: longer texts are refused, "
        "raise %s to take them",
        type(model).__name__,
        held,
        nbytes,
        context_tokens,
        CACHE_SETTING,
    )


def _proven(model: Any, reader: PromptReader | None) -> PromptReader | None:
    """The reader, unless `generate()` takes none of its pictures, which the log says.

    What packed steps see is part of their proof.
    """
    if reader is None or reader.in_steps or not (why := obstacle(model, reader)):
        return reader
    log.warning("%s is served without pictures: generate() takes none: %s", type(model).__name__, why)
    return None


def runs_ahead(settings: Generation, kind: str) -> bool:
    """Whether steps on a kind of device are launched before the host has read the tokens of the step before."""
    return settings.run_ahead == "always" or (settings.run_ahead == "auto" and kind == "cuda")


def _drawer(sampler: Sampler, settings: Generation, kind: str) -> Drawer | None:
    """What chooses tokens on the device, for a sampler of ours."""
    return (
        DeviceDrawer(sampler) if isinstance(sampler, BatchedSampler) and runs_ahead(settings, kind) else None
    )


def _is_captured(model: Any, attention: PagedAttention) -> bool:
    """Whether CUDA can capture steps of a model.

    Not on CPU, not with experts that the host chooses, and not where each length of a text has positions of its own.
    """
    config = model.config.get_text_config()
    chooses_experts = any(getattr(config, name, None) for name in _EXPERTS)
    by_length = attention.rope is not None and attention.rope.steps
    return model.device.type == "cuda" and not chooses_experts and not by_length


def captured_steps(
    model: Any, attention: PagedAttention, most_blocks: int, max_sequences: int
) -> CapturedSteps | None:
    """Steps of sequences of at most `most_blocks` blocks; None where steps are not captured."""
    if not _is_captured(model, attention) or not attention.prepare_decoding():
        return None
    return CapturedSteps(model, attention, max_sequences, most_blocks)


def captured_prompts(
    model: Any,
    attention: PagedAttention,
    most_blocks: int,
    max_sequences: int,
    prefill_tokens: int,
    settings: Generation,
) -> CapturedPrompts | None:
    """As `captured_steps`, for steps of at most `prefill_tokens` tokens; None as well where the settings say so."""
    is_wanted = settings.cuda_graphs and settings.prompt_graphs
    if not is_wanted or not _is_captured(model, attention) or not attention.prepare_tiles():
        return None
    return CapturedPrompts(model, attention, prefill_tokens, max_sequences, most_blocks)


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
            f"not enough memory for a cache of keys and values: {room} bytes ({CACHE_SETTING}), a block of "
            f"{settings.block_tokens} tokens takes {block_nbytes}"
        )
    return blocks
