"""Pictures of a conversation: read from a request, fetched where need be, checked, and laid out for a worker.

1. While a request is read, each picture becomes a `Picture`: bytes, a URL, or the id of a stored file. `Album` bounds
   their number and their bytes by the limits of images. Nothing is fetched and nothing is decoded yet.
2. A message with pictures has a list of parts as its content: texts, and parts of the type `IMAGE` that hold a
   `Picture`. `content_of_parts` joins texts that follow each other.
3. `looked_at`, once the model is loaded: a model that reads no pictures is refused before anything is fetched. Then
   stored files are read, URLs are fetched, and the head of each picture is checked. All bytes count in the budget of
   request bodies.
4. `laid_out` makes the call of a worker: parts without pictures, and the pictures in the order of their places.

Some pictures may be absent. The result of a tool is readable without its picture, so `PLACEHOLDER` stands for the
picture where a model sees nothing. The same text stands for a picture of an earlier turn that cannot be had any more.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec

from frontend.generation.errors import InvalidField
from frontend.generation.requests import MOST_NBYTES, generators
from frontend.http.bodies import Holding
from frontend.http.image_headers import FORMATS, check_all, check_image
from frontend.http.threads import off_loop
from frontend.scope import RequestScope
from frontend.services import Services
from ipc import deadline
from ipc.catalog.entries import ModelEntry
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, ModelStatus

T = TypeVar("T")
IMAGE = "image"
PLACEHOLDER = "[image]"
"""What a model reads in place of a picture that may be absent."""
MAX_URL = 4096
_SHOWN = 64
_MODELS_SHOWN = 10
_SUBTYPES = (*FORMATS, "jpg", "pjpeg", "x-ms-bmp", "x-bmp")
_MEDIA_TYPES = tuple(f"image/{kind}" for kind in _SUBTYPES)
_NO_TYPE = ("", "application/octet-stream", "binary/octet-stream")
"""Media types that say nothing."""
Message = dict[str, Any]
Part = dict[str, Any]
Content = str | list[Part]
"""A text, or parts of a message with pictures."""


class _TooMuch(InvalidField):
    """The pictures of a request have too many bytes together."""


class Standing(NamedTuple):
    """Where a picture stands: in the result of a tool, and in what an earlier request brought."""

    in_result: bool = False
    is_past: bool = False


NEW = Standing()


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a message: bytes, or a URL or a stored file whose bytes are read later. `where` is its path.

    `is_checked`: the bytes are there, counted and checked. Pictures with equal bytes are equal.
    """

    where: str = field(compare=False)
    data: bytes = b""
    url: str = ""
    file_id: str = ""
    standing: Standing = field(default=NEW, compare=False)
    is_checked: bool = field(default=False, compare=False)


