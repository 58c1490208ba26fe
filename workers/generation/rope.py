"""Rotary positions that depend on the length of a text: each token of a step gets those of its own sequence.

Long-rope has factors for texts up to a border and others for longer texts, dynamic rope has frequencies for each length
beyond. transformers' modules read the length from the greatest position of a pass, which in a packed step belongs to
the longest sequence.

1. `length_rope` finds these modules, and whether `generate()` computes a text anew at the border (`anew`), as Phi-3
   does. The other models go on with the keys that they have.
2. The `length` of a token is the length of text whose factors `generate()` gives to the token: 0 up to the border.
   Blocks of the cache are found by sequences of the same `regime` only, the length of their first token.
3. `LengthRope` stands before the modules. In a packed pass it asks them for the tokens of each length by themselves,
   behind which it puts the last position of such a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from workers.device.transfer import sent
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span

_KINDS = ("longrope", "dynamic")
Rotary = Callable[..., Any]


class Unfollowed(ValueError):
    """The positions of a model depend on the length of a text in a way that packed steps do not follow."""


class Lengths(NamedTuple):
    """The tokens of a step by their lengths: `rows` int64 of the step, None for all.

    A step that CUDA captures has no groups; `is_long` int64 [tokens] is 1 for tokens with the factors of long texts.
    """

    groups: Sequence[tuple[int, torch.Tensor | None]]
    is_long: torch.Tensor | None = None


class LengthRope:
    """The rotary modules of one model, whose factors change at `border` tokens.

    `steps`: each length beyond the border has factors of its own.
    """

    def __init__(self, modules: Sequence[Any], border: int, *, steps: bool, anew: bool) -> None:
        """Stands before the `forward` of the modules from now on."""
        self.border, self.steps, self.anew = border, steps, anew
        self._lengths: Lengths | None = None
        for module in modules:
            module.forward = partial(self._rotate, type(module).forward.__get__(module))

    def length_of(self, tokens: int) -> int:
        """The length of a token in a text of so many tokens; all lengths with the same factors are one number."""
        if tokens <= self.border:
            return 0
        return tokens if self.steps else self.border + 1

    def regime(self, sequence: Choice) -> int:
        """The length of the first token of a sequence: two sequences of a regime have the same for each token."""
        return self.length_of(len(sequence.tokens) if self.anew else sequence.prompt_length)

    def restarts(self, sequence: Choice) -> bool:
        """Whether all tokens have to be computed anew, as the last of them is the first behind the border."""
        return self.anew and len(sequence.tokens) == self.border + 1

    def lengths(self, spans: Sequence[Span], device: torch.device) -> Lengths:
        """The lengths of the tokens of a step."""
        pieces = [self._of_span(span) for span in spans]
        whole = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        return self.grouped(whole, device)

    def is_long(self, span: Span) -> bool:
        """Whether the last token of a span has the factors of long texts."""
        sequence = span.sequence
        return (
            self.length_of(len(sequence.tokens) if self.anew else max(span.stop, sequence.prompt_length)) > 0
        )

    @staticmethod
    def grouped(lengths: np.ndarray, device: torch.device) -> Lengths:
        """`lengths` int64 [tokens] as groups."""
        distinct = np.unique(lengths).tolist()
        if len(distinct) < 2:
            return Lengths([(length, None) for length in distinct])
        return Lengths([(one, sent(np.flatnonzero(lengths == one), device)) for one in distinct])

    def _of_span(self, span: Span) -> np.ndarray:
        sequence, start, stop = span
        if self.anew:
            return np.full(stop - start, self.regime(sequence), np.int64)
        texts = np.maximum(np.arange(start + 1, stop + 1), sequence.prompt_length)
        return np.where(texts <= self.border, 0, texts if self.steps else self.border + 1)

    @contextmanager
    def applied(self, lengths: Lengths | None) -> Iterator[None]:
        """A packed pass over tokens of these lengths."""
        assert lengths is not None
        self._lengths = lengths
        try:
            yield
        finally:
            self._lengths = None

    def _rotate(
        self, original: Rotary, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        """What `original` gives for these positions, of the lengths of the present packed pass."""
        if self._lengths is None:
            return original(x, position_ids, *rest, **named)

        def rotated(positions: torch.Tensor, length: int) -> list[torch.Tensor]:
            return self._alone(partial(original, x), positions, length, *rest, **named)

        if self._lengths.is_long is not None:
            near = rotated(position_ids.where(self._lengths.is_long == 0, 0), 0)
            far = rotated(position_ids, self.border + 1)
            is_long = self._lengths.is_long[:, None] != 0
            return _like_one(torch.where(is_long, *both) for both in zip(far, near, strict=True))
        parts: list[torch.Tensor] = []
        for length, rows in self._lengths.groups:
            if rows is None:
                return _like_one(rotated(position_ids, length))
            some = rotated(position_ids.index_select(-1, rows), length)
            parts = parts or [_wide(one, position_ids.shape[-1]) for one in some]
            for part, one in zip(parts, some, strict=True):
                part.index_copy_(-2, rows, one)
        return _like_one(parts)

    def _alone(
        self, rotary: Rotary, positions: torch.Tensor, length: int, *rest: Any, **named: Any
    ) -> list[torch.Tensor]:
        """What a module gives for tokens of one text, each [..., tokens, width]."""
        if self.steps:
            rotary(torch.zeros_like(positions[..., :1]), *rest, **named)
        count = positions.shape[-1]
        if length:
            positions = torch.cat((positions, torch.full_like(positions[..., :1], length - 1)), -1)
        turned = rotary(positions, *rest, **named)
        return [part.narrow(-2, 0, count) for part in (turned if isinstance(turned, tuple) else (turned,))]


def length_rope(model: Any) -> LengthRope | None:
    """The rotary modules of a model whose positions depend on the length of a text; None without any.

    Raises `Unfollowed`.
    """
    modules = [module for module in model.modules() if _kinds_of(module)]
    if not modules:
        return None
    kinds = {kind for module in modules for kind in _kinds_of(module)}
    borders = {border for module in modules for border in _borders_of(module)}
    if len(kinds) > 1 or len(borders) > 1:
        raise Unfollowed("several kinds of positions depend on the length of a text")
    [kind], [border] = kinds, borders
    if kind == "longrope" and getattr(model.config, "original_max_position_embeddings", border) != border:
        raise Unfollowed("the model has two numbers of original positions")
    steps, anew = kind == "dynamic", _computes_anew(model, border)
    if steps and anew:
        raise Unfollowed("each length has positions of its own, and the text is computed anew")
    return LengthRope(modules, border, steps=steps, anew=anew)


def has_axes(model: Any) -> bool:
    """Whether the positions of a model count the rows and columns of pictures (M-RoPE)."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None)
    return isinstance(parameters, dict) and "mrope_section" in parameters


