"""Captured steps with prompts: tokens of plain steps, rows that pad, and when such steps are not replayed."""

from __future__ import annotations

import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ipc.settings import Generation
from tests.fakes.generating import BLOCK_TOKENS, Answers, engine_of, request_of
from tests.fakes.replaying import Replay, ReplayedPrompts, ReplayedSteps, Replays, attention, tiles
from tests.fakes.torch_kernels import TorchKernels
from tests.tiny import causal
from workers.generation import building
from workers.generation.attention import PagedAttention
from workers.generation.captured import STEP, CapturedPrompts, token_counts
from workers.generation.engine import Engine
from workers.generation.kernel_decoder import KernelDecoder
from workers.generation.paged_tiles import NOBODY, Piece, most_tiles, queries_of, tiles_of

LENGTHS = (1, 7, 30, 60, 300)
"""The last prompt is longer than a step, so some of its parts see the keys of earlier ones."""
TOKENS = 6
LAYERS_WITH_RULES = ("llama4",)


def engine_with(
    model: Any, prompts: type[CapturedPrompts] | None, within: PagedAttention | None = None
) -> Engine:
    steps = None if prompts is None else ReplayedSteps
    return engine_of(model, prefill_tokens=140, attention=within, captures=steps, prompts=prompts)


def answers_of(engine: Engine) -> Answers:
    """Prompts that arrive while others are written, so that steps have parts and single tokens."""
    answers = Answers()
    for length in LENGTHS:
        prompt = random.Random(length).choices(range(5, causal.VOCABULARY), k=length)
        engine.add(request_of(length, prompt, TOKENS, n=2))
        answers.take(engine.step())
    return answers.run(engine)


def replays_of(engine: Engine) -> list[int]:
    assert engine._prompts is not None
    return [step.graph.count for step in engine._prompts.steps.values() if isinstance(step.graph, Replay)]


@pytest.mark.usefixtures("both_modes")
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "family",
    [*(name for name in causal.FAMILIES if name not in LAYERS_WITH_RULES), "llama_long", "phi3_long"],
)
def test_replayed_prompts_have_the_tokens_of_plain_steps(family: str) -> None:
    model = causal.make(family)
    plain = answers_of(engine_with(model, None))
    # NOTE: positions that depend on the length of a text stand in the modules of one engine.
    model = causal.make(family)
    engine = engine_with(model, ReplayedPrompts, attention(BLOCK_TOKENS))
    found = answers_of(engine)
    assert found.tokens == plain.tokens
    assert engine._prompts is not None and engine._prompts.steps.keys() == {STEP}
    assert replays_of(engine)[0] > 3, "the step was replayed at its capture only"


def test_replayed_prompts_run_the_kernels_of_layers() -> None:
    model = causal.make("qwen3")
    plain = answers_of(engine_with(model, None))
    within = attention(BLOCK_TOKENS)
    engine = engine_with(model, ReplayedPrompts, within)
    within.decoder = KernelDecoder(model, within, TorchKernels())  # type: ignore[arg-type]
    assert answers_of(engine).tokens == plain.tokens
    assert sum(replays_of(engine)) > 3


def test_rows_that_pad_write_to_the_spare_block_alone() -> None:
    model, within = causal.make("llama"), attention(BLOCK_TOKENS)
    engine = engine_with(model, ReplayedPrompts, within)
    slots = engine.pool.total * BLOCK_TOKENS
    assert within.spare_slot == slots and len(within.cells(0)[0]) == slots + BLOCK_TOKENS
    for turn in range(3):
        for states in (state for layer in within.formulas for state in within.cells(layer)):
            states.fill_(-7.0)
        request = request_of(turn, range(5 + turn, 30 + 3 * turn), TOKENS)
        choices = engine.choices_of(request)
        engine.add(request, choices)
        engine.step()
        blocks, length = choices[0].blocks, choices[0].computed
        mine = {blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(length)}
        for states in (state for layer in within.formulas for state in within.cells(layer)):
            touched = {int(slot) for slot in (states != -7.0).any(-1).any(-1).nonzero()}
            assert touched == mine | {slots}
        engine.cancel(turn)
    assert replays_of(engine) == [3]


def test_what_rows_that_pad_hold_changes_no_row() -> None:
    def poisoned(size: int, q: torch.Tensor, keys: Any, values: Any, layout: Any, heads: Any) -> torch.Tensor:
        found = tiles(size, q, keys, values, layout, heads)
        for row, count, _, sequence in layout.tiles.tolist():
            if sequence == NOBODY:
                found[row : row + count] = 1e4
        return found

    model = causal.make("gemma2")
    plain = answers_of(engine_with(model, None))
    engine = engine_with(model, ReplayedPrompts, attention(BLOCK_TOKENS, of_prompts=poisoned))
    assert answers_of(engine).tokens == plain.tokens
    assert sum(replays_of(engine)) > 3


def test_attention_that_differs_is_refused_and_the_answers_are_those_of_plain_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(size: int, q: torch.Tensor, keys: Any, values: Any, layout: Any, heads: Any) -> torch.Tensor:
        return tiles(size, q, keys, values.flip(0), layout, heads)

    model = causal.make("llama")
    plain = answers_of(engine_with(model, None))
    engine = engine_with(model, ReplayedPrompts, attention(BLOCK_TOKENS, of_prompts=wrong))
    assert answers_of(engine).tokens == plain.tokens
    assert not replays_of(engine)
    assert caplog.text.count("runs without captured prompts: the logits differ") == 1


