"""Inputs in the forms of other APIs: one text, several texts and images, the ids of one text, or the ids of several.

1. `check_inputs` refuses ids beside texts, and what no model could take.
2. `inputs_of` makes the inputs of workers.

Texts and images come as plain texts, objects, or lists of content parts:

1. `seen` finds the text or image of an entry, before any model is looked up.
2. `seen_input` refuses what the model does not take, and decodes the image. Images travel inside of the request, as a
   data URI or as base64: nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from frontend.http.fields import check_count, check_texts
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem

_SHOWN = 64

ImageText = Annotated[str, msgspec.Meta(description="A data URI, or the base64 text of an image file.")]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ImageUrl(msgspec.Struct):
    """The place of an image."""

    url: ImageText


class Part(msgspec.Struct):
    """A text or an image; `type` is read by nobody, as the fields say the same."""

    type: Annotated[str | None, Meta(description="Kind of the part: text or image.")] = None
    text: Annotated[str | None, msgspec.Meta(description="A text.")] = None
    image: Annotated[ImageText | None, Meta(description="A picture as a data URI or base64.")] = None
    image_url: Annotated[ImageUrl | ImageText | None, Meta(description="A picture as a data URI.")] = None


class MediaInput(Part):
    """One input: a text, an image, or content parts."""

    content: Annotated[list[Part] | None, msgspec.Meta(description="Texts, or one image.")] = None


class Seen(NamedTuple):
    """One input of a request: its text, or the base64 text of its image and the JSON path of the image."""

    text: str | None
    image: str = ""
    where: str = ""


def seen(entry: str | MediaInput, where: str) -> Seen:
    """The text or image of an entry at the JSON path `where`. Raises `InvalidInput` for none, and for several."""
    if isinstance(entry, str):
        return Seen(entry)
    images = list(_images(entry, where))
    texts = [part.text for part in (entry, *(entry.content or ())) if part.text is not None]
    return joined(texts, images, where)


def joined(texts: Sequence[str], images: Sequence[Seen], where: str) -> Seen:
    """Texts as one text, or the only image. Raises `InvalidInput` for neither, for both, and for several images."""
    if not images:
        if not texts:
            raise InvalidInput(f"{where}: expected a text or an image")
        return Seen("\n".join(texts))
    if texts:
        raise InvalidInput(f"{where}: has a text and an image, send each as an input of its own")
    if len(images) > 1:
        raise InvalidInput(f"{where}: {len(images)} images, the limit is 1")
    return images[0]


def seen_input(found: Seen, where: str, entry: ModelEntry) -> InputItem:
    """The input of a worker. Raises `InvalidInput` for what the model does not take, and for no base64."""
    if found.text is None:
        require("image", found.where, entry)
        return InputItem(images=[_decoded(found)])
    require("text", where, entry)
    return InputItem(found.text)


def require(kind: str, where: str, entry: ModelEntry) -> None:
    """Raise `InvalidInput` for a model that does not take inputs of `kind`."""
    if kind not in entry.inputs:
        raise InvalidInput(f"{where}: model '{entry.id}' takes no {kind}, only {', '.join(entry.inputs)}")


def counted(parts: Sequence[Part]) -> dict[str, int]:
    """How often each name of a field stands in JSON of `parts`, as a field or as the value of `type`."""
    named = (name for part in parts for name in Part.__struct_fields__ if getattr(part, name) is not None)
    return Counter(chain(named, (part.type for part in parts if part.type in Part.__struct_fields__)))


def _images(entry: MediaInput, where: str) -> Sequence[Seen]:
    parts = [
        (where, entry),
        *((f"{where}.content[{at}]", part) for at, part in enumerate(entry.content or ())),
    ]
    images = []
    for place, part in parts:
        if part.image is not None:
            images.append(Seen(None, part.image, f"{place}.image"))
        if part.image_url is not None:
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            images.append(Seen(None, url, f"{place}.image_url"))
    return images


def _decoded(found: Seen) -> bytes:
    head, comma, data = found.image.partition(",")
    if comma and head.startswith("data:"):
        if not head.endswith(";base64"):
            raise InvalidInput(f"{found.where}: {head[:_SHOWN]!r} is no data URI in base64")
    elif "://" in found.image[:_SHOWN]:
        raise InvalidInput(
            f"{found.where}: {found.image[:_SHOWN]!r} is not fetched, send a data URI in base64"
        )
    else:
        data = found.image
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{found.where}: no base64 ({error})") from None


Inputs = str | list[TokenId | str | list[TokenId] | MediaInput]


def check_inputs(given: Inputs, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for an empty, mixed or over-long input; `where` is its field."""
    entries = _entries(given)
    if all(isinstance(entry, int) for entry in entries):
        _check_ids(entries, where, limits)
        return
    check_count(len(entries), where, limits)
    if all(isinstance(entry, str | MediaInput) for entry in entries):
        inputs = [seen(entry, f"{where}[{at}]") for at, entry in enumerate(entries)]
        check_texts([one.text or "" for one in inputs], f"{where}[{{}}]", limits)
    elif all(isinstance(entry, list) for entry in entries):
        for index, entry in enumerate(entries):
            _check_ids(entry, f"{where}[{index}]", limits)
    else:
        raise InvalidInput(f"{where}: expected one kind of entry (str, int, or array of int), got a mix")


def inputs_of(given: Inputs, where: str, entry: ModelEntry) -> list[InputItem]:
    """One input per text, image or token list of a checked request. Raises `InvalidInput` for what a model refuses."""
    entries = _entries(given)
    if isinstance(entries[0], int):
        entries = [entries]
    if isinstance(entries[0], list):
        require("text", where, entry)
        return [InputItem(None, ids) for ids in entries]
    places = [where] if isinstance(given, str) else [f"{where}[{at}]" for at in range(len(entries))]
    return [seen_input(seen(one, place), place, entry) for one, place in zip(entries, places, strict=True)]


def names_of(given: Inputs, field: str) -> FieldNames:
    """How messages name the inputs of `field`."""
    single = isinstance(given, str) or isinstance(given[0], int)
    return names_at(field if single else f"{field}[{{}}]")


def names_at(place: str) -> FieldNames:
    """How messages name the inputs at the JSON path `place`, with {} for the index of an input."""
    return FieldNames(item=place, text=place, options="")


def images_of(inputs: Sequence[InputItem], where: str) -> list[tuple[str, bytes]]:
    """JSON path and bytes of each image; `where` is the path of an input, with {} for its place."""
    return [(where.format(at), image) for at, item in enumerate(inputs) for image in item.images]


def key_counts(given: Inputs) -> dict[str, int]:
    """How often names of fields stand in the objects among the inputs, as fields or as values of `type`."""
    objects = [entry for entry in given if isinstance(entry, MediaInput)] if isinstance(given, list) else []
    return counted([part for entry in objects for part in (entry, *(entry.content or ()))]) if objects else {}


def _entries(given: Inputs) -> list[Any]:
    return [given] if isinstance(given, str) else given


def _check_ids(ids: list[int], where: str, limits: Limits) -> None:
    if not ids:
        raise InvalidInput(f"{where}: may not be empty")
    if len(ids) > limits.max_text_bytes // 4:
        raise InvalidInput(f"{where}: {len(ids)} token ids, the limit is {limits.max_text_bytes // 4}")