class Album:
    """The pictures of one request while the request is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = self._nbytes = 0

    def take(self, picture: Picture) -> Part:
        """The part of a picture. Raises `InvalidField` for too many pictures, and for too many bytes of all."""
        self._count += 1
        self._nbytes += len(picture.data)
        if self._count > self._limits.max_images:
            text = f"more than {self._limits.max_images} images up to here (limits.max_images)"
            raise InvalidField(picture.where, text)
        _check_sum(self._nbytes, picture)
        return {"type": IMAGE, IMAGE: picture}

    def from_url(self, url: Any, where: str, standing: Standing = NEW) -> Part:
        """A picture by a `data:` URL with base64, or by http or https. Raises `InvalidField`."""
        if not isinstance(url, str):
            raise InvalidField(where, "expected a URL with the scheme data, http or https")
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            return self.from_base64(*_data_url(url, where), where, standing)
        if not scheme.startswith(("http://", "https://")):
            raise InvalidField(where, "expected a URL with the scheme data, http or https")
        if len(url) > MAX_URL:
            raise InvalidField(where, f"{len(url)} characters, the limit of a URL is {MAX_URL}")
        return self.take(Picture(where, url=url, standing=standing))

    def from_base64(self, text: Any, media_type: str, where: str, standing: Standing = NEW) -> Part:
        """A picture as base64 of a media type, which may be empty. Raises `InvalidField`."""
        if not isinstance(text, str):
            raise InvalidField(where, "expected base64")
        _check_media_type(media_type, where)
        nbytes = len(text) // 4 * 3 - text[-2:].count("=")
        _check_nbytes(nbytes, where, self._limits)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidField(where, "no valid base64") from None
        if not data:
            raise InvalidField(where, "no bytes, expected an image")
        return self.take(Picture(where, data, standing=standing))

    def from_file(self, file_id: Any, where: str, standing: Standing = NEW) -> Part:
        """A picture that was uploaded to /v1/files. Raises `InvalidField`."""
        if not isinstance(file_id, str) or not file_id:
            raise InvalidField(where, "expected the id of a file")
        return self.take(Picture(where, file_id=file_id, standing=standing))


def _data_url(url: str, where: str) -> tuple[str, str]:
    """Base64 and media type of a `data:` URL (RFC 2397)."""
    # NOTE: only so much is looked at, or a URL of parameters alone would be megabytes of pieces.
    head, comma, _ = url[len("data:") : MAX_URL].partition(",")
    media_type, *parameters = (piece.strip().lower() for piece in head.split(";"))
    if not comma or "base64" not in parameters:
        raise InvalidField(where, "expected base64 in the data URL: data:image/png;base64,...")
    return url[len("data:") + len(head) + 1 :], media_type


def _check_media_type(media_type: str, where: str) -> None:
    """NOTE: what the bytes are is read from the bytes; a type of another kind shows that a client means no picture."""
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in _NO_TYPE and kind not in _MEDIA_TYPES:
        raise InvalidField(where, f"{kind[:_SHOWN]!a} is no image in one of {', '.join(FORMATS)}")


def _check_nbytes(nbytes: int, where: str, limits: Limits) -> None:
    if nbytes > limits.max_image_bytes:
        text = f"{nbytes} bytes, the limit is {limits.max_image_bytes} (limits.max_image_bytes)"
        raise InvalidField(where, text)


def _check_sum(nbytes: int, picture: Picture) -> None:
    if nbytes > MOST_NBYTES:
        raise _TooMuch(picture.where, f"more than {MOST_NBYTES} bytes of images up to here")


def content_of_parts(parts: Sequence[Part]) -> Content:
    """The content of these parts: one text if there is no picture; a space joins texts that follow each other."""
    joined: list[Part] = []
    for is_text, group in groupby(parts, key=lambda part: part["type"] == "text"):
        if is_text:
            # PERF: joined at once. One by one each text would copy all texts before.
            joined.append({"type": "text", "text": " ".join(part["text"] for part in group)})
        else:
            joined += group
    if any(part["type"] == IMAGE for part in joined):
        return joined
    return joined[0]["text"] if joined else ""


def texts_of(content: Content | None) -> list[str]:
    """The texts of a content."""
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [] if content is None else [content]


def pictures_first(parts: Sequence[Part]) -> list[Part]:
    """The parts in the order of chat completions, whose contract puts pictures before the text of their message."""
    return sorted(parts, key=lambda part: part["type"] != IMAGE)


def pictures_of(messages: Sequence[Message]) -> Iterator[Picture]:
    """The pictures of messages, in the order of their places."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part[IMAGE] for part in content if part["type"] == IMAGE)


def refuse_pictures(messages: Sequence[Message], instead: str) -> None:
    """Raise `InvalidField` for messages with pictures on a route that takes none; `instead` says what to do."""
    for picture in pictures_of(messages):
        raise InvalidField(picture.where, f"images are not taken here: {instead}")


async def looked_at(
    services: Services,
    scope: RequestScope,
    entry: ModelEntry,
    status: ModelStatus,
    messages: list[Message],
    held: Holding,
) -> list[Message]:
    """`messages` whose pictures all have their bytes, which `held` counts.

    Raises `InvalidField` for a model that reads no pictures, for what cannot be had, and for what is no picture;
    `QueueFull` without room for the bytes; `DeadlineExceeded` once the request stops waiting.
    """
    pictures = list(pictures_of(messages))
    if not pictures:
        return messages
    if not status.sees:
        return _unseen(services, entry, messages, pictures)
    limits = services.settings.limits
    if len(pictures) > limits.max_images:
        text = f"{len(pictures)} images in all, the limit is {limits.max_images} (limits.max_images)"
        raise InvalidField(pictures[-1].where, text)
    gatherer = _Gatherer(services, scope.grant.caller, held)
    bodies = await _in_time(gatherer.gather([each for each in pictures if not each.is_checked]), scope)
    return _replaced(messages, bodies)


