"""`penstock list` and `penstock show` of a server that is asked over HTTP: what that server has, wherever it runs."""

from __future__ import annotations

import http.client
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.errors import PenstockError
from penstock import target, terminal

_ASK_S = 10.0
_HEAD = ("MODEL", "OUTPUTS", "DIMS", "LENGTH", "STATE")
_CHAT = "chat"


class NotTold(PenstockError):
    """The server gave no answer, or one that is no list of models."""


class Listed(msgspec.Struct):
    """A model in the form of OpenAI. Only models that generate text say how they are shown `tools`, once loaded."""

    id: str
    tools: str | None = None


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
    except (msgspec.DecodeError, RecursionError):
        raise NotTold(
            f"{url} answers /v1/models with no list of models: is it a server of Penstock?"
        ) from None
    chats = {listed.id for listed in answer.data if listed.tools is not None}
    rows = []
    for model in answer.models:
        outputs = [*model.outputs, *([_CHAT] if model.name in chats else ())]
        text = " ".join((model.name, *outputs)).lower()
        if output in (None, *outputs) and all(word.lower() in text for word in words):
            rows.append({**msgspec.structs.asdict(model), "outputs": outputs})
    count = f"{len(rows)} models" if len(rows) != 1 else "1 model"
    print(f"penstock: {count} of the server at {url}", file=sys.stderr)
    print(terminal.as_json(rows) if as_json else "\n".join(terminal.table([_HEAD, *map(_cells, rows)])))
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        terminal.harmless(row["name"]),
        "+".join(row["outputs"]) or "-",
        str(next(iter(row["dims"].values()), "-")),
        str(row["max_sequence_length"] or "-"),
        row["state"],
    )


def print_one(url: str, key: str, model: str, *, as_json: bool) -> int:
    """Print what a server says of one model. Raises `NotTold`."""
    body = _asked(f"{url}/v1/models/{urllib.parse.quote(model)}", key, "")
    try:
        described = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
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
