"""Large bodies: looked through in pieces with the same result as in one, and decoded beside the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import msgspec
import pytest

from frontend.http import fields
from frontend.protocols.sie import schemas
from frontend.protocols.sie.schemas import EncodeRequest, Keys, read, read_aside, read_loosely
from ipc.errors import InvalidInput
from ipc.settings import Limits

LARGE = fields.UNCHECKED_NBYTES + 1


class Noting(msgspec.Struct):
    """A body that notes the thread in which it was decoded."""

    text: str

    def keys(self) -> Keys:
        """Called by `read` after decoding."""
        threads.append(threading.current_thread())
        return (), ()


threads: list[threading.Thread] = []


def values_in(body: bytes) -> int:
    """Elements and members of a JSON text, and the text itself."""

    def count(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, inner))

    return count(json.loads(body))


def random_body(seed: int) -> bytes:
    """A JSON array whose strings hold quotes, backslashes, commas and brackets."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choice('a\\",[]{}\\"') for _ in range(draw.randrange(12)))

    made = [{text(): text()} if draw.random() < 0.3 else [text(), draw.random()] for _ in range(60)]
    return json.dumps(made).encode()


@pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_values_are_counted_alike_however_small_the_pieces(
    monkeypatch: pytest.MonkeyPatch, seed: int, nbytes: int
) -> None:
    monkeypatch.setattr(fields, "PIECE_NBYTES", nbytes)
    monkeypatch.setattr(fields, "UNCHECKED_NBYTES", 0)
    monkeypatch.setattr(fields, "VALUES_PER_ITEM", 1)
    body = random_body(seed)
    # Every value but the first follows a comma or an opening bracket; an empty container counts one too much.
    most = values_in(body)
    fields.check_values(body, False, most)
    with pytest.raises(InvalidInput, match="more than"):
        fields.check_values(body, False, most // 2)


@pytest.mark.parametrize("nbytes", [1, 5, 8, 1000])
def test_names_are_found_across_the_ends_of_pieces(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(fields, "PIECE_NBYTES", nbytes)
    body = b'{"items":1,"x":[{"items":2}],"y":"items"}'
    assert fields.count(body, b'"items"') == 3
    assert fields.count(body, b'"items"', 1) in (2, 3), "no further than needed"
    assert fields.count(body, b'"none"') == 0


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_only_a_large_body_is_decoded_in_another_thread(nbytes: int) -> None:
    body = json.dumps({"text": "x" * nbytes}).encode()
    threads.clear()
    found = asyncio.run(read_aside(body, "application/json", Noting, Limits()))
    assert len(found.text) == nbytes
    assert (threads[0] is threading.current_thread()) == (nbytes < LARGE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"items":[{"text":5}],"x":"' + b"x" * LARGE + b'"}',
        b'{"items":[' + b'{"text":"' + b"x" * LARGE + b'"}',
        b'{"items":[],"items":[],"x":"' + b"x" * LARGE + b'"}',
        b'{"items":[' + b'"",' * 700_000 + b'""]}',
    ],
)
def test_a_large_body_is_refused_in_the_same_words(body: bytes) -> None:
    with pytest.raises(InvalidInput) as here:
        read(body, "application/json", EncodeRequest, Limits())
    with pytest.raises(InvalidInput) as aside:
        asyncio.run(read_aside(body, "application/json", EncodeRequest, Limits()))
    assert aside.value.message == here.value.message


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_a_body_with_too_many_values_is_searched_for_nothing(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for stray bytes takes time for each value: 256 MiB may hold as many values as bytes."""
    monkeypatch.setattr(schemas, "stray_byte", lambda *_: pytest.fail("the body was searched"))
    body = {"input": [None] * LARGE}
    packed = msgspec.msgpack.encode(body) if form == "msgpack" else msgspec.json.encode(body)
    for reader in (read, read_loosely):
        with pytest.raises(InvalidInput, match="more than 64 values"):
            reader(packed, f"application/{form}", EncodeRequest, Limits(max_items=1))
