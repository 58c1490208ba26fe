"""Text between a gateway and boxes: numbers, credit, gaps, cancels, deaths. A test plays the engines of the boxes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from frontend.bridge.intake import REST_S
from frontend.bridge.texts import MOST_NCHARS, PIECE_NBYTES
from frontend.cluster.items import BoxLost
from frontend.cluster.runs import Runs
from frontend.cluster.texts import ClusterText
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Finished,
    Pace,
    Past,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.planning import pace_of
from frontend.engine.streams import homes
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope
from ipc import deadline
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InputRefused,
    PenstockError,
    ProtocolError,
    QueueFull,
    Unsupported,
    WorkerCrashed,
    WorkerLost,
)
from ipc.metrics.registry import FrontendMetrics
from ipc.settings import Settings
from ipc.wire.cluster import FIRST_KINDS, KINDS, VERSION, Taken, encode, read_result, read_to_box
from ipc.wire.cluster_names import texts
from ipc.wire.cluster_text import Pieces, read_pieces
from ipc.wire.messages import Work
from ipc.wire.streams import HELD, TEXT, WINDOW_NBYTES, Deltas, PromptToken, TokenLogprob
from tests.fakes.joined_cluster import IDENTITY, MODEL, Joined, play, turn

DONE = Finished(0, "stop", None, 2)
ENDED = Ended(5, 2, 0, 3)


def packed(*ids: int) -> bytes:
    """Ids as they travel."""
    return array("I", ids).tobytes()


class Reader:
    """The client of one text, which reads all the time while `reads` is set."""

    def __init__(self, text: ClusterText) -> None:
        self.text, self.events, self.error = text, list[Event](), None
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for events in self.text:
                self.events += events
                await self.reads.wait()
        except PenstockError as error:
            self.error: PenstockError | None = error

    @property
    def words(self) -> str:
        """The text so far."""
        return "".join(event.text for event in self.events if isinstance(event, Text))


def pace_for(scope: RequestScope) -> Pace:
    """A pace with meters of its own."""
    return pace_of(scope, Settings(), Recorder(FrontendMetrics(), {MODEL}), MODEL)


@asynccontextmanager
async def reading(
    joined: Joined, work: Work | None = None, past: Past | None = None
) -> AsyncIterator[Reader]:
    """A text that has begun at a box, and its reader."""
    scope = joined.scope()
    asked = joined.engine.generate(scope, work or joined.work(), pace_for(scope), past)
    async with asked as text:
        assert isinstance(text, ClusterText)
        reader = Reader(text)
        try:
            yield reader
        finally:
            reader.task.cancel()


def only(joined: Joined) -> str:
    """The box that can be reached and has a text which goes on."""
    writing = {
        name for name, engine in joined.engines.items() if not all(each.has_ended for each in engine.texts)
    }
    [name] = (name for name in writing if joined.bridges[name].broker.up)
    return name


def test_all_that_an_engine_tells_arrives_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    token = TokenLogprob(1, b"a", -0.5, [(2, b"b", -1.0)])
    prompt = [PromptToken(3, b"x", 0), PromptToken(4, b"y", 1, -0.25)]
    told: list[list[Event]] = [
        [Started(5, 3), Prompted(0, "xy", prompt), Reasoning(0, "hm", 1)],
        [Text(0, "é", 1, [token]), Text(0, "b", 2)],
        [CallBegun(0, 0, "call-" + "u" * 36, "weather"), Arguments(0, "{}"), CallEnded(0)],
        [Finished(0, "tool_calls", "x", 9, 1, [token])],
    ]

    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            assert reader.text.prompt_tokens == 5
            for events in told:
                text.say(*events)
                await turn()
            text.end()
            await reader.task
        *events, end = reader.events
        expected = [event for events in told for event in events]
        call = next(event for event in events if isinstance(event, CallBegun))
        assert call.id.startswith("call-") and len(call.id) == len("call-") + 36
        assert [event for event in events if event is not call] == [
            event for event in expected if not isinstance(event, CallBegun)
        ]
        assert isinstance(end, Ended) and (end.prompt_tokens, end.completion_tokens) == (5, 9)
        assert text.has_ended

    play(monkeypatch, scene, "a")


def test_one_step_of_many_texts_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as one, reading(joined) as other:
            mine, theirs = joined.engines["a"].texts
            await turn()
            before = len(joined.messages("texts"))
            for step in range(3):
                mine.say(Text(0, f"{step}"))
                theirs.say(Text(0, f"-{step}"))
                await turn()
            assert len(joined.messages("texts")) == before + 3
            for text in (mine, theirs):
                text.say(DONE)
                text.end()
            await asyncio.gather(one.task, other.task)
        assert (one.words, other.words) == ("012", "-0-1-2")

    play(monkeypatch, scene, "a")


def test_a_lost_message_is_asked_for_and_nothing_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            text.say(Text(0, "a"))
            await turn()
            joined.lose = lambda subject, data: subject.endswith(".texts")
            text.say(Text(0, "b"))
            await turn()
            joined.lose = lambda subject, data: False
            text.say(Text(0, "c"))
            await turn()
            assert reader.words == "a"
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            await turn()
            assert reader.words == "abc"
            # Pieces that came are sent again, as no word of the gateway has confirmed them, and are told once.
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            text.say(DONE)
            text.end()
            await reader.task
        assert reader.words == "abc"
        assert joined.gateway.dispatch.counts["resent", "gap"] == 1

    play(monkeypatch, scene, "a")


def test_a_result_waits_for_the_pieces_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            await turn()
            joined.lose = lambda subject, data: subject.endswith(".texts")
            text.say(Text(0, "last words"), DONE)
            text.end()
            await turn()
            assert joined.messages("results") and not reader.task.done()
            joined.lose = lambda subject, data: False
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            await reader.task
        assert reader.words == "last words" and isinstance(reader.events[-1], Ended)

    play(monkeypatch, scene, "a")


def test_an_error_behind_the_text_comes_behind_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            text.say(Text(0, "some"))
            text.end(InferenceFailed("a broken model"))
            await reader.task
        assert reader.words == "some"
        assert isinstance(reader.error, InferenceFailed) and reader.error.message == "a broken model"

    play(monkeypatch, scene, "a")


def test_a_text_rests_while_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            reader.reads.clear()
            piece = "x" * (WINDOW_NBYTES // 4)
            for _ in range(12):
                text.say(Text(0, piece))
                await turn()
            assert text.read == 4, "as many as the window has room for"
            reader.reads.set()
            for _ in range(12):
                await asyncio.sleep(Runs.tell_after_s)
                await turn()
                if text.read == 12:
                    break
            text.say(DONE)
            text.end()
            await asyncio.wait_for(reader.task, 20)
        assert reader.words == piece * 12
        words = [
            word
            for subject, data in joined.sent
            if subject.endswith(".word") and isinstance(word := read_to_box(data), Taken)
        ]
        assert words and words[-1].amounts[0] >= 8 * len(piece)

    play(monkeypatch, scene, "a")


def test_a_client_that_leaves_ends_the_text_at_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined):
            [text] = joined.engines["a"].texts
            text.say(Text(0, "a"))
            await turn()
            assert not text.has_ended
        await turn()
        assert text.has_ended

    play(monkeypatch, scene, "a")


def test_texts_of_a_silent_gateway_end_at_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            intake = joined.bridges["a"].intake
            silence = intake._gateways[joined.gateway.router]
            intake.tick(connected=True)
            await turn()
            assert not text.has_ended
            silence.heard_ns -= int(2.1e9)
            intake.tick(connected=True)
            await turn()
            assert text.has_ended and not len(intake)
            reader.task.cancel()

    play(monkeypatch, scene, "a")


def test_a_box_that_dies_before_the_first_text_is_followed_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            first = only(joined)
            joined.engines[first].texts[0].say(Started(5, 3), Prompted(0, "he", []))
            await turn()
            joined.die(first)
            await turn()
            [text] = joined.engines[only(joined)].texts
            assert text.past is not None and not text.past.mark.ids and not text.past.events
            text.say(Started(5, 3), Prompted(0, "hello", []), Text(0, "x"), DONE)
            text.end()
            await reader.task
        assert reader.events[:-2] == [
            Started(5, 3),
            Prompted(0, "he", []),
            Prompted(0, "llo", [], 2),
            Text(0, "x"),
        ]
        assert not joined.outcomes

    play(monkeypatch, scene, "a", "b")


def test_a_box_that_dies_later_is_followed_behind_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined, joined.work(n=2)) as reader:
            first = only(joined)
            [text] = joined.engines[first].texts
            seed = text.past.mark.seed if text.past else None
            text.say(Started(5, 3), Text(0, "a"), Text(1, "b", 2), ids=[packed(1), packed(2, 3)])
            text.say(CallBegun(1, 0, "call-" + "u" * 36, "f"), CallEnded(1), ids=[b"", packed(4)])
            text.say(Finished(1, "tool_calls", None, 3))
            await turn()
            joined.die(first)
            await turn()
            [after] = joined.engines[only(joined)].texts
            assert after.past is not None
            mark = after.past.mark
            assert (mark.seed, mark.ids) == (seed, [packed(1), packed(2, 3, 4)])
            assert (mark.identity, mark.weights, after.past.moves) == (IDENTITY, "weights", 1)
            assert [type(event) for event in after.past.events] == [Text, CallBegun, Finished]
            after.say(Started(5, 4), Text(0, "c"), Finished(0, "stop", None, 2), ids=[packed(5), b""])
            after.end()
            await reader.task
        assert not joined.gateway.poison, "a text that a death did not end is no suspect"
        events = [event for event in reader.events if not isinstance(event, (CallBegun, CallEnded))]
        assert events[:-1] == [
            Started(5, 3),
            Text(0, "a"),
            Text(1, "b", 2),
            Finished(1, "tool_calls", None, 3),
            Text(0, "c"),
            Finished(0, "stop", None, 2),
        ]
        assert isinstance(events[-1], Ended) and events[-1].completion_tokens == 5
        assert joined.outcomes == ["carried"]

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_long_text_whose_last_pieces_are_lost_with_their_box_goes_on_exactly_once(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The ids of what an engine tells at once come with its last piece: none of the text counts without them."""

    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            first = only(joined)
            [text] = joined.engines[first].texts
            text.say(Text(0, "a"), ids=[packed(1)])
            await turn()
            monkeypatch.setattr("frontend.bridge.relays.MESSAGE_NBYTES", PIECE_NBYTES)
            seen: list[bytes] = []

            def loses(subject: str, data: bytes) -> bool:
                if subject.endswith(".texts"):
                    seen.append(data)
                return subject.endswith(".texts") and len(seen) >= lost

            joined.lose = loses
            long = [Text(0, letter * MOST_NCHARS) for letter in "bcdefghij"]
            text.say(*long, ids=[packed(2, 3, 4)])
            await turn()
            assert len(seen) == 3 and reader.words == "a"
            joined.lose = lambda subject, data: False
            joined.die(first)
            await turn()
            [after] = joined.engines[only(joined)].texts
            assert after.past is not None and after.past.mark.ids == [packed(1)]
            after.say(*long, DONE, ids=[packed(2, 3, 4)])
            after.end()
            await reader.task
        assert reader.words == "a" + "".join(event.text for event in long)
        assert joined.outcomes == ["carried"]

    play(monkeypatch, scene, "a", "b")