def depends_on_length(model: Any) -> bool:
    """Whether the first tokens of a text may have other positions once the text is long."""
    config = model.config.get_text_config()
    named = getattr(config, "original_max_position_embeddings", None) is not None
    return named or any(_kinds_of(module) for module in model.modules())


def forget_lengths(model: Any) -> None:
    """Forget the texts so far: modules of dynamic rope keep the frequencies of the longest one for a while."""
    for module in model.modules():
        for layers, kind in _ropes_of(module):
            if kind == "dynamic":
                like = next(module.buffers())
                first = torch.zeros(1, 1, dtype=torch.long, device=like.device)
                module(like, first, **({"layer_type": layers} if layers else {}))


def _ropes_of(module: Any) -> list[tuple[str, str]]:
    """Type of layers ("" for all) and kind of rope, of a rotary module."""
    rope = getattr(module, "rope_type", None)
    named = rope if isinstance(rope, dict) else {"": rope} if isinstance(rope, str) else {}
    return [(layers, kind) for layers, one in named.items() for kind in _KINDS if kind in one]


def _kinds_of(module: Any) -> set[str]:
    return {kind for _, kind in _ropes_of(module)}


def _borders_of(module: Any) -> set[int]:
    """The longest text with the factors of short ones, for each kind of rope in a module."""
    borders = set()
    for layers, kind in _ropes_of(module):
        parameters = module.config.rope_parameters[layers] if layers else module.config.rope_parameters
        if kind == "longrope":
            borders.add(int(parameters["original_max_position_embeddings"]))
        else:
            borders.add(int(module.original_max_seq_len))
    return borders


class _Full(DynamicCache):
    """A cache that says that it holds so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens."""
        return self._tokens


def _computes_anew(model: Any, border: int) -> bool:
    """Whether `generate()` computes a text anew when it grows past the border. Raises `Unfollowed`."""
    ids = torch.zeros(1, border + 1, dtype=torch.long, device=model.device)
    try:
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            past_key_values=_Full(border),
            attention_mask=torch.ones_like(ids),
            use_cache=True,
        )
        return bool(inputs["input_ids"].shape[1] == border + 1)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise Unfollowed(f"{type(error).__name__}: {error}") from error


def _wide(part: torch.Tensor, tokens: int) -> torch.Tensor:
    return part.new_empty((*part.shape[:-2], tokens, part.shape[-1]))


def _like_one(parts: Any) -> Any:
    """The parts as a module gives them: a tuple, or the only one."""
    whole = tuple(parts)
    return whole if len(whole) > 1 else whole[0]
