"""The proof at load: packed steps give the logits that the model gives for each sequence alone.

1. Texts of several lengths run through a small engine, some of them in chunks. Their ids are drawn from the whole
   vocabulary, special and padding ids among them. Each row's logits must be those of a plain forward pass.
2. Where positions depend on the length of a text, some texts end before the border, some behind, and one grows past it
   as `generate()` has it.
3. A model that sees reads a conversation with a picture, in chunks too.
4. One packed pass has rows at the beginning, at the border and at the last positions. So a model that looks at the
   greatest position of a pass is found, however far its border lies.

A model that `workers.generation.kernel_decoder` or `workers.generation.decoder` knows is proven with a decoder first,
and without one where that fails. Beside a decoder the modules of the model stay in use, for steps with adapters or
pictures, so they run the rows of 4 as well.

A proof that succeeded is remembered (`workers.device.findings`) by all that decides the outcome: files of the model,
its entry, the versions of the libraries, the code of the engine, and the machine. Where all are the same the arithmetic
is the same, and the load runs one short pass in place of the proof. The canned inference of each load still runs in
packed steps, and the loader compares its values with those of the proven load, which lie beside what the proof found.
Models that bring code of their own are proven at each load.
"""

from __future__ import annotations

import io
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ipc.wire.messages import GenerateCall
from ipc.wire.streams import TokenLogprob
from workers import foreign
from workers.device.findings import Proof
from workers.device.oom import end_if_broken, is_out_of_memory, obstacle_of
from workers.generation.attention import PagedAttention, attend_with, packed_pass
from workers.generation.blocks import BlockPool
from workers.generation.decoder import Decoder
from workers.generation.engine import Engine
from workers.generation.kernel_decoder import KernelDecoder
from workers.generation.pictures.family import Picture
from workers.generation.pictures.reading import PictureReader, PromptReader
from workers.generation.plain import Run, without_settings
from workers.generation.request import Emission, GenerationRequest
from workers.generation.rope import LengthRope, Unfollowed, forget_lengths, length_rope
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span
from workers.generation.step_plan import plan_of
from workers.generation.tower import Tower
from workers.image_settings import trying

log = logging.getLogger(__name__)

_LENGTHS = (5, 37, 70)
_LONGEST_WINDOW = 512
"""Windows of attention and borders of positions up to this length are part of the proof."""
_CONTINUED = 3
_SHORTEST = 4
"""Tokens of the pass that asks which layers call the attention function."""
_CODE = sorted(Path(__file__).parent.rglob("*.py"))
"""The code of the engine."""
_STRETCH = 12
"""Tokens of a row at far positions."""
_QUESTION = {"type": "text", "text": "What do you see?"}
_ASKED = [{"role": "user", "content": [{"type": "image"}, _QUESTION]}]
_PIXELS = (72, 56)
"""Width and height of the picture of the proof."""
_BY_KERNELS, _BY_DECODER = "by kernels", "by a decoder"
WAYS = {_BY_KERNELS: True, _BY_DECODER: True, "with rules": True, "without rules": False}
"""What is remembered of a proof: what computes the layers, if not their modules, and whether the masks of layers reach
the attention function as rules. The first way that succeeds is taken."""
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_HALF = 0.1
"""Mean difference of logits, as a part of their mean size."""


class Earlier(NamedTuple):
    """The proof of this load or before, the identity of this load (empty: prove anew), and a listener to progress."""

    proof: Proof
    identity: str = ""
    progress: Callable[[float], None] = lambda fraction: None

    def way(self, facts: Any) -> str | None:
        """The way of `WAYS` that an earlier proof has found; None where there was none."""
        if not (self.identity and facts):
            return None
        return self.proof.earlier("packed", (self.identity, facts), tuple(WAYS))

    def succeed(self, facts: Any, way: str) -> None:
        """Note a proof that succeeded; the loader remembers the proof once the load has ended well."""
        if self.identity and facts:
            self.proof.succeed("packed", (self.identity, facts), way)