def test_a_box_that_never_ends_an_open_text_loses_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        monkeypatch.setattr("frontend.cluster.texts.MOST_OPEN_NBYTES", 1000)
        async with reading(joined) as reader:
            await turn()
            [name] = joined.gateway.dispatch.items
            box, life = only(joined), joined.bridges[only(joined)].life
            for number in range(2, 6):
                deltas = Deltas([0], [0], [TEXT], ["x" * 400], [1])
                pieces = Pieces(VERSION, box, life, [name], [number], deltas, open=[0])
                joined.bring(texts(joined.gateway.router), encode(pieces))
            await reader.task
        assert isinstance(reader.error, ProtocolError) and not reader.words

    play(monkeypatch, scene, "a")


def test_boxes_of_an_earlier_version_write_no_text_for_gateways_and_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        for name in "ab":
            joined.tell_kinds(name, FIRST_KINDS)
        with pytest.raises(Unsupported, match="earlier version, which takes no work of the kind 'text'"):
            async with reading(joined):
                pass
        assert joined.gateway.models.takers.choose(MODEL, ()) is not None, "the box takes other work"
        for name in "ab":
            joined.tell_kinds(name, KINDS)
            async with reading(joined) as reader:
                assert only(joined) == name
                reader.task.cancel()
            joined.tell_kinds(name, FIRST_KINDS)

    play(monkeypatch, scene, "a", "b")


