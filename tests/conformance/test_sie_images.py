"""Images over HTTP: how they are written, what is refused by its header, and what fails without its neighbours."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import towers
from tests.conformance.conftest import Families
from tests.conformance.hostile import MAX_IMAGE_BYTES, private_bytes
from tests.conformance.hostile_images import FAILED, REFUSED, USED, vast_png
from tests.conformance.towers import CLIP, PICTURES_ONLY, TEXTS_ONLY, Input, ask, item_of, items_of
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Server
from tests.tiny.pictures import encoded, picture
from workers.scheduling.preparing import CHUNK_IMAGES

MAX_GROWTH_BYTES = 256 << 20
LIMIT = 1e-5


@pytest.fixture
def place(families: Families) -> Path:
    """Where the towers lie."""
    return families.place / "towers"


@pytest.fixture
def server(either_families: Families) -> Server:
    """CLIP, the same for images only, and a model that takes texts only."""
    return either_families.server


@pytest.fixture
def unharmed(server: Server, place: Path) -> Iterator[Server]:
    """The server; afterwards the same processes answer a good request, and hold no memory of the bad one."""
    pids = [*server.frontend_pids(), server.worker_pid()]
    items_of(server, CLIP, [picture(1)])
    before = {pid: private_bytes(pid) for pid in pids if pid is not None}
    yield server
    assert_vector(items_of(server, CLIP, [picture(1)])[0], place, picture(1))
    assert [*server.frontend_pids(), server.worker_pid()] == pids
    assert all(private_bytes(pid) - was <= MAX_GROWTH_BYTES for pid, was in before.items())


def assert_vector(item: Any, place: Path, given: Any) -> None:
    """An item's vector is that of a text or picture by transformers."""
    expected = towers.dense(place / "clip", given)
    np.testing.assert_allclose(np.asarray(item["dense"]["values"]), expected, rtol=0, atol=LIMIT)


def assert_failed(item: Any, index: int) -> None:
    """The item has no vector and says why; the message names it."""
    assert set(item) == {"error"} and item["error"]["code"] == "INVALID_INPUT"
    assert item["error"]["message"].startswith(f"items[{index}]: images[0]: ")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_by_its_header(unharmed: Server, name: str) -> None:
    data, reason = REFUSED[name]
    for form in FORMS:
        answer = ask(unharmed, CLIP, ["river", picture(1), data], form)
        assert_refused(answer, 400, "INVALID_INPUT", "items[2].images[0].data", reason)


@pytest.mark.parametrize("name", FAILED)
def test_what_cannot_be_decoded_fails_alone(unharmed: Server, place: Path, name: str) -> None:
    began = time.monotonic()
    found = items_of(unharmed, CLIP, [picture(2), FAILED[name], "river"], item_errors=True)
    assert time.monotonic() - began < 30
    assert_vector(found[0], place, picture(2))
    assert_failed(found[1], 1)
    assert_vector(found[2], place, "river")


def test_a_request_fails_when_all_its_images_do(unharmed: Server) -> None:
    for form in FORMS:
        answer = ask(unharmed, CLIP, list(FAILED.values())[:3], form)
        assert_refused(answer, 400, "INVALID_INPUT", "items[0]", "images[0]")


