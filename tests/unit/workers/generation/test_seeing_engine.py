"""Models that see in the engine: the tokens of generate(), with any number of pictures and in any company."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.fakes.generating import BLOCK_TOKENS, Answers, request_of
from tests.fakes.seeing import STORE_NBYTES, TOKENS, Chat, Seeing
from tests.tiny import seeing
from workers.generation.engine import Engine

pytestmark = pytest.mark.usefixtures("both_modes_at_length")

TOLERANCE = 1e-4
QUESTION = "What do you see in the picture, and where does it stand?"
CHATS = {
    "none": Chat((QUESTION,)),
    "one": Chat((1, QUESTION)),
    "another": Chat((4, QUESTION)),
    "behind": Chat((QUESTION, 2)),
    "two": Chat((1, "Compare.", 2, QUESTION)),
    "twice": Chat((3, 3, QUESTION)),
    "text": Chat(("A long text of a river and a bridge, told before any picture was seen. " * 3,)),
}
WITH_PICTURES = ("one", "another", "behind", "two", "twice")
GROWN = 3 * BLOCK_TOKENS
"""Tokens of answers that need several blocks."""


@pytest.fixture(scope="module")
def made() -> dict[str, Seeing]:
    """The families so far: pytest sets a parametrized fixture up for each of its cases, however wide its scope."""
    return {}


@pytest.fixture
def model(
    request: pytest.FixtureRequest, made: dict[str, Seeing], tmp_path_factory: pytest.TempPathFactory
) -> Seeing:
    """Each family."""
    if request.param not in made:
        made[request.param] = Seeing(request.param, tmp_path_factory.mktemp(request.param))
    return made[request.param]


def added(model: Seeing, engine: Engine, chats: list[str], **options: int) -> None:
    for name in chats:
        engine.add(model.request(name, CHATS[name], **options))


def alone(model: Seeing) -> tuple[Engine, Answers]:
    engine, answers = model.engine(keeps_prefixes=False), Answers()
    for name in CHATS:
        added(model, engine, [name])
        answers.run(engine)
    return engine, answers


def together(model: Seeing) -> tuple[Engine, Answers]:
    engine = model.engine(max_sequences=4)
    added(model, engine, list(CHATS))
    return engine, Answers().run(engine)


def in_chunks(model: Seeing) -> tuple[Engine, Answers]:
    engine = model.engine(prefill_tokens=11)
    added(model, engine, list(CHATS))
    return engine, Answers().run(engine)


def with_known_beginnings(model: Seeing) -> tuple[Engine, Answers]:
    engine, first = model.engine(), Answers()
    added(model, engine, list(CHATS))
    first.run(engine)
    digests = {
        one.digest for chat in CHATS.values() for one in model.request(0, chat, processed=False).pictures
    }
    seen = engine.tower.pictures_seen
    assert seen == len(digests), "each picture is seen once"
    answers = Answers()
    added(model, engine, list(CHATS))
    answers.run(engine)
    for name in CHATS:
        length = len(model.request(name, CHATS[name]).prompt)
        assert answers.cached[name] == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS, name
    assert engine.tower.pictures_seen == seen
    return engine, answers


def preempted(model: Seeing) -> tuple[Engine, Answers]:
    """Each chat loses its blocks to others while its prompt is read, and while it is answered."""
    longest = max(len(model.request(name, chat).prompt) for name, chat in CHATS.items())
    engine = model.engine(
        blocks=-(-longest // BLOCK_TOKENS) + 3, prefill_tokens=24, keeps_prefixes=False, store_nbytes=0
    )
    answers = Answers()
    for name in CHATS:
        added(model, engine, [name])
        for steps in (4, 6):
            for _ in range(steps):
                answers.take(engine.step())
            engine.pause(name)
            engine.add(request_of("other", range(5, 5 + longest), 1))
            Answers().run(engine)
            engine.resume(name)
        answers.run(engine)
    assert engine.tower.pictures_seen > 8
    return engine, answers


def two_choices(model: Seeing) -> tuple[Engine, Answers]:
    engine = model.engine()
    added(model, engine, list(CHATS), n=2)
    answers = Answers().run(engine)
    for name in CHATS:
        assert answers.tokens[name, 0] == answers.tokens[name, 1]
    return engine, answers


WAYS = (alone, together, in_chunks, with_known_beginnings, preempted, two_choices)


PLAIN = ("idefics3", "llava_onevision", "mistral3", "internvl")
"""Families whose text the engine cannot tell from smolvlm's: one way tells whether their features are right."""


