"""Parameters of the query, the owner of what a request stores, and the dialect of a request."""

from __future__ import annotations

from collections.abc import Sequence

from falcon.asgi import Request

from frontend.generation.errors import InvalidField
from frontend.scope import RequestScope

ORDERS = ("asc", "desc")
_DIGITS = 12
MOST_NUMBER = 10**_DIGITS
_ANTHROPIC = ("anthropic-version", "anthropic-beta")


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
