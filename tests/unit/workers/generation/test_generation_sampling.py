"""The sampling stage: every step of the contract's order against computations of the test's own, and seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import InvalidInput
from ipc.wire.messages import GenerateCall, Sampling
from ipc.wire.streams import TokenLogprob
from tests.harness.later import stats
from workers.generation import sampling as stage
from workers.generation.request import GenerationRequest
from workers.generation.sampling import BatchedSampler, NoNextToken, check_bias
from workers.generation.scheduler import Sequence as Choice
from workers.generation.token_draw import STRETCH, draw_filtered, draw_unfiltered, has_filters

CHECKED: Any = None
"""What the sampler never looks at."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of one thread, as in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampler() -> BatchedSampler:
    """A sampler whose tokens are characters."""
    return BatchedSampler(lambda token: b"<%d>" % token, lambda text: [ord(letter) for letter in text])


def choice(tokens: Sequence[int] = (1,), number: int = 0, **wishes: Any) -> Choice:
    """One choice with such a context."""
    call = GenerateCall(sampling=Sampling(**wishes))
    request = GenerationRequest("r", list(tokens), call, 100, frozenset(), CHECKED)
    return Choice(request, number, 0, CHECKED)


def step(one: BatchedSampler, logits: torch.Tensor, sequences: Sequence[Choice]) -> list[int]:
    """The next token of each sequence, which the sequence gets."""
    tokens = [token for token, _ in one.sample(logits, sequences)]
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.tokens.append(token)
    return tokens


def logits_of(rows: int, columns: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Random logits float32 [rows, columns]."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread


def reference(logits: np.ndarray, wishes: Sampling) -> np.ndarray:
    """The distribution that temperature and filters leave, one token after the other in float64."""
    scaled = logits.astype(np.float64) / (wishes.temperature or 1.0)
    weights = [math.exp(value - scaled.max()) for value in scaled]
    total = math.fsum(weights)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept, mass = {}, 0.0
    for rank, token in enumerate(order):
        share = weights[token] / total
        if 0 < wishes.top_k <= rank:
            break
        if 0 < wishes.top_p < 1 and mass >= wishes.top_p:
            break
        if rank and 0 < wishes.min_p < 1 and share <= wishes.min_p * weights[order[0]] / total:
            break
        kept[token] = share
        mass += share
    left = math.fsum(kept.values())
    return np.array([kept.get(token, 0.0) / left for token in range(len(weights))])


def drawn(probabilities: torch.Tensor, wishes: Sampling, uniforms: np.ndarray) -> np.ndarray:
    """Tokens of rows that have the same filters."""
    if has_filters(wishes, probabilities.shape[1]):
        return draw_filtered(probabilities, [wishes] * len(uniforms), uniforms)
    return draw_unfiltered(probabilities, uniforms)


FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 30, "min_p": 0.05},
    {"temperature": 0.9, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 25, "top_p": 0.9, "min_p": 0.03},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("wishes", FILTERS, ids=str)
def test_the_draws_of_each_filter_have_its_distribution(wishes: dict[str, float]) -> None:
    logits = logits_of(1, 75, seed=3)
    expected = reference(logits[0].numpy(), Sampling(**wishes))
    one, rows, steps = sampler(), 400, 25
    sequences = [choice(seed=1000 + row, **wishes) for row in range(rows)]
    counts = np.zeros(75)
    for _ in range(steps):
        tokens = step(one, logits.expand(rows, -1), sequences)
        counts += np.bincount(tokens, minlength=75)
    assert not counts[expected == 0].any()
    wanted = expected * rows * steps
    rare = wanted < 8
    cells = [*zip(counts[~rare], wanted[~rare], strict=True), (counts[rare].sum(), wanted[rare].sum())]
    distance = sum((found - want) ** 2 / want for found, want in cells if want)
    assert distance < stats.chi2.isf(1e-4, max(1, len([want for _, want in cells if want]) - 1))