class Clocked(Replays, CapturedPrompts):
    """Captured prompts whose plain and replayed steps take the seconds of `takes`, on a clock that only they move."""

    takes = (1.0, 1.0)
    timed = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, clock=self._time)
        self._now = 0.0

    def _time(self) -> float:
        type(self).timed += 1
        return self._now

    def _plain(self, step: Any) -> torch.Tensor:
        self._now += self.takes[0]
        return super()._plain(step)

    def _fill(self, inputs: Any, step: Any) -> None:
        self._now += self.takes[1]
        super()._fill(inputs, step)


@pytest.mark.parametrize(
    ("takes", "is_worth"), [((1.0, 0.85), True), ((1.0, 0.95), False), ((1.0, 2.0), False)]
)
def test_prompts_are_replayed_where_this_takes_less_time(takes: tuple[float, float], is_worth: bool) -> None:
    class Timed(Clocked):
        pass

    Timed.takes = takes
    model = causal.make("llama")
    plain = answers_of(engine_with(model, None))
    engine = engine_with(model, Timed, attention(BLOCK_TOKENS))
    assert answers_of(engine).tokens == plain.tokens
    assert Timed.timed == 12, "one step is timed, three times in each way"
    assert bool(replays_of(engine)) is is_worth


class Graph:
    """A graph of CUDA, whose memory pool lives as long as one of its graphs."""

    pools: ClassVar[dict[object, list[weakref.ref[Any]]]] = {}

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        graphs = self.pools.setdefault(pool, [])
        if graphs and not any(graph() for graph in graphs):
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graphs.append(weakref.ref(self))

    def capture_end(self) -> None:
        pass


def test_a_size_that_is_not_replayed_takes_no_other_size_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnPools(CapturedPrompts):
        def _capture(self, inputs: Any) -> Any:
            graph, logits = super()._capture(inputs)
            replay: Any = Replay(self._model, self._attention, inputs, logits.clone())
            replay.graph = graph
            return replay, replay.logits

        def _is_worth(self, captured: Any, step: Any) -> bool:
            return captured.inputs.numbers.shape[1] == STEP

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    engine = engine_of(
        causal.make("llama"), prefill_tokens=300, attention=attention(BLOCK_TOKENS), prompts=OnPools
    )
    for turn, length in enumerate((300, 30)):
        engine.add(request_of(turn, range(5, 5 + length), TOKENS))
        Answers().run(engine)
    assert engine._prompts is not None and engine._prompts.steps.keys() == {STEP}, caplog.text


def test_a_program_that_does_not_fit_the_card_leaves_plain_steps(caplog: pytest.LogCaptureFixture) -> None:
    class OutOfResources(Exception):
        """Triton's error for a program that needs more shared memory than there is."""

    def failing(*_: Any) -> torch.Tensor:
        raise OutOfResources("out of resource: shared memory")

    model = causal.make("llama")
    plain = answers_of(engine_with(model, None))
    engine = engine_with(model, ReplayedPrompts, attention(BLOCK_TOKENS, of_prompts=failing))
    assert answers_of(engine).tokens == plain.tokens
    assert caplog.text.count("runs without captured prompts: out of resource: shared memory") == 1


def test_steps_that_do_not_fit_run_in_the_plain_way() -> None:
    model, within = causal.make("llama"), attention(BLOCK_TOKENS)
    engine = engine_with(model, ReplayedPrompts, within)
    prompts = engine._prompts
    assert prompts is not None
    prompts._counts = [16]
    plain = answers_of(engine_with(causal.make("llama"), None))
    assert answers_of(engine).tokens == plain.tokens
    assert all(count == 16 for count in prompts.steps)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [256]), (256, [256]), (257, [256, 512]), (2048, list(range(256, 2049, 256)))]
)
def test_prompts_are_captured_for_multiples_of_256_tokens(most: int, counts: list[int]) -> None:
    assert token_counts(most) == counts


def test_tiles_hold_each_row_once() -> None:
    pieces = [Piece(0, 9, 10, 0), Piece(1, 3, 20, 1), Piece(18, 0, 8, 2), Piece(26, 0, 230, NOBODY)]
    queries = queries_of(7)
    count = most_tiles(256, 3, queries)
    found = tiles_of(pieces, queries, count)
    assert found.shape == (count, 4) and found.dtype == np.int32
    rows = [
        (row + each, start + each, sequence)
        for row, size, start, sequence in found.tolist()
        for each in range(size)
    ]
    wanted = [
        (piece.row + at, piece.start + at, piece.sequence)
        for piece in pieces
        for at in range(piece.stop - piece.start)
    ]
    assert rows == wanted
    assert found[:, 1].max() <= queries


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 128])
def test_a_tile_has_at_most_128_rows_of_a_product(group: int) -> None:
    assert 1 <= queries_of(group) <= 64
    assert queries_of(group) * group <= 128


class WithoutExperts:
    """A configuration."""

    def get_text_config(self) -> object:
        return object()


class OnCard:
    """A model that says that it is on a card."""

    device, config = torch.device("cuda"), WithoutExperts()


@pytest.mark.parametrize(
    ("settings", "is_captured"),
    [({}, True), ({"prompt_graphs": False}, False), ({"cuda_graphs": False}, False)],
)
def test_the_settings_say_whether_prompts_are_captured(settings: dict[str, bool], is_captured: bool) -> None:
    within = attention(BLOCK_TOKENS)
    engine_of(causal.make("llama"), attention=within)
    found = building.captured_prompts(OnCard(), within, 8, 4, 512, Generation(**settings))
    assert (found is not None) is is_captured


def test_layers_with_a_rule_and_models_on_a_processor_have_no_captured_prompts() -> None:
    within = attention(BLOCK_TOKENS)
    engine_of(causal.make("llama4"), attention=within)
    assert not within.prepare_tiles()
    model = causal.make("llama")
    assert building.captured_prompts(model, within, 8, 4, 512, Generation()) is None
