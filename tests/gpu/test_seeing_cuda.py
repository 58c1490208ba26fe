"""Models that see on CUDA: tokens of generate() in float32, in a crowd and after the loss of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.generating import Answers, request_of
from tests.fakes.seeing import Chat, Seeing
from tests.tiny import seeing

pytestmark = pytest.mark.gpu
QUESTION = "What do you see?"
CHATS = (Chat((1, QUESTION)), Chat((QUESTION,)), Chat((1, "Compare.", 2, QUESTION)))


@pytest.mark.parametrize("family", seeing.FAMILIES)
def test_tokens_are_those_of_generate_in_a_crowd_and_in_chunks(family: str, tmp_path: Path) -> None:
    model = Seeing(family, tmp_path, device="cuda")
    engine, answers = model.engine(prefill_tokens=32), Answers()
    engine.add(request_of("text", range(5, 40), 20))
    for number, chat in enumerate(CHATS):
        engine.add(model.request(number, chat, n=2))
    answers.run(engine)
    for number, chat in enumerate(CHATS):
        tokens, _ = model.expected(chat)
        assert answers.tokens[number, 0] == answers.tokens[number, 1] == tokens
    assert engine.pool.used == 0
