"""Contents of messages in the forms of OpenAI: a text, or parts that are texts, pictures and files.

1. `text_of` reads a content that may have texts only, `content_of` one that may have pictures too.
2. A picture is `image_url` of chat completions, with a URL as text or within an object, or `input_image` of Responses,
   with `image_url`, `image_data` or `file_id`. `detail` has no effect: processors of models decide about sizes.
3. Files become inputs of tools of this server where the request may have them (`Hosted.take`).
4. Sound and video are refused: no model here takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.generation.errors import InvalidField
from frontend.generation.hosted import Hosted
from frontend.generation.pictures import NEW, Album, Content, Part, Standing, content_of_parts, pictures_first

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that hold text, and the field with the text."""
IMAGE_PARTS = ("image_url", "input_image")
_REFUSED = {
    "audio_url": "no model here takes audio",
    "input_audio": "no model here takes audio",
    "video_url": "no model here takes video",
    "file": "files are not taken here",
    "input_file": "files are not taken here",
    "file_url": "is not accepted here",
    "image": "expected 'image_url' or 'input_image' for an image",
}
"""Types of parts that are refused, with the reason."""


def text_of(content: Any, where: str) -> str | None:
    """The text of `content`: a string, or parts of text, which a space joins. Raises `InvalidField`."""
    if content is None or isinstance(content, str):
        return content
    return " ".join(text_of_part(part, place) for part, place in _placed(content, where))


def content_of(
    content: Any,
    where: str,
    album: Album,
    hosted: Hosted | None = None,
    standing: Standing = NEW,
) -> Content | None:
    """The texts and pictures of `content`, the pictures first. Raises `InvalidField`.

    `hosted` takes the parts that are files; without it they are refused.
    """
    if content is None or isinstance(content, str):
        return content
    parts: list[Part] = []
    for part, place in _placed(content, where):
        if hosted is not None and hosted.take(part, place, required=not standing.is_past):
            continue
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            parts.append(_picture(part, place, album, standing))
        else:
            parts.append({"type": "text", "text": text_of_part(part, place)})
    return content_of_parts(pictures_first(parts))


def _placed(content: Any, where: str) -> list[tuple[Any, str]]:
    """Parts with their paths."""
    if not isinstance(content, list):
        raise InvalidField(where, "expected a string or a list of parts")
    return [(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _picture(part: Mapping[str, Any], where: str, album: Album, standing: Standing) -> Part:
    """The part of a picture in a form of OpenAI. Raises `InvalidField`."""
    names = ("image_url",) if part["type"] == "image_url" else ("image_url", "image_data", "file_id")
    given = [name for name in names if part.get(name) is not None]
    if len(given) != 1:
        raise InvalidField(where, f"expected {'one of ' if len(names) > 1 else ''}{', '.join(names)}")
    [name] = given
    value: Any = part[name]
    place = f"{where}.{name}"
    detail = part.get("detail")
    if name == "image_url" and isinstance(value, dict):
        value, place, detail = value.get("url"), f"{place}.url", value.get("detail", detail)
    if not isinstance(detail, str | None):
        raise InvalidField(f"{where}.detail", "expected a string")
    if name == "file_id":
        return album.from_file(value, place, standing)
    if name == "image_data" and not (isinstance(value, str) and value[:5].lower() == "data:"):
        return album.from_base64(value, "", place, standing)
    return album.from_url(value, place, standing)


def text_of_part(part: Any, where: str) -> str:
    """The text of one part. Raises `InvalidField` for a part that is not text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidField(where, "expected an object with a type")
    kind = part.get("type")
    kind = "text" if kind is None else kind
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind in TEXT_PARTS:
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise InvalidField(f"{where}.{TEXT_PARTS[kind]}", "expected a string")
        return text
    refuse(kind, where)
    raise InvalidField(f"{where}.type", f"{kind[:64]!a} is no known kind of content")


def refuse(kind: str, where: str) -> None:
    """Raise the `InvalidField` of a part of a known kind that is not taken where it stands."""
    if kind in IMAGE_PARTS:
        raise InvalidField(f"{where}.type", f"{kind!a}: images are not taken here")
    if kind in _REFUSED:
        raise InvalidField(f"{where}.type", f"{kind!a}: {_REFUSED[kind]}")