async def _in_time(work: Awaitable[T], scope: RequestScope) -> T:
    """The result of `work`. Raises `DeadlineExceeded` once the request stops waiting."""
    bound = asyncio.timeout(deadline.remaining_s(scope.waits_until_ns))
    try:
        async with bound:
            return await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise DeadlineExceeded("the deadline passed while images were fetched", retry_after_s=1) from None


def _unseen(
    services: Services, entry: ModelEntry, messages: list[Message], pictures: Sequence[Picture]
) -> list[Message]:
    """The messages for a model that reads no pictures. Raises `InvalidField` for a picture that has to be seen."""
    for picture in pictures:
        if not picture.standing.in_result:
            names = [name for name in generators(services.catalog) if services.directory.status(name).sees]
            known = (
                f"these models see: {', '.join(names[:_MODELS_SHOWN])}" if names else "no loaded model sees"
            )
            raise InvalidField(picture.where, f"the model '{entry.id}' takes text only, no images; {known}")
    return _replaced(messages, dict.fromkeys(map(id, pictures)))


def _replaced(messages: Sequence[Message], found: dict[int, Picture | None]) -> list[Message]:
    """`messages` with other pictures, by the identity of the old ones; None stands for `PLACEHOLDER`."""

    def part_of(part: Part) -> Part:
        if part["type"] != IMAGE or id(part[IMAGE]) not in found:
            return part
        picture = found[id(part[IMAGE])]
        return {"type": "text", "text": PLACEHOLDER} if picture is None else {"type": IMAGE, IMAGE: picture}

    return _with_parts(messages, part_of)


def check_picture(picture: Picture, limits: Limits) -> None:
    """Raise `InvalidField` for bytes that are no picture, or one over `limits`."""
    with _as_field():
        check_image(picture.data, picture.where, limits)


@contextmanager
def _as_field() -> Iterator[None]:
    """The error of a check of images, as one of a field: the path stands at its beginning."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidField(*error.message.split(": ", 1)) from None


_Source = tuple[str, str, bool]


def _source_of(picture: Picture) -> _Source:
    return picture.url, picture.file_id, picture.standing.is_past


class _Gatherer:
    """Reads and fetches the bytes of the pictures of one request."""

    def __init__(self, services: Services, owner: str, held: Holding) -> None:
        self._services, self._owner, self._held = services, owner, held
        self._limits = services.settings.limits
        self._nbytes = 0

    async def gather(self, pictures: Sequence[Picture]) -> dict[int, Picture | None]:
        """Each picture with its bytes, by the identity of the picture; None for one that may be absent.

        A URL or a file that stands several times is read once.
        """
        brought = [picture for picture in pictures if picture.data]
        for picture in brought:
            self._count(len(picture.data), picture)
        await self._check(brought)
        sources = {_source_of(picture): picture for picture in reversed(pictures) if not picture.data}
        tasks = {key: asyncio.ensure_future(self._read(picture)) for key, picture in sources.items()}
        try:
            data = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for picture in pictures:
            # NOTE: read once, and sent to the worker as often as the picture stands.
            if not picture.data and sources[_source_of(picture)] is not picture:
                self._count(len(data[_source_of(picture)] or b""), picture)
        return {id(picture): self._with_bytes(picture, data) for picture in pictures}

    def _with_bytes(self, picture: Picture, data: dict[_Source, bytes | None]) -> Picture | None:
        content = picture.data or data[_source_of(picture)]
        return (
            None if content is None else replace(picture, data=content, url="", file_id="", is_checked=True)
        )

    async def _read(self, picture: Picture) -> bytes | None:
        """The bytes of a picture by URL or file; None for a picture of the past that cannot be had any more."""
        try:
            data = await (self._fetched(picture) if picture.url else self._stored(picture))
            await self._check([replace(picture, data=data)])
            return data
        except InvalidInput as error:
            if picture.standing.is_past and not isinstance(error, _TooMuch):
                return None
            if isinstance(error, InvalidField):
                raise
            raise InvalidField(picture.where, error.message) from None

    async def _check(self, pictures: Sequence[Picture]) -> None:
        """Raise `InvalidField` for bytes that are no picture, or one over the limits of images."""
        with _as_field():
            await check_all([(picture.where, picture.data) for picture in pictures], self._limits)

    async def _fetched(self, picture: Picture) -> bytes:
        if not self._services.settings.generation.fetch_media:
            text = "this server fetches no images (generation.fetch_media): send the image as a data URL"
            raise InvalidField(picture.where, text)
        pieces = []
        async with self._services.fetcher().open(
            picture.url, most_nbytes=self._limits.max_image_bytes
        ) as answer:
            _check_media_type(answer.media_type, picture.where)
            async for piece in answer.pieces():
                self._count(len(piece), picture)
                pieces.append(piece)
        return b"".join(pieces)

    async def _stored(self, picture: Picture) -> bytes:
        files = self._services.state.files
        file = await files.get(self._owner, picture.file_id)
        _check_nbytes(file.nbytes, picture.where, self._limits)
        self._count(file.nbytes, picture)
        return await files.reading(file, lambda descriptor: _whole(descriptor, file.nbytes))

    def _count(self, nbytes: int, picture: Picture) -> None:
        self._nbytes += nbytes
        _check_sum(self._nbytes, picture)
        self._held.grow(nbytes)


def _whole(descriptor: int, nbytes: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read(nbytes)


@contextmanager
def of_field(messages: Sequence[Message]) -> Iterator[None]:
    """Within, the error of a worker about one of the pictures of `messages` becomes one of the picture's field."""
    try:
        yield
    except InvalidInput as error:
        number, why = error.detail.get("image"), error.detail.get("why")
        where = [picture.where for picture in pictures_of(messages)]
        if not (isinstance(number, int) and isinstance(why, str) and 0 < number <= len(where)):
            raise
        raise InvalidField(where[number - 1], why) from None


