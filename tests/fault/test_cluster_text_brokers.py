"""Generated text over three brokers: each one is killed in the middle of texts, which end as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.held_text import hold_of
from tests.harness.broker import Broker, three_brokers
from tests.harness.chat import MODEL, ChatStream, chat_catalogs
from tests.harness.cluster import Box, box, gateway, living
from tests.harness.server import Server, wait_until
from tests.process.test_cluster_text import LONG, chat, held_text, prompt_for

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def brokers(place: Path) -> Iterator[Sequence[Broker]]:
    with three_brokers(place) as members:
        yield members


@pytest.fixture(scope="module")
def boxes(place: Path, brokers: Sequence[Broker]) -> Iterator[tuple[Box, Box]]:
    catalogs = chat_catalogs(place)
    entry = place / "chat_catalog" / "chat.yaml"
    entry.write_text(
        entry.read_text().replace("adapter: causal", "adapter: tests.fakes.held_text:HeldAdapter")
    )
    urls, settings = [each.url for each in brokers], {"catalog.dirs": catalogs}
    with (
        box(place / "a", "a", urls, models=(MODEL,), settings=settings) as a,
        box(place / "b", "b", urls, models=(MODEL,), settings=settings) as b,
    ):
        yield a, b


@pytest.fixture(scope="module")
def near(place: Path, brokers: Sequence[Broker], boxes: tuple[Box, Box]) -> Iterator[Server]:
    with gateway(place / "near", [each.url for each in brokers]) as server:
        wait_until(lambda: is_whole(server), what="both boxes")
        yield server


def is_whole(server: Server) -> bool:
    """Whether the gateway hears both boxes and a text is written."""
    return living(server) == {"a", "b"} and chat(server, "hello").status == 200


def test_the_death_of_any_broker_changes_no_word_of_a_text(
    near: Server, boxes: tuple[Box, Box], brokers: Sequence[Broker]
) -> None:
    # One text at each box: the first text that gets so far holds all texts of its worker.
    prompts = [prompt_for(name) for name in "ab"]
    whole = [
        chat(near, prompt, LONG, ignore_eos=True).json()["choices"][0]["message"]["content"]
        for prompt in prompts
    ]
    for each in brokers:
        with ExitStack() as stack:
            for one in boxes:
                stack.enter_context(held_text(one))
            streams = [stack.enter_context(ChatStream(near.port, prompt, LONG)) for prompt in prompts]
            for stream in streams:
                stream.more()
            each.kill()
            for one in boxes:
                hold_of(one.server.run_dir).unlink()
            assert all(stream.rest().is_whole for stream in streams), [stream.ending for stream in streams]
        assert [stream.text for stream in streams] == whole
        each.start()
        wait_until(lambda: is_whole(near), what="both boxes again")