def test_nothing_of_a_box_that_comes_back_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box that stood still for long goes on with a text that another one writes: the box is told to stop."""

    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            first = only(joined)
            [text] = joined.engines[first].texts
            text.say(Text(0, "a"), ids=[packed(1)])
            await turn()
            joined.die(first)
            await turn()
            [after] = [each for name, each in joined.engines.items() if name != first]
            joined.bridges[first].broker.up = True
            joined.beat(first)
            text.say(Text(0, "stale"), ids=[packed(9)])
            await turn()
            assert text.has_ended and reader.words == "a"
            after.texts[0].say(Text(0, "b"), DONE, ids=[packed(2)])
            after.texts[0].end()
            await reader.task
        assert reader.words == "ab"

    play(monkeypatch, scene, "a", "b")


@pytest.mark.parametrize("most", [0, 1])
def test_a_text_goes_on_so_often_and_then_ends_with_one_error(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            for step in range(most + 1):
                box = only(joined)
                joined.engines[box].texts[-1].say(Text(0, f"{step}"), ids=[packed(step)])
                await turn()
                joined.die(box)
                await turn()
            await reader.task
        assert reader.words == "01"[: most + 1]
        assert isinstance(reader.error, WorkerLost) and not isinstance(reader.error, BoxLost)
        assert joined.outcomes == ["carried"] * most + ["refused" if most else "unkept"]
        assert joined.gateway.poison.is_suspect(MODEL, joined.work().call)

    play(monkeypatch, scene, "a", "b", "c", continuations=most)


def test_a_text_that_its_box_does_not_keep_ends_with_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        for engine in joined.engines.values():
            engine.keeps = False
        async with reading(joined) as reader:
            box = only(joined)
            joined.engines[box].texts[0].say(Text(0, "a"))
            await turn()
            joined.die(box)
            await reader.task
        assert reader.words == "a" and isinstance(reader.error, WorkerLost)
        assert joined.outcomes == ["unkept"]
        assert joined.gateway.poison.is_suspect(MODEL, joined.work().call)

    play(monkeypatch, scene, "a", "b")


def test_two_boxes_that_die_before_the_first_text_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            for _ in range(2):
                joined.die(only(joined))
                await turn()
            await reader.task
        assert isinstance(reader.error, WorkerCrashed) and not reader.events
        # The text was alone at both boxes, so the input is refused from now on.
        before = len(joined.sent)
        with pytest.raises(InputRefused):
            async with reading(joined):
                pass
        assert len(joined.sent) == before

    play(monkeypatch, scene, "a", "b", "c")


def test_a_box_that_drains_gives_its_text_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            box = only(joined)
            [text] = joined.engines[box].texts
            text.say(Text(0, "a"), ids=[packed(1)])
            await turn()
            joined.beat(box, draining=True)
            joined.gateway.texts.tick()
            await turn()
            assert text.has_ended and only(joined) != box
            [after] = joined.engines[only(joined)].texts
            after.say(Text(0, "b"), DONE, ids=[packed(2)])
            after.end()
            await reader.task
        assert reader.words == "ab" and joined.outcomes == ["moved"]

    play(monkeypatch, scene, "a", "b")


def test_a_box_that_drains_alone_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            text.say(Text(0, "a"), ids=[packed(1)])
            await turn()
            joined.beat("a", draining=True)
            joined.gateway.texts.tick()
            text.say(Text(0, "b"), DONE, ids=[packed(2)])
            text.end()
            await reader.task
        assert reader.words == "ab" and not joined.outcomes

    play(monkeypatch, scene, "a")


def test_a_box_that_refuses_is_followed_by_another_and_the_last_refusal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = QueueFull("no room for another sequence", retry_after_s=3)

    async def scene(joined: Joined) -> None:
        for engine in joined.engines.values():
            engine.refusals = [full]
        with pytest.raises(QueueFull, match="no room for another") as refused:
            async with reading(joined):
                pass
        assert refused.value.retry_after_s == 3
        next(iter(joined.engines.values())).refusals = [full]
        async with reading(joined) as reader:
            text = joined.engines[only(joined)].texts[-1]
            text.say(Text(0, "a"), DONE)
            text.end()
            await reader.task
        assert reader.words == "a"

    play(monkeypatch, scene, "a", "b")


def test_a_late_text_ends_at_the_gateway_and_at_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            [run] = joined.gateway.texts._runs.values()
            joined.gateway.dispatch.deadlines._now_ns = lambda: run.held.deadline_ns + 10**9
            joined.gateway.dispatch.deadlines.expire()
            await reader.task
            await turn()
            assert isinstance(reader.error, DeadlineExceeded) and text.has_ended

    play(monkeypatch, scene, "a")


def test_a_box_hears_how_much_time_is_left_until_the_first_token_and_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        scope = joined.scope()
        scope.deadline_ns, scope.start_by_ns = deadline.after(50_000), deadline.after(5_000)
        async with joined.engine.generate(scope, joined.work(), pace_for(scope)):
            [told] = joined.engines["a"].scopes
            assert 40_000 < deadline.remaining_s(told.deadline_ns) <= 50_000
            assert 4_000 < deadline.remaining_s(told.start_by_ns) <= 5_000

    play(monkeypatch, scene, "a")


def test_held_text_and_tokens_of_calls_reach_the_pace_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        scope = joined.scope()
        pace = pace_for(scope)
        async with joined.engine.generate(scope, joined.work(), pace) as text:
            [played] = joined.engines["a"].texts
            await turn()
            assert not pace._first_ns
            played.pace.held(1)
            played.pace.held(1)
            await turn()
            assert pace._first_ns
            kinds = [read_pieces(data).deltas.kinds for data in joined.messages("texts")]
            assert kinds.count([HELD]) == 1
            played.pace.step(0, 7, 1)
            played.say(CallBegun(0, 0, "call-" + "u" * 36, "f"), CallEnded(0))
            await anext(text)
            assert pace._tokens == {0: 7}

    play(monkeypatch, scene, "a")


def test_pieces_of_strangers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            await turn()
            box = only(joined)
            other = "b" if box == "a" else "a"
            [text] = joined.engines[box].texts
            [held] = joined.gateway.dispatch.items.values()
            life, number = joined.bridges[box].life, held.pieces + 1
            deltas = Deltas([0, 0], [0, 3], [1, 1], ["x", "y"], [1, 1])
            for message in (
                Pieces(VERSION, box, "nobody", [held.id], [number], deltas),
                Pieces(VERSION, other, life, [held.id], [number], deltas),
                Pieces(VERSION, box, life, ["r.1"], [number], deltas),
                Pieces(VERSION, other, joined.bridges[other].life, [held.id], [number], deltas),
            ):
                joined.bring(texts(joined.gateway.router), encode(message))
            joined.bring(texts(joined.gateway.router), b"\xc1")
            assert held.pieces == number - 1
            # A choice that the request does not have is no place for text.
            joined.bring(
                texts(joined.gateway.router), encode(Pieces(VERSION, box, life, [held.id], [number], deltas))
            )
            await turn()
            assert reader.words == "x"
            text.end(InferenceFailed("over"))
            await turn()

    play(monkeypatch, scene, "a", "b")


def test_a_text_that_another_process_has_begun_goes_on_at_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            text.say(Started(5, 3), Text(0, "a"), ids=[packed(1)])
            await turn()
            mark = reader.text.mark()
            assert mark is not None and mark.ids == [packed(1)]
        past = Past([Started(5, 3), Text(0, "a")], mark, 1)
        async with reading(joined, past=past) as reader:
            after = joined.engines["a"].texts[-1]
            assert after.past is not None and after.past.mark.ids == [packed(1)] and after.past.moves == 1
            after.say(Started(5, 4), Text(0, "b"), DONE, ids=[packed(2)])
            after.end()
            await reader.task
        assert reader.events == [Text(0, "b"), DONE, reader.events[-1]]

    play(monkeypatch, scene, "a")


def test_turns_of_a_conversation_share_a_box_until_that_box_has_many_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        models, work = joined.gateway.models, joined.work()
        choice = joined.scope().choice
        beginning = homes.beginning_of(work.call)  # type: ignore[arg-type]
        lives = {name: bridge.life for name, bridge in joined.bridges.items()}

        def home(**texts: int) -> str:
            counts = {lives[name]: count for name, count in texts.items()}
            box = models.takers.home(MODEL, (), choice, beginning, counts)
            assert box is not None
            return box.name

        kept = home()
        other = "b" if kept == "a" else "a"
        assert kept == homes.home(["a", "b"], MODEL, beginning)
        assert home(**{kept: homes.STREAMS_APART}) == kept
        assert home(**{kept: homes.STREAMS_APART + 1}) == other
        joined.gateway.boxes.by_name[kept].room_s = 0.0
        assert home() == other
        joined.gateway.boxes.by_name[other].room_s = 0.0
        assert home() == kept
        assert models.takers.home(MODEL, (), choice, beginning, {}, "another model") is None
        assert models.takers.home(MODEL, lives.values(), choice, beginning, {}) is None

    play(monkeypatch, scene, "a", "b")


def test_a_result_says_how_many_pieces_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            for step in range(3):
                text.say(Text(0, f"{step}"))
                await turn()
            text.say(DONE)
            text.end()
            await reader.task
        [data] = joined.messages("results")
        assert read_result(data)[1].pieces == sum(
            len(read_pieces(each).names) for each in joined.messages("texts")
        )

    play(monkeypatch, scene, "a")


def test_credit_that_was_lost_is_told_again_when_the_box_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the box lost its broker for a moment, so nothing but the silence tells that a word was lost."""

    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            joined.lose = lambda subject, data: subject.endswith(".word")
            for at in range(3):
                text.say(Text(0, f"{at}" * (WINDOW_NBYTES // 2)))
            await turn()
            joined.gateway.texts.say_taken()
            await turn()
            assert text.read == 2 and len(reader.words) == WINDOW_NBYTES
            joined.lose = lambda subject, data: False
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            await turn()
            assert text.read == 3
            # The pieces were confirmed before the box was asked, so none of them is sent again.
            assert len(set(joined.messages("texts"))) == len(joined.messages("texts"))
            text.say(DONE)
            text.end()
            await reader.task
        assert len(reader.words) == 3 * (WINDOW_NBYTES // 2)

    play(monkeypatch, scene, "a")


def test_a_resting_text_of_a_box_that_comes_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The box was only silent: the gateway has given the text up, and nothing that the box sends would tell the box."""

    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            first = only(joined)
            [text] = joined.engines[first].texts
            reader.reads.clear()
            text.say(Text(0, "x" * WINDOW_NBYTES), ids=[packed(1)])
            text.say(Text(0, "y"), ids=[packed(2)])
            await turn()
            joined.die(first)
            await turn()
            joined.bridges[first].broker.up = True
            joined.beat(first)
            await turn()
            assert text.read == 1 and not text.has_ended
            intake = joined.bridges[first].intake
            later_ns = intake._now_ns() + int(REST_S * 1e9)
            intake._now_ns = lambda: later_ns
            intake.heard(joined.gateway.router)
            intake.tick(connected=True)
            await turn()
            assert text.has_ended and not len(intake)

    play(monkeypatch, scene, "a", "b")


def test_a_text_that_rests_for_its_client_goes_on_when_its_box_claims_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            reader.reads.clear()
            text.say(Text(0, "x" * WINDOW_NBYTES))
            text.say(DONE)
            text.end()
            await turn()
            intake, claims = joined.bridges["a"].intake, len(joined.messages("words"))
            later_ns = intake._now_ns() + int(REST_S * 1e9)
            intake._now_ns = lambda: later_ns
            intake.heard(joined.gateway.router)
            for _ in range(3):
                intake.tick(connected=True)
                await turn()
            assert len(joined.messages("words")) == claims + 1 and not text.has_ended
            reader.reads.set()
            await turn()
            joined.gateway.texts.say_taken()
            await reader.task
        assert reader.words == "x" * WINDOW_NBYTES

    play(monkeypatch, scene, "a")


def test_tokens_of_calls_and_text_that_come_together_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        scope = joined.scope()
        pace = pace_for(scope)
        async with joined.engine.generate(scope, joined.work(), pace) as text:
            [played] = joined.engines["a"].texts
            played.pace.step(0, 7, 1)
            played.say(
                Text(0, "a", 1), CallBegun(0, 0, "call-" + "u" * 36, "f"), CallEnded(0), Text(0, "b", 2)
            )
            await anext(text)
            assert pace._tokens == {0: 10}

    play(monkeypatch, scene, "a")


def test_a_text_stays_at_a_box_that_drains_while_the_others_have_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            box = only(joined)
            [text] = joined.engines[box].texts
            text.say(Text(0, "a"), ids=[packed(1)])
            await turn()
            [other] = joined.bridges.keys() - {box}
            joined.tell_models(other, "another")
            joined.beat(box, draining=True)
            joined.gateway.texts.tick()
            await turn()
            assert not text.has_ended
            text.say(Text(0, "b"), DONE, ids=[packed(2)])
            text.end()
            await reader.task
        assert reader.words == "ab" and not joined.outcomes

    play(monkeypatch, scene, "a", "b")


def test_a_gap_counts_once_for_the_pieces_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(joined: Joined) -> None:
        async with reading(joined) as reader:
            [text] = joined.engines["a"].texts
            await turn()
            joined.lose = lambda subject, data: subject.endswith(".texts")
            text.say(Text(0, "a"))
            await turn()
            joined.lose = lambda subject, data: False
            for letter in "bcd":
                text.say(Text(0, letter))
                await turn()
            assert joined.gateway.dispatch.counts["resent", "gap"] == 1
            joined.tick(joined.gateway.dispatch._ask_ns / 1e9)
            text.say(DONE)
            text.end()
            await reader.task
        assert reader.words == "abcd" and joined.gateway.dispatch.counts["resent", "gap"] == 1

    play(monkeypatch, scene, "a")
