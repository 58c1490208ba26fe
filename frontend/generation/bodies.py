"""Reads the body of a request for generated text into the struct of its route.

1. The head must name JSON: other content types are refused before anything is read. ollama does not look at the head,
   so its routes take every content type.
2. Bodies up to `MOST_NBYTES` are read within the budget of all bodies; a body with too many values is refused unbuilt.
3. The body is decoded, in a thread if it is large. Unknown fields are ignored, and null equals absent.
4. A mistake names the field: malformed JSON is `MalformedBody`, a wrong type `InvalidField`. The request counts for the
   model that the body names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from falcon.asgi import Request

from frontend.generation.errors import InvalidField, MalformedBody, WrongContentType
from frontend.generation.nested import written
from frontend.generation.running import find_generator
from frontend.http.fields import mismatch_of
from frontend.http.rendering import off_loop_if
from frontend.http.values import check_values, fault_of, model_in
from frontend.services import Services
from ipc.catalog.entries import Catalog
from ipc.errors import BodyTooLarge, InvalidInput, PenstockError

T = TypeVar("T")
R = TypeVar("R")

MOST_NBYTES = 50 << 20
"""Largest body."""
LONG_NBYTES = 64 << 10
"""Bodies above this size are decoded by a thread."""
_PLACE = re.compile(r"(?P<text>.*?) - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def same_name(name: str, catalog: Catalog) -> str:
    """The name of a model as the request has it."""
    return name


async def receive(
    services: Services,
    req: Request,
    parse: Callable[[bytes], R],
    *,
    always_json: bool = False,
    known_name: Callable[[str, Catalog], str] = same_name,
) -> R:
    """`parse(body)` of a JSON body, in a thread if the body is large; `always_json`: whatever the head says.

    `known_name` gives the catalog's name of a model that a body names. Raises `WrongContentType`, `BodyTooLarge`, what
    `parse` raises, and as `BodyReader.receive` does.
    """
    if not always_json:
        check_content_type(req.content_type)
    _check_nbytes(req.content_length or 0)
    async with services.bodies.receive(req, req.context.penstock.deadline_ns) as body:
        _check_nbytes(len(body))
        try:
            return await off_loop_if(len(body) > LONG_NBYTES, parse, body)
        except InvalidInput:
            named = await off_loop_if(len(body) > LONG_NBYTES, model_in, body)
            if named:
                with suppress(PenstockError):
                    named = known_name(named, services.catalog)
                    entry = find_generator(named, services.catalog, services.settings)
                    req.context.penstock.names(entry.id)
            raise


def check_content_type(given: str | None) -> None:
    """Raise `WrongContentType` unless the media type is JSON (RFC 6839: also with a suffix `+json`)."""
    media = (given or "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        shown = f"got {media[:64]!a}" if media else "got none"
        raise WrongContentType(f"header Content-Type: expected application/json, {shown}")


def decode(body: bytes, kind: type[T], max_items: int, aliases: Sequence[tuple[str, ...]] = ()) -> T:
    """The body as a `kind`. Each tuple of `aliases` names fields of which a request may have one.

    Raises `MalformedBody` and `InvalidField`.
    """
    if not body:
        raise MalformedBody("body: empty, expected JSON")
    check_values(body, False, max_items)
    try:
        decoded: T = _decoder(kind).decode(body)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise _refusal(mismatch_of(error, kind)) from None
    except RecursionError:
        raise MalformedBody("body: JSON is nested too deeply") from None
    except (msgspec.DecodeError, ValueError, OverflowError, MemoryError) as error:
        raise MalformedBody(fault_of(body) or f"body: malformed JSON: {str(error)[:200]}") from None
    for names in aliases:
        _refuse_aliases(decoded, names)
    return decoded


def _check_nbytes(nbytes: int) -> None:
    if nbytes > MOST_NBYTES:
        raise BodyTooLarge(f"body: {nbytes} bytes, the limit is {MOST_NBYTES}")


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind, float_hook=written)


def _refusal(text: str) -> InvalidField:
    """The error of a wrong type, with the path of its field."""
    found = _PLACE.match(text)
    path, text = (found["path"], found["text"]) if found else ("", text)
    missing = _MISSING.search(text)
    if missing:
        path, text = f"{path}.{missing['name']}", "is required"
    text = text.replace("`", "")
    return InvalidField(path.lstrip(".") or "body", text[:1].lower() + text[1:])


def _refuse_aliases(request: object, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) > 1:
        raise InvalidField(given[1], f"is a duplicate of {given[0]}: send one of them")