async def in_rows(messages: list[Message]) -> list[Message]:
    """`rows_of` messages, of messages with pictures in a thread."""
    return await off_loop(rows_of, messages) if have_parts(messages) else messages


def rows_of(messages: Sequence[Message]) -> list[Message]:
    """`messages` as a session keeps them: pictures as base64. All pictures have their bytes."""
    return _with_parts(messages, _kept)


async def from_rows(messages: list[Message]) -> list[Message]:
    """The messages of a session, with pictures by a thread. Raises nothing: what a session keeps was checked."""
    return await off_loop(_with_parts, messages, _restored) if have_parts(messages) else messages


def revived(messages: Sequence[Message]) -> list[Message]:
    """The messages of a call that was encoded and read again: pictures are pictures, not their fields."""
    return _with_parts(messages, _revived)


def _revived(part: Part) -> Part:
    return part if part["type"] != IMAGE else {"type": IMAGE, IMAGE: msgspec.convert(part[IMAGE], Picture)}


def have_parts(messages: Sequence[Message]) -> bool:
    """Whether a message has parts, as those with pictures have."""
    return any(isinstance(message.get("content"), list) for message in messages)


def _kept(part: Part) -> Part:
    if part["type"] != IMAGE:
        return part
    return {"type": IMAGE, "data": base64.b64encode(part[IMAGE].data).decode()}


def _restored(part: Part) -> Part:
    if part["type"] != IMAGE:
        return part
    return {
        "type": IMAGE,
        IMAGE: Picture("session_id", base64.b64decode(part["data"]), standing=Standing(is_past=True)),
    }


def _with_parts(messages: Sequence[Message], change: Callable[[Part], Part]) -> list[Message]:
    """`messages` with other parts."""
    return [
        {**message, "content": content_of_parts([change(part) for part in message["content"]])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def laid_out(call: GenerateCall) -> GenerateCall:
    """The call as workers take calls. All pictures have been looked at."""
    images = [picture.data for picture in pictures_of(call.messages or ())]
    if not images:
        return call
    messages = _with_parts(call.messages or (), _bare)
    return msgspec.structs.replace(call, messages=messages, images=images)


def _bare(part: Part) -> Part:
    return {"type": IMAGE} if part["type"] == IMAGE else part