@pytest.mark.sample
@pytest.mark.parametrize("columns", [64, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("wishes", FILTERS, ids=str)
def test_evenly_spaced_uniforms_hit_each_token_by_its_probability(
    wishes: dict[str, float], spread: float, columns: int
) -> None:
    logits = logits_of(1, columns, seed=5, spread=spread)
    expected = reference(logits[0].numpy(), Sampling(**wishes))
    probabilities = (logits / wishes["temperature"]).softmax(-1)
    number = 300
    uniforms = (np.arange(number) + 0.5) / number
    tokens = drawn(probabilities.repeat(number, 1), Sampling(**wishes), uniforms)
    counts = np.bincount(tokens, minlength=columns)
    # NOTE: intervals of the distribution may end a little beside a uniform number, never a whole step.
    assert np.abs(counts - expected * number).max() <= 1.01
    assert not counts[expected == 0].any()


def test_the_first_and_the_last_uniform_number_draw_a_possible_token() -> None:
    probabilities = torch.zeros(4, 64)
    probabilities[:, 7], probabilities[:, 40] = 0.25, 0.75
    plain, filtered = Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=60, top_p=0.999)
    for wishes in (plain, filtered):
        last = np.nextafter(1.0, 0.0)
        tokens = drawn(probabilities, wishes, np.array([0.0, 0.0, last, last]))
        assert tokens.tolist() in ([7, 7, 40, 40], [40, 40, 7, 7])


@pytest.mark.parametrize("top_k", [1025, 1500, 2049, 5000])
def test_a_very_large_top_k_keeps_exactly_so_many_tokens(top_k: int) -> None:
    """The likeliest tokens lie far apart, so that a look at the highest columns finds fewer than are kept."""
    stretches = 2048
    falling = torch.linspace(1, 0, stretches * STRETCH).softmax(-1)
    probabilities = falling.unflatten(0, (STRETCH, stretches)).T.reshape(1, -1)
    last = np.array([np.nextafter(1.0, 0.0)])
    place, stretch = divmod(top_k - 1, stretches)
    wanted = stretch * STRETCH + place
    assert drawn(probabilities, Sampling(temperature=1.0, top_k=top_k), last).tolist() == [wanted]


@pytest.mark.parametrize("min_p", [1 - 1e-9, 1 - 1e-16])
def test_the_likeliest_token_always_stays(min_p: float) -> None:
    logits = logits_of(1, 96, seed=2)
    for wishes in ({"min_p": min_p}, {"top_p": 1e-12}, {"top_k": 1}):
        found = sampler().sample(logits, [choice(temperature=3.0, seed=1, **wishes)])
        assert found[0][0] == int(logits.argmax())


OFF = [
    {"top_k": 0},
    {"top_k": -3},
    {"top_k": 10**9},
    {"top_p": 0.0},
    {"top_p": 1.0},
    {"top_p": 2.0},
    {"top_p": -0.5},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"min_p": -1.0},
]


@pytest.mark.parametrize("wishes", OFF, ids=str)
def test_values_out_of_range_switch_a_filter_off(wishes: dict[str, float]) -> None:
    logits = logits_of(1, 200)
    plain, same = (choice(temperature=1.5, seed=4, **more) for more in ({}, wishes))
    one = sampler()
    for _ in range(40):
        assert one.sample(logits, [plain]) == one.sample(logits, [same])


@pytest.mark.parametrize("temperature", [None, 0.0, -1.0, 1e-300])
@pytest.mark.parametrize("columns", [50, 5003])
def test_no_temperature_takes_the_first_of_the_highest(temperature: float | None, columns: int) -> None:
    logits = logits_of(6, columns, seed=8)
    logits[1, 3] = logits[1, columns - 1] = 50.0
    logits[2, columns - 2] = logits[2, columns - 1] = 50.0
    logits[3] = 1.0
    wishes = {"temperature": temperature, "top_k": 2, "top_p": 0.5, "min_p": 0.5}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = logits.to(dtype)
        found = sampler().sample(given, [choice(**wishes) for _ in range(6)])
        expected = [int(np.argmax(row)) for row in given.float().numpy()]
        assert [token for token, _ in found] == expected
        assert (expected[1], expected[2], expected[3]) == (3, columns - 2, 0)


def test_the_smallest_and_the_highest_temperature_give_tokens() -> None:
    logits = logits_of(2, 64) * 1e5
    found = sampler().sample(logits, [choice(temperature=1e-4, seed=1), choice(temperature=1e4, seed=1)])
    assert found[0][0] == int(logits[0].argmax()) and 0 <= found[1][0] < 64


