"""`penstock list` and `penstock show` of a server that is asked over HTTP: what that server has, wherever it runs."""

from __future__ import annotations

import http.client
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.errors import PenstockError
from penstock import files, target, terminal

_ASK_S = 10.0
_HEAD = ("MODEL", "OUTPUTS", "DIMS", "LENGTH", "STATE", "AS", "WEIGHTS", "CACHE")
_MEMORY = ("precision", "weight_bytes", "cache_bytes", "cache_tokens")
_CHAT = "chat"


class NotTold(PenstockError):
    """The server gave no answer, or one that is no list of models."""


class Listed(msgspec.Struct):
    """A model in the form of OpenAI. Only models that generate text say how they are shown `tools`, once loaded.

    Models that generate text also say in which `precision` their weights are, the bytes of weights and of the cache of
    keys and values, and how many tokens fit this cache.
    """

    id: str
    tools: str | None = None
    precision: str | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    cache_tokens: int | None = None


class Served(msgspec.Struct):
    """A model in the form of SIE; `outputs` leaves out the text of models that chat."""

    name: str
    state: str
    outputs: list[str] = []
    dims: dict[str, int] = {}
    max_sequence_length: int | None = None


class Answer(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[Listed]
    models: list[Served]


def print_list(
    url: str, key: str, words: Sequence[str], output: str | None, *, as_json: bool, may_say: str
) -> int:
    """Print the models of a server whose id and outputs have all `words`. Raises `NotTold`.

    `may_say` ends the message where no server answers.
    """
    try:
        answer = msgspec.json.decode(_asked(f"{url}/v1/models", key, may_say), type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotTold(
            f"{url} answers /v1/models with no list of models: is it a server of Penstock?"
        ) from None
    listed = {each.id: each for each in answer.data}
    rows = []
    for model in answer.models:
        one = listed.get(model.name) or Listed(model.name)
        outputs = [*model.outputs, *([_CHAT] if one.tools is not None else ())]
        text = " ".join((model.name, *outputs)).lower()
        if output in (None, *outputs) and all(word.lower() in text for word in words):
            memory = {name: getattr(one, name) for name in _MEMORY}
            rows.append({**msgspec.structs.asdict(model), "outputs": outputs, **memory})
    count = f"{len(rows)} models" if len(rows) != 1 else "1 model"
    print(f"penstock: {count} of the server at {url}", file=sys.stderr)
    print(terminal.as_json(rows) if as_json else "\n".join(files.fitted([_HEAD, *map(_cells, rows)])))
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        terminal.harmless(row["name"]),
        "+".join(row["outputs"]) or "-",
        str(next(iter(row["dims"].values()), "-")),
        str(row["max_sequence_length"] or "-"),
        row["state"],
        files.short_precision(row["precision"]),
        files.decimal_size(row["weight_bytes"]),
        files.decimal_size(row["cache_bytes"]),
    )


def print_one(url: str, key: str, model: str, *, as_json: bool) -> int:
    """Print what a server says of one model. Raises `NotTold`."""
    body = _asked(f"{url}/v1/models/{urllib.parse.quote(model)}", key, "")
    try:
        described = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotTold(f"{url} answers with no model: is it a server of Penstock?") from None
    print(terminal.as_json(described) if as_json else msgspec.yaml.encode(described).decode().rstrip())
    return 0


def _asked(address: str, key: str, may_say: str) -> bytes:
    """The body of an answer. Raises `NotTold`."""
    try:
        return target.fetched(address, key, _ASK_S)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = target.failure(error)
        if reason.startswith("401"):
            reason += f" (the key stands in {target.KEY_VARIABLE} or in --key-file)"
        raise NotTold(f"no answer from {address}: {reason}{may_say}") from None