def packs(
    model: Any,
    attention: PagedAttention,
    earlier: Earlier | None = None,
    tower: Tower | None = None,
    make_kernels: Callable[[Any, PagedAttention], KernelDecoder | None] | None = None,
) -> bool:
    """Whether the logits of packed steps over `attention` are those of each sequence alone.

    The proof of a model with a `tower` has a picture. `make_kernels` makes what computes the layers by kernels.
    Afterwards the model runs with `attention` if so, else with the implementation that the model had before. Raises the
    error of memory that is short, which says nothing of the model.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # NOTE: SDPA of transformers 5.17 leaves the soft cap out without a word.
        attend_with(model, "eager")
    before = model.config.get_text_config()._attn_implementation
    try:
        attention.rope = length_rope(model)
    except Unfollowed as error:
        log.info("%s: %s", type(model).__name__, error)
        return False
    kernels = make_kernels(model, attention) if make_kernels and attention.rope is None else None
    earlier, facts = earlier or Earlier(Proof()), _facts(model, attention, tower, kernels)
    known = earlier.way(facts)
    earlier.progress(0.0)
    texts = _texts(model, attention.rope) if known is None else []
    if tower is not None and known is None:
        with trying(tower.reader.family.file):
            texts.append(_pictured(model, tower.reader))
    earlier.progress(0.3)
    rows = _rows(model, attention.rope) if known is None else []
    for way in WAYS if known is None else (known,):
        attention.passes_rules, attention.decoder = WAYS[way], None
        if way == _BY_KERNELS:
            attention.decoder = kernels
        elif way == _BY_DECODER and attention.rope is None and Decoder.knows(model):
            attention.decoder = Decoder(model)
        if way in (_BY_KERNELS, _BY_DECODER) and attention.decoder is None:
            continue
        try:
            attend_with(model, attention.name)
            if not _reaches_all_layers(model, attention):
                continue
            if known is not None:
                return True
            earlier.progress(0.5)
            if _agrees(model, attention, texts, tower) and _far_rows_agree(model, attention, rows):
                earlier.succeed(facts, way)
                return True
        # NOTE: models that index a mask raise TypeError, those without the interface AttributeError or KeyError.
        except Exception as error:
            why = obstacle_of(error)
            log.info("%s: %s: %s", type(model).__name__, type(error).__name__, why)
    attention.decoder = None
    attend_with(model, before)
    return False


def obstacle(model: Any, reader: PromptReader) -> str:
    """Why `generate()` takes no picture of a reader; empty if it does.

    Raises the error of memory that is short.
    """
    try:
        asked = reader.prompt(_ASKED, [_gradient()])
        pictures = [reader.processed(picture) for picture in asked.pictures]
        ids = asked.prompt.ids
        seen = reader.arguments(model, len(ids), pictures)
        logits = _generated(model, [*ids, ids[-1]], 1, lambda tokens: seen)
    except BaseException as raised:
        end_if_broken(raised)
        error = foreign.error_of(raised)
        if is_out_of_memory(error):
            raise
        return foreign.line_of(error)
    return "" if bool(logits.isfinite().all()) else "the logits are not finite"


def _facts(model: Any, attention: PagedAttention, tower: Tower | None, kernels: KernelDecoder | None) -> Any:
    """All that decides a proof beside `Earlier.identity`; None for a model whose code is not that of transformers."""
    if not type(model).__module__.startswith("transformers."):
        return None
    code = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in _CODE]
    family = "" if tower is None else type(tower.reader.family).__qualname__
    return (
        code,
        attention.block_tokens,
        type(model).__qualname__,
        family,
        model.device.type,
        str(model.dtype),
        kernels is not None,
    )


class _Text(NamedTuple):
    """A sequence, and the logits [tokens to continue, vocabulary] of its last tokens, as the model gives them alone."""

    tokens: list[int]
    logits: torch.Tensor
    pictures: Sequence[Picture] = ()


def _texts(model: Any, rope: LengthRope | None) -> list[_Text]:
    """The sequences of the proof, the same for each model of a vocabulary."""
    config, draw = model.config.get_text_config(), random.Random(0)
    window = max(int(getattr(config, name, None) or 0) for name in ("sliding_window", "attention_chunk_size"))
    lengths = [*_LENGTHS]
    if max(_LENGTHS) < window + 8 <= _LONGEST_WINDOW + 8:
        lengths.append(window + 8)
    most = int(getattr(config, "max_position_embeddings", None) or max(lengths) + _CONTINUED)
    if rope is not None and rope.border <= _LONGEST_WINDOW:
        lengths += [max(1, rope.border - 1), rope.border + 8]
        most = max(most, max(lengths) + _CONTINUED)
    texts = [_drawn(config, draw, min(length + _CONTINUED, most)) for length in lengths]
    alone = _plain if rope is None else _generated
    return [_Text(tokens, alone(model, tokens)) for tokens in texts]


def _drawn(config: Any, draw: random.Random, length: int) -> list[int]:
    """Ids of the whole vocabulary. Each third is one that a model may treat in its own way: special, padding, last."""
    named = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    ids = [one for each in named for one in (each if isinstance(each, list) else [each])]
    special = [one for one in ids if isinstance(one, int) and 0 <= one < config.vocab_size]
    special += [0, config.vocab_size - 1]
    return [
        draw.choice(special) if at % 3 == 1 else draw.randrange(config.vocab_size) for at in range(length)
    ]


@torch.inference_mode()
def _plain(model: Any, tokens: list[int], **seen: Any) -> torch.Tensor:
    """The logits of a forward pass over one sequence; `seen` are arguments for its pictures."""
    ids = torch.tensor([tokens[:-1]], device=model.device)
    mask = torch.ones_like(ids)
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **seen).logits
    return logits[0, -_CONTINUED:].float()


def _pictured(model: Any, reader: PictureReader) -> _Text:
    """A conversation with a picture. The answer repeats the last words of the prompt."""
    asked = reader.prompt(_ASKED, [_gradient()])
    pictures = [reader.processed(picture) for picture in asked.pictures]
    ids = asked.prompt.ids
    behind = len(ids) - int(pictures[-1].places[-1]) - 1
    tokens = ids + [ids[-1 - number % behind] for number in range(_CONTINUED)]
    seen = reader.arguments(model, len(tokens) - 1, pictures)
    return _Text(tokens, _plain(model, tokens, **seen), pictures)


def _gradient() -> bytes:
    """A picture in PNG."""
    from PIL import Image

    out, fall = io.BytesIO(), Image.linear_gradient("L").resize(_PIXELS)
    Image.merge("RGB", (fall, fall.transpose(Image.Transpose.ROTATE_180), fall)).save(out, "PNG")
    return out.getvalue()


def _generated(
    model: Any,
    tokens: list[int],
    continued: int = _CONTINUED,
    seen: Callable[[list[int]], dict[str, Any]] = lambda tokens: {},
) -> torch.Tensor:
    """The logits of `generate()`, which chooses the last tokens; `seen` are its arguments for pictures."""
    request = GenerationRequest(0, tokens[:-continued], GenerateCall(), continued, frozenset())
    run = Run(without_settings(model), Choice(request, 0, 0, _Some()), seen)
    ends = range(len(tokens) - continued, len(tokens))
    with torch.no_grad():
        logits = torch.cat([run.logits(tokens[:end]).float() for end in ends])
    run.close()
    return logits


@torch.inference_mode()
def _reaches_all_layers(model: Any, attention: PagedAttention) -> bool:
    """Whether all layers call the attention function, which learns their widths meanwhile."""
    attention.plan, attention.formulas = None, {}
    config = model.config.get_text_config()
    tokens = torch.tensor([_drawn(config, random.Random(0), _SHORTEST)], device=model.device)
    model(
        input_ids=tokens,
        position_ids=torch.arange(_SHORTEST, device=model.device)[None],
        attention_mask=torch.ones_like(tokens),
        use_cache=False,
    )
    return len(attention.formulas) == int(config.num_hidden_layers)


def _agrees(model: Any, attention: PagedAttention, texts: list[_Text], tower: Tower | None) -> bool:
    """Whether the texts have the same logits in an engine, in company."""
    size = attention.block_tokens
    blocks = sum(-(-len(text.tokens) // size) for text in texts) + len(texts)
    attention.allocate(blocks)
    script, pool = _Script([text.tokens for text in texts]), BlockPool(blocks, size)
    engine = Engine(
        model, attention, pool, script, script, lambda *_: _Some(), prefill_tokens=48, tower=tower
    )
    for number, text in enumerate(texts):
        engine.add(script.request(number, text.tokens, text.pictures))
    while engine.has_work:
        engine.step()
    found = [torch.stack(logits) for logits in script.logits]
    return _are_near(model, found, [text.logits for text in texts])


def _are_near(model: Any, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether logits [tokens, vocabulary] of each text are those that the text has alone."""
    # NOTE: `QuantizedLinear.rounding` of the layers, for a model whose layers round their rows.
    rounding = getattr(model, "rounding", 0.0)
    exact = model.dtype in _TOLERANCE and not rounding
    difference = 0.0
    for one, other in zip(found, wanted, strict=True):
        rows = (one - other).abs().mean(-1) / other.abs().mean(-1)
        # NOTE: in half precision a single token may choose other experts.
        worst = float(rows.max() if exact else rows.mean())
        difference = worst if not worst <= difference else difference
    tolerance = max(_TOLERANCE.get(model.dtype, _TOLERANCE_HALF), rounding)
    if not difference <= tolerance:
        log.info("%s: packed steps differ by %.2g of the logits", type(model).__name__, difference)
    return difference <= tolerance