# penalties


def penalised(row: np.ndarray, tokens: Sequence[int], wishes: Sampling) -> np.ndarray:
    """DRY, penalties and bias by the definitions, one token of the vocabulary after the other."""
    out = row.astype(np.float64).copy()
    for token, length in repeats(tokens, wishes).items():
        if length >= wishes.dry_allowed_length:
            out[token] -= (wishes.dry_multiplier or 0) * wishes.dry_base ** (
                length - wishes.dry_allowed_length
            )
    for token in range(len(out)):
        count = list(tokens).count(token)
        if count:
            out[token] -= count * wishes.frequency_penalty + wishes.presence_penalty
            scale = wishes.repetition_penalty
            out[token] = out[token] / scale if out[token] > 0 else out[token] * scale
    for token, value in wishes.logit_bias.items():
        if token < len(out):
            out[token] += value
    return out


def repeats(tokens: Sequence[int], wishes: Sampling) -> dict[int, int]:
    """For each token that once followed an end like that of the context: the length of the longest such end."""
    if not wishes.dry_multiplier:
        return {}
    breakers = {ord(text[-1]) for text in wishes.dry_sequence_breakers}
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        if tokens[end] != tokens[-1] or tokens[end + 1] in breakers:
            continue
        length = 1
        while length < 50 and length <= end:
            near, far = tokens[len(tokens) - 1 - length], tokens[end - length]
            if near != far or near in breakers:
                break
            length += 1
        longest[tokens[end + 1]] = max(longest.get(tokens[end + 1], 0), length)
    return longest


def changed(
    logits: torch.Tensor, sequences: Sequence[Choice], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """What the stage has made of the logits before it looks at masks."""
    seen: list[torch.Tensor] = []
    forbid = stage._forbid

    def look(logits: torch.Tensor, sequences: Sequence[Choice]) -> None:
        seen.append(logits.clone())
        forbid(logits, sequences)

    monkeypatch.setattr(stage, "_forbid", look)
    sampler().sample(logits, sequences)
    monkeypatch.undo()
    return seen[0]


DRY = {"dry_multiplier": 0.8, "dry_sequence_breakers": ("a", "b")}
PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.3, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {5: 3.5, 139: -100.0, 140: 7.0, 10**9: 5.0}},
    DRY,
    {**DRY, "dry_base": 1.2, "dry_allowed_length": 1},
    {**DRY, "dry_allowed_length": 4, "dry_sequence_breakers": ()},
    {
        **DRY,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {3: -2.0, 9: 2.0},
    },
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wishes", PENALTIES, ids=str)
def test_penalties_follow_their_definitions_as_a_context_grows(
    wishes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    # Few tokens, so that passages repeat; among them both breakers.
    contexts = [random.integers(95, 103, size).tolist() for size in (1, 9, 70)]
    sequences = [choice(context, **wishes) for context in contexts]
    for step in range(5):
        logits = logits_of(3, 140, seed=step).to(dtype)
        found = changed(logits, sequences, monkeypatch)
        for row, sequence in enumerate(sequences):
            expected = penalised(logits[row].float().numpy(), sequence.tokens, Sampling(**wishes))
            np.testing.assert_allclose(found[row, :140].numpy(), expected, rtol=1e-5, atol=1e-4)
            sequence.tokens += random.integers(95, 103, 1 + 20 * (step == 2)).tolist()


def test_penalties_concern_only_the_rows_that_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(3, 64)
    found = changed(
        logits,
        [choice([4, 4], temperature=1.0), choice([4, 4], frequency_penalty=1.0), choice([4, 4], logprobs=0)],
        monkeypatch,
    )
    assert torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert float(logits[1, 4] - found[1, 4]) == pytest.approx(2.0)


def test_a_match_of_dry_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 64)
    found = changed(logits, [choice([7] * 400, dry_multiplier=1.0, dry_base=1.5)], monkeypatch)
    assert float(found[0, 7]) == pytest.approx(-(1.5**48), rel=1e-5)
    found = changed(logits, [choice([7] * 400, dry_multiplier=1e5, dry_base=1e5)], monkeypatch)
    assert bool(found.isfinite().all()) and float(found[0, 7]) < -1e29


