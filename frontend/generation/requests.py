"""Reads a request for generated text: its body, its model, the parameters of its query, and its owner.

`receive` reads the body into the struct of the route:

1. The head must name JSON: other content types are refused before anything is read. ollama does not look at the head,
   so its routes take every content type.
2. Bodies up to `MOST_NBYTES` are read within the budget of all bodies; a body with too many values is refused unbuilt.
3. The body is decoded, in a thread if the body is large. Unknown fields are ignored, and null equals absent.
4. A mistake names the field: malformed JSON is `MalformedBody`, a wrong type `InvalidField`. The request counts for the
   model that the body names.

`find_generator` finds the model: a catalog entry with the output `chat`. A request without a model, or for `default`,
means `generation.default_model`, or the only such model. An unknown name is answered with the names that exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from falcon.asgi import Request

from frontend.engine.interface import Models
from frontend.generation.errors import InvalidField, MalformedBody, WrongContentType
from frontend.generation.nested import written
from frontend.http.fields import check_values, fault_of, mismatch_of, model_in, stray_byte
from frontend.http.threads import off_loop_if
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.catalog.entries import TEXT, Catalog, ModelEntry
from ipc.decoding import learnt
from ipc.errors import BodyTooLarge, InvalidInput, ModelNotFound, PenstockError
from ipc.settings import Settings

MOST_NBYTES = 50 << 20
"""Largest body."""
LONG_NBYTES = 64 << 10
"""Bodies above this size are decoded by a thread."""
_PLACE = re.compile(r"(?P<text>.*?) - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
OUTPUT = TEXT
DEFAULT = "default"
STATUSES = {"loaded": "loaded", "loading": "reloading"}
"""Statuses of the contract for states of a model; all other states are `unloaded`."""
_MODEL = "model"
_SHOWN = 20
ORDERS = ("asc", "desc")
_DIGITS = 12
MOST_NUMBER = 10**_DIGITS
_ANTHROPIC = ("anthropic-version", "anthropic-beta")
T = TypeVar("T")
R = TypeVar("R")


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
                    entry = find_generator(named, services.directory, services.settings)
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
    if fault := stray_byte(body, binary=False):
        raise MalformedBody(fault)
    for names in aliases:
        _refuse_aliases(decoded, names)
    return decoded


def _check_nbytes(nbytes: int) -> None:
    if nbytes > MOST_NBYTES:
        raise BodyTooLarge(f"body: {nbytes} bytes, the limit is {MOST_NBYTES}")


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(learnt(kind), float_hook=written)


def _refusal(text: str) -> InvalidField:
    """The error of a wrong type, with the path of its field."""
    place = _PLACE.match(text)
    path, text = (place["path"], place["text"]) if place else ("", text)
    missing = _MISSING.search(text)
    if missing:
        path, text = f"{path}.{missing['name']}", "is required"
    text = text.replace("`", "")
    return InvalidField(path.lstrip(".") or "body", text[:1].lower() + text[1:])


def _refuse_aliases(request: object, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) > 1:
        raise InvalidField(given[1], f"is a duplicate of {given[0]}: send one of them")


def model_status(state: str) -> str:
    """The status of the contract for a state of a model."""
    return STATUSES.get(state, "unloaded")


def generators(catalog: Catalog) -> list[str]:
    """Names of the models that generate text, without variants of profiles."""
    return [name for name, entry in catalog.items() if OUTPUT in entry.outputs and ":" not in name]


def default_model(catalog: Catalog, settings: Settings) -> str:
    """The name that `default` stands for; empty if several models could be meant, or none."""
    if settings.generation.default_model:
        return settings.generation.default_model
    known = generators(catalog)
    return known[0] if len(known) == 1 else ""


def find_generator(
    name: str | None, directory: Models, settings: Settings, *, field: str = _MODEL
) -> ModelEntry:
    """Catalog entry of the model that a `field` of a request names.

    Raises `ModelNotFound` with the names that exist, `InvalidField` for a model that generates no text, and as
    `Models.find` while no model is known at all.
    """
    catalog = directory.catalog
    if name is None or name in ("", DEFAULT):
        name = default_model(catalog, settings)
    try:
        entry = directory.find(name)
    except ModelNotFound:
        if not name:
            all_names = generators(catalog)
            text = f"several could be meant; {_listing(all_names)}" if all_names else "none is served"
            raise ModelNotFound(f"{field}: no default model of generated text: {text}") from None
        why, known = catalog.absence(name), _listing(generators(catalog))
        text = f"model {name[:200]!a} does not exist{'; ' + why if why else ''}; {known}, or 'default'"
        raise ModelNotFound(text if field == _MODEL else f"{field}: {text}") from None
    if OUTPUT not in entry.outputs:
        raise InvalidField(field, f"'{entry.id}' generates no text; {_listing(generators(catalog))}")
    return entry


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"models of generated text: {', '.join(names[:_SHOWN]) or 'none'}{more}"


def named_model(services: Services, scope: RequestScope, name: str | None) -> ModelEntry:
    """The model that a request names. Raises as `find_generator`."""
    entry = find_generator(name, services.directory, services.settings)
    scope.names(entry.id)
    return entry


def owner_of(req: Request) -> str:
    """The public id of the caller's key, "" without keys: the owner of what the request stores."""
    scope: RequestScope = req.context.penstock
    return scope.grant.caller


def is_anthropic(req: Request | None) -> bool:
    """Whether a request asks for the form of Anthropic: a header of that name is present, with any value."""
    return req is not None and any(req.get_header(name) is not None for name in _ANTHROPIC)


def word(req: Request, name: str, known: Sequence[str], default: str) -> str:
    """A parameter that is one of some words. Raises `InvalidField`."""
    value = req.get_param(name) or default
    if value not in known:
        raise InvalidField(name, f"{value[:64]!a} is not one of {', '.join(known)}")
    return value


def number(req: Request, name: str, least: int, most: int, default: int) -> int:
    """A parameter that is a whole number. Raises `InvalidField`."""
    given = req.get_param(name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _DIGITS and least <= int(given) <= most):
        raise InvalidField(name, f"{given[:64]!a} is no whole number from {least} to {most}")
    return int(given)
