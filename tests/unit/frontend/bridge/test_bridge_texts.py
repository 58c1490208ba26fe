"""How a bridge cuts a text into pieces, keeps them, and sends them: without an engine and without a broker."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from frontend.bridge.relays import MESSAGE_NBYTES
from frontend.bridge.texts import (
    MOST_NCHARS,
    PIECE_NBYTES,
    PROMPT_TOKENS,
    Entry,
    Texts,
    TextStream,
)
from frontend.engine.events import Arguments, Event, Finished, Mark, Prompted, Reasoning, Started, Text
from ipc.settings import Settings
from ipc.wire.cluster import VERSION, Taken
from ipc.wire.cluster_text import Origin, Pieces, read_pieces
from ipc.wire.streams import (
    ARGUMENTS,
    FINISHED,
    HELD,
    PROMPT,
    REASONING,
    STARTED,
    TEXT,
    Finish,
    PromptToken,
    TokenLogprob,
    nbytes_of,
)

ROUTER = "r"
MARK = Mark(1, [], "weights", "identity")


class Stage:
    """The texts of a bridge whose messages are kept."""

    def __init__(self, inline: int = 1 << 20) -> None:
        self.said: list[Pieces] = []
        self.texts = Texts("a", "a1", Any, self._send, lambda: inline, Settings())  # type: ignore[arg-type]

    def _send(self, subject: str, data: bytes) -> bool:
        assert subject == f"_INBOX.{ROUTER}.texts"
        self.said.append(read_pieces(data))
        return True

    def stream(self, name: str) -> TextStream:
        made = self.texts._streams[name] = TextStream(name, ROUTER, self.texts._note)
        return made

    def take(self, name: str, number: int, nbytes: int = 0, router: str = ROUTER) -> None:
        self.texts.taken(Taken(VERSION, router, [name], [number], [nbytes]))

    @property
    def entries(self) -> list[tuple[str, int, str]]:
        """(name, number of the piece, text) of all entries that were sent."""
        return [
            (pieces.names[place], pieces.numbers[place], text)
            for pieces in self.said
            for place, text in zip(pieces.deltas.ids, pieces.deltas.texts, strict=True)
        ]


def on_loop(scene: Any) -> None:
    async def run() -> None:
        scene()

    asyncio.run(run())


def told(
    stream: TextStream, *events: Event, ids: Sequence[bytes] = (), fresh: dict[int, int] | None = None
) -> None:
    """Events of one turn, with the ids of each choice."""
    stream.fresh.update(fresh or {})
    stream.tell(events, Mark(1, list(ids), "weights", "identity"))


def packed(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def test_pieces_are_kept_until_the_gateway_has_them_and_sent_again_when_it_asks() -> None:
    def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        for text in "abc":
            told(stream, Text(0, text))
            stage.texts.flush()
        assert stage.entries == [("r.1", 1, "a"), ("r.1", 2, "b"), ("r.1", 3, "c")]
        stage.take("r.1", 2)
        stage.take("r.1", 3, router="another")
        stage.said.clear()
        stage.texts.say_again("r.1")
        assert stage.entries == [("r.1", 3, "c")] and stage.texts.pieces_of("r.1") == 3
        stage.take("r.1", 3)
        stage.take("r.2", 3)
        stage.said.clear()
        stage.texts.say_again("r.1")
        stage.texts.say_again("r.2")
        assert not stage.said and not stream.kept

    on_loop(scene)


def test_the_origin_of_a_text_is_told_once_and_again_when_it_changes() -> None:
    def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        for mark in (MARK, MARK, Mark(1, [], "weights", "identity", 1), None):
            stream.tell([Text(0, "a")], mark)
            stage.texts.flush()
        assert [pieces.origins for pieces in stage.said] == [
            {0: Origin("identity", 0, "weights")},
            {},
            {0: Origin("identity", 1, "weights")},
            {0: Origin("", 0, "", False)},
        ]

    on_loop(scene)


@pytest.mark.parametrize("keeps", [True, False])
def test_text_that_goes_on_at_once_is_told_as_by_the_task_of_its_text(keeps: bool) -> None:
    token = TokenLogprob(1, b"a", -0.5, [(2, b"b", -1.0)])
    events: list[Event] = [
        Text(0, "a", 1),
        Text(0, "é", 2, [token]),
        Reasoning(0, "hm", 1),
        Text(0, "", 0),
        Text(0, "x" * (MOST_NCHARS + 1), 3),
        Finished(0, "stop", "x", 7, 1),
    ]
    said: list[list[Pieces]] = []

    def scene(at_once: bool) -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        for at, event in enumerate(events):
            stream.fresh[0] = 7
            if at_once and at:
                passed(stream, event, packed(at) if keeps else None)
            else:
                mark = Mark(1, [packed(at)], "weights", "identity") if keeps else None
                stream.tell([event], mark)
            assert not stream.fresh.get(0)
            stage.texts.flush()
        said.append(stage.said)
        stage.take("r.1", stream.number, stream._flow.ahead)
        assert not stream._flow.ahead

    on_loop(lambda: scene(True))
    on_loop(lambda: scene(False))
    assert said[0] == said[1] and len(said[0]) == len(events)


def passed(stream: TextStream, event: Event, ids: bytes | None) -> None:
    """An event goes on at once."""
    if isinstance(event, Finished):
        finish = Finish(event.reason, event.stop, event.tokens, event.reasoning_tokens)
        stream.pass_on(FINISHED, event.choice, "", 0, ids, event.logprobs, 0, finish)
    else:
        assert isinstance(event, Text | Reasoning)
        kind, nbytes = TEXT if isinstance(event, Text) else REASONING, nbytes_of(event.text, event.logprobs)
        stream.pass_on(kind, event.choice, event.text, event.tokens, ids, event.logprobs, nbytes)


def test_steps_that_leave_together_are_one_entry() -> None:
    token = TokenLogprob(1, b"a", -0.5)

    def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        told(stream, Text(0, "a", 1), ids=[packed(1)])
        for at, text in enumerate("bcd"):
            passed(stream, Text(0, text, 2), packed(2 + at))
        passed(stream, Text(1, "other", 1), packed(9))
        passed(stream, Text(1, "x", 1, [token]), packed(10))
        passed(stream, Text(1, "y" * MOST_NCHARS, 1), b"")
        passed(stream, Text(1, "z", 1), b"")
        passed(stream, Finished(1, "stop", None, 4), b"")
        stage.texts.flush()
        [pieces] = stage.said
        deltas = pieces.deltas
        assert deltas.texts == ["abcd", "other", "x", "y" * MOST_NCHARS, "z", ""]
        assert deltas.tokens == [7, 1, 1, 1, 1, 0] and deltas.choices == [0, 1, 1, 1, 1, 1]
        assert deltas.written == [packed(1, 2, 3, 4), packed(9), packed(10), b"", b"", b""]
        assert not pieces.open and list(deltas.logprobs) == [2] and list(deltas.finishes) == [5]

    on_loop(scene)


def test_a_text_whose_ids_are_kept_no_more_says_so_once() -> None:
    def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        told(stream, Text(0, "a"), ids=[packed(1)])
        for ids in (packed(2), None, None):
            stage.texts.flush()
            passed(stream, Text(0, "b"), ids)
        stage.texts.flush()
        kept = [[origin.is_kept for origin in pieces.origins.values()] for pieces in stage.said]
        assert kept == [[True], [], [False], []]

    on_loop(scene)


def test_ids_come_with_the_last_entry_of_their_choice_or_alone() -> None:
    def scene() -> None:
        stage = Stage()
        told(
            stage.stream("r.1"),
            Started(3),
            Text(0, "a"),
            Text(1, "b"),
            Text(0, "c"),
            ids=[packed(1, 2), packed(3), packed(4)],
        )
        stage.texts.flush()
        [pieces] = stage.said
        deltas = pieces.deltas
        assert deltas.kinds == [STARTED, TEXT, TEXT, TEXT, HELD] and deltas.choices == [0, 0, 1, 0, 2]
        assert deltas.written == [b"", b"", packed(3), packed(1, 2), packed(4)]

    on_loop(scene)


def test_a_long_prompt_is_cut_and_a_token_stays_with_its_text() -> None:
    characters = "x" * (2 * MOST_NCHARS + 1)
    tokens = [PromptToken(at, b"ab", 2 * at) for at in range(2 * PROMPT_TOKENS + 1)]
    text = "ab" * len(tokens)

    def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        told(stream, Prompted(0, characters, []))
        told(stream, Prompted(0, text, tokens))
        stage.texts.flush()
        found = [
            (pieces.deltas.texts[at], pieces.deltas.prompts.get(at, []))
            for pieces in stage.said
            for at in range(len(pieces.deltas.ids))
            if pieces.deltas.kinds[at] == PROMPT
        ]
        plain, with_tokens = found[:3], found[3:]
        assert "".join(piece for piece, _ in plain) == characters
        assert "".join(piece for piece, _ in with_tokens) == text
        assert [token for _, some in with_tokens for token in some] == tokens
        for piece, some in with_tokens:
            assert len(piece) == 2 * len(some)

    on_loop(scene)


@pytest.mark.parametrize("inline", [1 << 20, 32 << 10])
def test_much_text_leaves_in_several_messages_that_a_broker_takes(inline: int) -> None:
    def scene() -> None:
        stage = Stage(inline)
        for number in range(40):
            stream = stage.stream(f"r.{number}")
            told(stream, *(Text(0, "y" * 1000) for _ in range(20)))
        stage.texts.flush()
        assert len({name for name, _, _ in stage.entries}) == 40 and len(stage.entries) == 800
        most = min(inline, MESSAGE_NBYTES) + PIECE_NBYTES
        for pieces in stage.said:
            assert sum(map(len, pieces.deltas.texts)) <= most
        numbers = [number for name, number, _ in stage.entries if name == "r.7"]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)) and len(set(numbers)) > 1

    on_loop(scene)


def test_a_gateway_that_confirms_no_piece_makes_the_text_rest() -> None:
    async def scene() -> None:
        stage = Stage()
        stream = stage.stream("r.1")
        for at in range(30_000):
            told(stream, Finished(0, "stop"), ids=[packed(at)])
            stage.texts.flush()
        waiting = asyncio.ensure_future(stream.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        stage.take("r.1", 30_000)
        await waiting

    asyncio.run(scene())


def test_long_text_is_cut_and_its_tokens_are_told_once() -> None:
    def scene() -> None:
        stage = Stage()
        long = "z" * (3 * MOST_NCHARS + 1)
        told(stage.stream("r.1"), Text(0, long, 9), Arguments(0, long), fresh={0: 14}, ids=[packed(1)])
        stage.texts.flush()
        deltas = [pieces.deltas for pieces in stage.said]
        for kind, tokens in ((TEXT, 9), (ARGUMENTS, 5)):
            found = [
                (text, count)
                for each in deltas
                for of, text, count in zip(each.kinds, each.texts, each.tokens, strict=True)
                if of == kind
            ]
            assert "".join(text for text, _ in found) == long
            assert [count for _, count in found] == [tokens, 0, 0, 0]

    on_loop(scene)


def test_an_entry_counts_what_it_takes_in_a_message() -> None:
    token = TokenLogprob(1, b"abc", -1.0, [(2, b"d", -2.0)] * 5)
    assert Entry(0, TEXT, "é").nbytes < Entry(0, TEXT, "é", logprobs=[token]).nbytes
    assert Entry(0, TEXT, ids=packed(1, 2)).nbytes == Entry(0, TEXT).nbytes + 8