def test_a_bias_beyond_the_vocabulary_is_refused_by_name() -> None:
    check_bias({0: 1.0, 99: 2.0}, 100)
    for token in (100, -1):
        with pytest.raises(InvalidInput, match=rf"logit_bias: token id {token} .* 100"):
            check_bias({0: 1.0, token: 2.0}, 100)


# masks


def mask_of(allowed: Sequence[int], vocabulary: int) -> np.ndarray:
    """The bits of some tokens, int32, lowest bit first."""
    bits = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits.view(np.int32)


@pytest.mark.parametrize(("vocabulary", "columns"), [(100, 100), (100, 128), (96, 200), (130, 130)])
def test_a_mask_allows_its_tokens_only(vocabulary: int, columns: int) -> None:
    logits = logits_of(4, columns, seed=6)
    allowed = [0, 31, 32, 63, 64, 95]
    sequences = [choice(), choice(temperature=5.0, seed=1), choice(), choice(temperature=5.0, seed=1)]
    for sequence in sequences[:2]:
        sequence.mask = mask_of(allowed, vocabulary)
    one, seen = sampler(), set()
    for _ in range(60):
        found = step(one, logits, sequences)
        assert found[0] == max(allowed, key=lambda token: float(logits[0, token]))
        assert found[2] == int(logits[2].argmax())
        seen.add(found[1])
    assert seen == set(allowed)


def test_a_mask_may_be_a_tensor() -> None:
    sequence = choice()
    sequence.mask = torch.from_numpy(mask_of([9], 64))
    assert sampler().sample(logits_of(1, 64), [sequence])[0][0] == 9


# log probabilities


@pytest.mark.parametrize("columns", [40, 2000])
def test_log_probabilities_are_those_before_mask_and_temperature(columns: int) -> None:
    logits = logits_of(4, columns, seed=9)
    sequences = [
        choice(logprobs=0),
        choice(logprobs=5),
        choice(
            [3, 3], logprobs=20, temperature=2.0, top_k=3, seed=1, frequency_penalty=1.0, logit_bias={8: 4.0}
        ),
        choice(logprobs=2),
    ]
    sequences[3].mask = mask_of([11, 17], columns)
    found = sampler().sample(logits, sequences)
    for row, (token, logprob) in enumerate(found):
        wishes = sequences[row].call.sampling
        changed = penalised(logits[row].numpy(), sequences[row].tokens, wishes)
        expected = changed - changed.max() - math.log(np.exp(changed - changed.max()).sum())
        assert logprob is not None and (logprob.id, logprob.raw) == (token, b"<%d>" % token)
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)
        order = np.argsort(-expected, kind="stable")[: wishes.logprobs]
        assert [(one, raw) for one, raw, _ in logprob.top] == [(one, b"<%d>" % one) for one in order]
        assert [value for *_, value in logprob.top] == pytest.approx(expected[order], abs=1e-4)
    assert found[3][0] in (11, 17)


def test_impossible_tokens_have_a_finite_log_probability() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, 4] = 1.0
    found = sampler().sample(logits, [choice(logprobs=2)])
    assert found == [(4, TokenLogprob(4, b"<4>", 0.0, [(4, b"<4>", 0.0), (0, b"<0>", -9999.0)]))]


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    found = sampler().sample(logits_of(1, 7), [choice(logprobs=20)])[0][1]
    assert found is not None and sorted(one for one, *_ in found.top) == list(range(7))


# seeds


WISHES: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.7, "seed": 2, "top_k": 300},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    {"temperature": 3.0, "seed": 4, "min_p": 0.01},
    {"temperature": 1.1, "seed": 5, "top_p": 0.99, "frequency_penalty": 0.4},
    {"temperature": 2.0, "seed": 6, "dry_multiplier": 1.0, "logprobs": 3},
    {},
    {"presence_penalty": 0.5},
]


def written(wishes: list[dict[str, Any]], kept: list[int], steps: int = 12) -> list[list[int]]:
    """The tokens of some of the sequences when these alone are computed together."""
    one = sampler()
    sequences = [choice([1, 2, 1], **wishes[row]) for row in kept]
    for step in range(steps):
        logits = logits_of(len(wishes), 3000, seed=step)[kept]
        for sequence, (token, _) in zip(sequences, one.sample(logits, sequences), strict=True):
            sequence.tokens.append(token)
    return [sequence.tokens for sequence in sequences]


