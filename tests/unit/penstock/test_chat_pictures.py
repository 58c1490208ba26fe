"""Pictures in `penstock chat`: what the conversation sends, and files that are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from penstock import chat, cli
from penstock.conversation import Conversation, NoAnswer, Server
from tests.fakes.generation_server import CHAT, RecordedServer
from tests.tiny.pictures import encoded, picture

EYE = "tiny/eye"
PNG, JPEG = encoded(picture(1)), encoded(picture(2), "JPEG")
SEEN = {"type": "image"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedServer]:
    """A model that sees and one that does not."""
    with closing(RecordedServer(tmp_path_factory.mktemp("eyes"), seeing=(EYE,))) as running:
        yield running


@pytest.fixture
def conversation(server: RecordedServer) -> Iterator[Conversation]:
    """A conversation with the model that sees."""
    with server.anew().listening() as url:
        yield Conversation(Server(url, ""), EYE, None, {})


def answer(conversation: Conversation, text: str) -> str:
    """The answer to a message."""
    return "".join(piece for kind, piece in conversation.ask(text) if kind == "content")


def test_pictures_go_with_the_next_message_and_stay_in_the_conversation(
    server: RecordedServer, conversation: Conversation, tmp_path: Path
) -> None:
    for name, content in (("a.png", PNG), ("b.jpg", JPEG)):
        (tmp_path / name).write_bytes(content)
        assert (
            conversation.show(tmp_path / name) == f"{name} ({len(content)} bytes) goes with the next message"
        )
    assert answer(conversation, "What?") == "Hello you"
    assert answer(conversation, "And now?") == "Hello you"
    for call in server.engine.calls:
        assert call.messages[0]["content"] == [SEEN, SEEN, {"type": "text", "text": "What?"}]
        assert call.images == [PNG, JPEG]
    assert server.engine.calls[-1].messages[-1] == {"role": "user", "content": "And now?"}


def test_pictures_of_a_refused_message_go_with_the_next_one_and_a_reset_forgets_them(
    server: RecordedServer, conversation: Conversation, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(PNG)
    conversation.show(tmp_path / "a")
    conversation.model = CHAT
    with pytest.raises(NoAnswer, match="takes text only"):
        answer(conversation, "What?")
    conversation.model = EYE
    answer(conversation, "What?")
    assert server.engine.calls[-1].images == [PNG]
    conversation.show(tmp_path / "a")
    conversation.reset()
    answer(conversation, "What?")
    assert server.engine.calls[-1].images == []


def test_a_command_names_a_picture_and_says_why_a_file_is_none(
    conversation: Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat._command(f"/image {tmp_path / 'none.png'}", conversation, None)
    assert "none.png: No such file or directory" in capsys.readouterr().err
    (tmp_path / "a.png").write_bytes(PNG)
    chat._command(f"/image {tmp_path / 'a.png'}", conversation, None)
    assert "goes with the next message" in capsys.readouterr().err


def test_a_flag_that_names_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--image", str(tmp_path / "none.png")]) == 3
    assert "none.png: no such file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--image x: "):
        chat._show(Conversation(Server("http://127.0.0.1:9", ""), EYE, None, {}), ["x"])
