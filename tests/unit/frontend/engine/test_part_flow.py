"""Flow control of streams: what a worker may send ahead, and that both sides together never stop."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from frontend.engine.streams.part_stream import TELL_AFTER
from ipc.wire import codec
from ipc.wire.messages import BlockRef, Result, TensorInfo, TensorRef, Timing
from ipc.wire.streams import MAX_WINDOW, WINDOW, Part, PartsConsumed, part_flow


class FlowMachine(RuleBasedStateMachine):
    """A worker that sends whenever it may, a reader that takes when it likes; a plain list says what must be true."""

    @initialize(window=st.integers(1, MAX_WINDOW))
    def begin(self, window: int) -> None:
        self.window = window
        self.flow = part_flow(window)
        self.untaken: deque[bool] = deque()

    @rule(in_block=st.booleans())
    def send(self, in_block: bool) -> None:
        if self.flow.open:
            self.flow.sent(1, alone=in_block)
            self.untaken.append(in_block)

    @rule(count=st.integers(-5, 2 * MAX_WINDOW))
    def take(self, count: int) -> None:
        self.flow.taken(count)
        for _ in range(min(max(count, 0), len(self.untaken))):
            self.untaken.popleft()

    @rule()
    def take_all(self) -> None:
        self.flow.taken(len(self.untaken))
        self.untaken.clear()
        assert self.flow.open, "everything is taken, and yet nothing may be sent"

    @invariant()
    def no_more_than_the_window_and_one_block_is_ahead(self) -> None:
        if not hasattr(self, "flow"):
            return
        assert self.flow.ahead == len(self.untaken) <= self.window
        assert sum(self.untaken) <= 1 and True not in list(self.untaken)[:-1]
        assert self.flow.open == (len(self.untaken) < self.window and not any(self.untaken))


TestFlowMachine = FlowMachine.TestCase
TestFlowMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(kinds=st.lists(st.booleans(), max_size=200), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_reader_that_tells_late_gets_every_part(kinds: list[bool], seed: int) -> None:
    flow, waiting, to_send = part_flow(WINDOW), deque[bool](), deque(kinds)
    chance, untold, taken = random.Random(seed), 0, 0
    while taken < len(kinds):
        may_send, may_take = bool(to_send) and flow.open, bool(waiting)
        assert may_send or may_take, "both wait for each other"
        if may_send and (not may_take or chance.random() < 0.5):
            flow.sent(1, alone=to_send[0])
            waiting.append(to_send.popleft())
            continue
        in_block, taken, untold = waiting.popleft(), taken + 1, untold + 1
        if in_block or untold >= TELL_AFTER:
            flow.taken(untold)
            untold = 0


@pytest.mark.parametrize(
    ("asked", "granted"), [(-3, 1), (0, 1), (1, 1), (MAX_WINDOW + 1, MAX_WINDOW), (1 << 62, MAX_WINDOW)]
)
def test_a_window_is_at_least_one_and_bounded(asked: int, granted: int) -> None:
    flow = part_flow(asked)
    while flow.open:
        flow.sent(1)
    assert flow.ahead == granted


def test_parts_and_credits_travel() -> None:
    infos = [TensorInfo("O", "INT32", [2], 8)]
    result = Result(
        7, BlockRef(4096, 8, 3), [TensorRef("O", "uint8", [8], 0)], [], [], [], Timing(), infos=infos
    )
    assert codec.decode_to_frontend(codec.encode(Part(result))) == Part(result)
    assert codec.decode_to_worker(codec.encode(PartsConsumed(7, 4))) == PartsConsumed(7, 4)