CASES = [
    pytest.param(
        family,
        way,
        id=f"{family}-{way.__name__}",
        # One half of the ways for every other family, the other half for the others.
        marks=[pytest.mark.long]
        if (number + turn) % 2 or (family in PLAIN and way not in (alone, together))
        else [],
    )
    for number, family in enumerate(seeing.FAMILIES)
    for turn, way in enumerate(WAYS)
]


@pytest.mark.sample
@pytest.mark.parametrize(("model", "way"), CASES, indirect=["model"])
def test_tokens_and_log_probabilities_are_those_of_generate(
    model: Seeing, way: Callable[[Seeing], tuple[Engine, Answers]]
) -> None:
    engine, answers = way(model)
    for name, chat in CHATS.items():
        tokens, logprobs = model.expected(chat)
        assert answers.tokens[name, 0] == tokens, name
        assert answers.logprobs[name, 0] == pytest.approx(logprobs, abs=TOLERANCE), name
        assert len(tokens) == TOKENS
    assert engine.pool.used == 0 and not list(engine.keys)
    assert engine.tower.store.held_nbytes == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("store_nbytes", [0, STORE_NBYTES], ids=["unkept", "kept"])
@pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=[pytest.mark.long] if each in PLAIN else []) for each in seeing.FAMILIES],
    indirect=True,
)
def test_chats_with_pictures_that_the_scheduler_preempts_get_the_tokens_of_generate(
    model: Seeing, store_nbytes: int
) -> None:
    """The shortest chats begin together, and then grow beyond the blocks of the cache."""
    prompts = {name: model.request(name, CHATS[name], GROWN).prompt for name in WITH_PICTURES}
    names = sorted(prompts, key=lambda name: len(prompts[name]))
    three = sum(-(-len(prompts[name]) // BLOCK_TOKENS) for name in names[:3])
    longest = -(-(len(prompts[names[-1]]) + GROWN) // BLOCK_TOKENS)
    engine = model.engine(
        blocks=max(three + 3, longest), prefill_tokens=24, keeps_prefixes=False, store_nbytes=store_nbytes
    )
    for name in names:
        engine.add(model.request(name, CHATS[name], GROWN))
    answers = Answers().run(engine)
    assert engine.statistics().preemptions > 0
    for name in names:
        tokens, logprobs = model.expected(CHATS[name], GROWN)
        assert answers.tokens[name, 0] == tokens, name
        assert answers.logprobs[name, 0] == pytest.approx(logprobs, abs=TOLERANCE), name
        assert len(tokens) == GROWN
    assert engine.pool.used == 0 and not list(engine.keys)
    assert engine.tower.store.held_nbytes == 0


@pytest.mark.parametrize("model", ["qwen2_5_vl", "gemma3"], indirect=True)
def test_times_of_a_text_tell_the_picture_the_prompt_and_the_writing_apart(model: Seeing) -> None:
    engine, began_ns = model.engine(), time.monotonic_ns()
    found = {}
    for name in ("one", "none"):
        request = model.request(name, CHATS[name])
        engine.add(request)
        Answers().run(engine)
        ended_ns = time.monotonic_ns()
        timing = request.phases.timing(ended_ns)
        assert timing is not None and timing.prefill_ns > 0 and timing.write_ns > 0
        parts = timing.see_ns + timing.prefill_ns + timing.write_ns + request.phases.waited_ns
        assert parts <= ended_ns - began_ns
        found[name], began_ns = timing, ended_ns
    assert found["one"].see_ns > 0 and found["none"].see_ns == 0


@pytest.mark.parametrize("model", seeing.FAMILIES, indirect=True)
def test_other_pictures_give_other_texts(model: Seeing) -> None:
    found = {tuple(model.expected(CHATS[name])[0]) for name in ("none", "one", "another")}
    assert len(found) == 3