class _Row(NamedTuple):
    """Tokens at positions from `start` on, and the logits [tokens, vocabulary] that they have alone."""

    start: int
    tokens: list[int]
    logits: torch.Tensor


def _rows(model: Any, rope: LengthRope | None) -> list[_Row]:
    """Rows at the beginning, over the border of positions, and at the last positions."""
    config, draw = model.config.get_text_config(), random.Random(1)
    last = int(getattr(config, "max_position_embeddings", None) or 0)
    border = int(getattr(config, "original_max_position_embeddings", None) or 0)
    if rope is not None:
        border, last = rope.border, max(last, rope.border + _STRETCH)
    starts = {0, border - _STRETCH // 2, last - _STRETCH} if border else {0, last - _STRETCH}
    fits = (start for start in sorted(starts) if 0 <= start <= max(0, last - _STRETCH))
    return [_row(model, start, _drawn(config, draw, min(_STRETCH, last or _STRETCH))) for start in fits]


@torch.inference_mode()
def _row(model: Any, start: int, tokens: list[int]) -> _Row:
    """A row with the logits of a pass over nothing else."""
    forget_lengths(model)
    ids = torch.tensor([tokens], device=model.device)
    places = torch.arange(start, start + len(tokens), device=model.device)[None]
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).logits
    return _Row(start, tokens, logits[0].float())