@pytest.mark.parametrize("name", USED)
def test_unusual_files_have_the_vector_of_what_they_show(server: Server, place: Path, name: str) -> None:
    data, looks = USED[name]
    [found] = items_of(server, CLIP, [data])
    assert_vector(found, place, looks.convert("RGB"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_long_mixed_request_keeps_its_order(server: Server, place: Path, form: Form) -> None:
    good = [picture(at) if at % 3 else f"river {at}" for at in range(CHUNK_IMAGES * 5 + 3)]
    given: list[Input] = [FAILED["JPEG cut in half"] if at % 7 == 5 else one for at, one in enumerate(good)]
    for at, item in enumerate(items_of(server, CLIP, given, form, item_errors=True)):
        if at % 7 == 5:
            assert_failed(item, at)
        else:
            assert_vector(item, place, good[at])


def test_the_first_image_of_an_item_counts_and_its_format_is_not_believed(
    server: Server, place: Path
) -> None:
    images = [{"data": encoded(picture(at)), "format": "gif"} for at in range(16)]
    body = {"items": [{"id": "a", "images": images, "text": "river"}, {"images": [], "text": "river"}]}
    answer = MSGPACK.load(MSGPACK.post(server, f"/v1/encode/{CLIP}", body).body)
    assert_vector(answer["items"][0], place, picture(0))
    assert_vector(answer["items"][1], place, "river")
    body["items"][0]["images"] = [*images, images[0]]
    refused = MSGPACK.post(server, f"/v1/encode/{CLIP}", body)
    assert_refused(refused, 400, "INVALID_INPUT", "items[0].images", "17", "16", "limits.max_images")
    body["items"][0]["images"] = [*images[:15], {"data": vast_png(50_000, 50_000)}]
    refused = MSGPACK.post(server, f"/v1/encode/{CLIP}", body)
    assert_refused(refused, 400, "INVALID_INPUT", "items[0].images[15].data")


GOOD = base64.b64encode(encoded(picture(1))).decode()
BAD_BASE64 = {
    "no padding": GOOD.rstrip("=") if GOOD.endswith("=") else GOOD[:-1],
    "URL alphabet": GOOD[:8] + "-_" + GOOD[10:],
    "a blank": GOOD[:8] + " " + GOOD[8:],
    "a line break": GOOD + "\n",
    "padding in the middle": "YQ==" + GOOD,
    "a data URL": f"data:image/png;base64,{GOOD}",
    "not ASCII": "é" + GOOD,
}


@pytest.mark.parametrize("name", BAD_BASE64)
def test_bad_base64_is_refused_with_its_place(server: Server, name: str) -> None:
    body = {"items": [{"text": "a"}, {"images": [{"data": GOOD}, {"data": BAD_BASE64[name]}]}]}
    answer = JSON.post(server, f"/v1/encode/{CLIP}", body)
    assert_refused(answer, 400, "INVALID_INPUT", "items[1].images[1].data")


@pytest.mark.parametrize("image", [{}, {"data": None}, {"format": "png"}])
def test_an_image_without_data_is_refused(server: Server, image: dict[str, Any]) -> None:
    for form in FORMS:
        answer = form.post(server, f"/v1/encode/{CLIP}", {"items": [{"images": [image]}]})
        assert_refused(answer, 400, "INVALID_INPUT", "items[0].images[0].data: missing")


def test_inputs_that_a_model_does_not_take_are_refused_by_name(server: Server, place: Path) -> None:
    picture_item, text_item = item_of(picture(1), JSON), {"text": "river"}
    for model, item, named in (
        (TEXTS_ONLY, picture_item, ("items[1].images", "takes text only")),
        (PICTURES_ONLY, text_item, ("items[1].images: missing",)),
        (CLIP, {}, ("items[1].text or items[1].images: missing",)),
        (CLIP, {"images": []}, ("items[1].text or items[1].images: missing",)),
        (CLIP, {"audio": {"data": "AAAA"}}, ("items[1].audio", "takes text, image only")),
    ):
        good = text_item if model == TEXTS_ONLY else picture_item
        answer = JSON.post(server, f"/v1/encode/{model}", {"items": [good, item]})
        assert_refused(answer, 400, "INVALID_INPUT", *named)
    assert_vector(items_of(server, PICTURES_ONLY, [picture(1)])[0], place, picture(1))


def test_a_large_image_is_taken_up_to_the_limit_in_both_forms(unharmed: Server, place: Path) -> None:
    padded = encoded(picture(1)) + bytes(MAX_IMAGE_BYTES)
    for form in FORMS:
        [found] = items_of(unharmed, CLIP, [padded[:MAX_IMAGE_BYTES]], form)
        assert_vector(found, place, picture(1))
        answer = ask(unharmed, CLIP, [padded[: MAX_IMAGE_BYTES + 1]], form)
        assert_refused(answer, 400, "INVALID_INPUT", str(MAX_IMAGE_BYTES + 1), "limits.max_image_bytes")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_repeated_names_are_found_beside_large_images(server: Server, form: Form) -> None:
    large = form.dump({"items": [item_of(encoded(picture(1)) + bytes(2 << 20), form)]})
    assert server.request("POST", f"/v1/encode/{CLIP}", large, form.headers).status == 200
    twice = large[:-1] + b',"items":[{"text":"a"}]}' if form is JSON else b"\x82" + large[1:] + large[1:]
    answer = server.request("POST", f"/v1/encode/{CLIP}", twice, form.headers)
    assert_refused(answer, 400, "INVALID_INPUT", "items", "twice")