def test_a_seed_gives_the_same_tokens_in_every_company() -> None:
    every = list(range(len(WISHES)))
    together = written(WISHES, every)
    assert [written(WISHES, [row])[0] for row in every] == together
    assert written(WISHES, every[::-1]) == together[::-1]
    assert written(WISHES, [5, 2, 0]) == [together[row] for row in (5, 2, 0)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("columns", [200, 4000, 70_000])
def test_the_probabilities_of_a_row_have_the_same_bits_in_every_company(
    columns: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    logits = logits_of(9, columns)
    seen: list[torch.Tensor] = []

    def look(probabilities: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
        sums = probabilities.unflatten(1, (-1, 32)).sum(-1)
        seen.append(torch.cat([probabilities, sums], dim=1))
        return draw_unfiltered(probabilities, uniforms)

    monkeypatch.setattr(stage, "draw_unfiltered", look)
    wishes = [{"temperature": 0.5 + row / 7, "seed": row} for row in range(9)]
    one = sampler()
    for kept in ([0], [0, 1], [5, 0, 3], list(range(9))):
        one.sample(logits[kept], [choice(**wishes[row]) for row in kept])
    assert all(torch.equal(found[at], seen[0][0]) for found, at in zip(seen, (0, 0, 1, 0), strict=True))


def test_choices_of_one_seed_differ_and_no_seed_is_random() -> None:
    logits, one = logits_of(1, 5000).expand(4, -1), sampler()
    first = [choice(temperature=2.0, seed=7, number=number) for number in (0, 1)]
    again = [choice(temperature=2.0, seed=7), choice(temperature=2.0, seed=7, number=1)]
    texts = [[token for token, _ in one.sample(logits, first + again)] for _ in range(6)]
    columns = [list(column) for column in zip(*texts, strict=True)]
    assert columns[0] == columns[2] and columns[1] == columns[3] and columns[0] != columns[1]
    unseeded = [choice(temperature=2.0) for _ in range(4)]
    texts = [[token for token, _ in one.sample(logits, unseeded)] for _ in range(6)]
    assert len({tuple(column) for column in zip(*texts, strict=True)}) == 4


def test_no_two_pairs_of_seed_and_choice_share_their_numbers() -> None:
    seeds = [*range(8), -1, -7, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)]
    wishes = [(seed, number) for seed in seeds for number in range(16)]
    logits, one = torch.zeros(1, 4096).expand(len(wishes), -1), sampler()
    drawing = [choice(temperature=1.0, seed=seed, number=number) for seed, number in wishes]
    texts = zip(*(step(one, logits, drawing) for _ in range(4)), strict=True)
    assert len(set(texts)) == len(wishes)


# failures


@pytest.mark.parametrize(
    "wishes", [{}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.0, "logprobs": 2}]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone_and_changes_nothing(
    value: float, wishes: dict[str, Any]
) -> None:
    logits = logits_of(3, 2000)
    broken = logits.clone()
    broken[1, 77] = value
    sequences = [choice(temperature=1.5, seed=1), choice(**wishes), choice(temperature=1.5, seed=2)]
    one = sampler()
    with pytest.raises(NoNextToken) as caught:
        one.sample(broken, sequences)
    assert caught.value.sequences == [sequences[1]]
    rest = [sequences[0], sequences[2]]
    fresh = [choice(temperature=1.5, seed=1), choice(temperature=1.5, seed=2)]
    assert one.sample(logits[[0, 2]], rest) == sampler().sample(logits[[0, 2]], fresh)


def test_a_row_whose_tokens_are_all_forbidden_fails_alone() -> None:
    sequences = [choice(), choice(temperature=1.0, seed=1), choice()]
    sequences[1].mask = mask_of([], 64)
    with pytest.raises(NoNextToken) as caught:
        sampler().sample(logits_of(3, 64), sequences)
    assert caught.value.sequences == [sequences[1]]


def test_the_logits_of_the_model_are_not_changed() -> None:
    logits = logits_of(2, 64)
    before = logits.clone()
    sampler().sample(
        logits, [choice([4], repetition_penalty=3.0, logit_bias={1: 5.0}), choice(temperature=2.0)]
    )
    assert torch.equal(logits, before)