@torch.inference_mode()
def _far_rows_agree(model: Any, attention: PagedAttention, rows: list[_Row]) -> bool:
    """Whether the rows have the same logits side by side in one packed pass."""
    size, device = attention.block_tokens, model.device
    each = -(-_STRETCH // size)
    attention.allocate(each * len(rows))
    spans = []
    for number, row in enumerate(rows):
        request = GenerationRequest(number, row.tokens, GenerateCall(), 1, frozenset())
        sequence = Choice(request, 0, number, _Some())
        sequence.blocks = list(range(number * each, (number + 1) * each))
        spans.append(Span(sequence, 0, len(row.tokens)))
    plan = plan_of(spans, size, device)
    plan.text_places = plan.positions.clone()
    sizes = [len(row.tokens) for row in rows]
    plan.positions += torch.from_numpy(np.repeat([row.start for row in rows], sizes)).to(device)
    if attention.rope is not None:
        texts = [attention.rope.length_of(row.start + len(row.tokens)) for row in rows]
        plan.lengths = attention.rope.grouped(np.repeat(texts, sizes), device)
    ends, expected = [0, *itertools.accumulate(sizes)], [row.logits for row in rows]
    for hooked in (False, True) if attention.decoder is not None else (False,):
        logits = packed_pass(model, attention, plan, hooked=hooked).float()
        results = [logits[start:stop] for start, stop in itertools.pairwise(ends)]
        if not _are_near(model, results, expected):
            return False
    return True


class _Script:
    """A sampler that notes the logits, and chooses the tokens of the texts; no request has a grammar."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def request(self, number: int, tokens: list[int], pictures: Sequence[Picture]) -> GenerationRequest:
        """A request whose answer are the last tokens of a text."""
        prompt = tokens[:-_CONTINUED]
        return GenerationRequest(
            number, prompt, GenerateCall(), _CONTINUED, frozenset(), pictures=list(pictures)
        )

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
