"""docs/errors.md: every error that a client can get, from the error tree and the contract's form of it."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc
from typing import Any

import msgspec

from frontend.protocols.registry import protocols
from frontend.protocols.sie.errors import render as sie_form
from frontend.protocols.sie.errors import render_openai
from frontend.server import state
from ipc import errors
from ipc.errors import PenstockError
from ipc.settings import Server

UNSEEN = (errors.Cancelled, errors.ConfigError, errors.ProtocolError)
"""The caller has gone, the server does not start, or the error stays between our own processes."""

_HEAD = """# Errors

Made by `make docs` from `ipc/errors.py`, `frontend/protocols/sie/errors.py` and `frontend/server/state.py`.

Every error is JSON, whatever `Accept` says: `{"detail": {"code": "...", "message": "..."}}` on paths of Penstock's own,
and the [form of its contract](#forms) on every other path. The message names the field, its value and the limit, and
never holds a path, an address or a stack trace. The header `X-SIE-Error-Code` repeats the code.

Of any server, such as that of `make run`:

```
curl -si localhost:8080/v1/encode/nobody/knows -H 'Content-Type: application/json' -d '{"items": [{"text": "hi"}]}'
```

```python
import httpx

answer = httpx.post("http://localhost:8080/v1/encode/nobody/knows", json={"items": [{"text": "hi"}]})
print(answer.status_code, answer.json()["detail"]["code"], answer.headers["X-Request-ID"])
```

- **Try again** when the answer has `Retry-After`: whole seconds, at least 1. The table shows what is said when nothing
  better is known; a full queue says what its drain rate promises, a load what it is still expected to take.
- **Every answer** has `X-Request-ID`; the log and the [status page](status.md) know the error by it.
- `/v1/embeddings` and `/v1/rerank` add `error` {`message`, `type`, `param`, `code`} and `message`, as OpenAI clients
  expect; the columns on the right are `error.code` and `error.type`.
- An unknown path is 404 `{"detail": "Not Found"}`, a wrong method 405 `{"detail": "Method Not Allowed"}`: only there
  `detail` is a text.
- An item that fails fails its request, with the first such item's code and a message that names all of them. Where the
  request asks for `item_errors`, the item has `error` {`code`, `message`} in the answer instead: [sie.md](sie.md).
- What a program of named tensors says of its input is told: [programs](#what-programs-say).

@FORMS@
## From the routes

| `detail.code` | HTTP | Retry-After | when | `error.code` | `error.type` |
|---|---|---|---|---|---|
"""
_FORMS = {
    "`/v1/encode`, `/v1/score/{model}`, `/v1/extract`, `/v1/admin`, and paths of no contract": "/v1/encode/m",
    "`/v1/embeddings`, `/v1/rerank`, `/v1/score`": "/v1/embeddings",
    "`/v1/models/{model}`": "/v1/models/m",
    "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`": "/v1/chat/completions",
    "`/v1/messages`": "/v1/messages",
    "`/v1/embed`, `/v2/embed`, `/v2/rerank` of Cohere": "/v2/embed",
    "`/api/chat`, `/api/embed` and others of ollama": "/api/chat",
    "`/embed`, `/similarity`, `/predict` and others of TEI": "/embed",
    "`/pooling`, `/score` of vLLM; `/embeddings` of infinity": "/pooling",
    "`/v2/models`, `/v2/repository` and others of KServe": "/v2/models/m/infer",
}
"""Paths as the page names them, and one of them."""
_FORMS_HEAD = """## Forms

Status and meaning are those of the table below for every contract; TEI and Messages have types and codes of their own.

| paths | fields of the body |
|---|---|
"""
_FORMS_END = """| `/api/infer`, `/api/status` and others of TRTIS v1 | none; the header `NV-Status` has the message |

A path that several servers have, such as `/rerank`, has the form of the server that `server.compatible` chooses.
"""
_BETWEEN = """
A code that stands more than once has more than one cause. Where the header differs from the body, the header is named
in brackets: clients of the SIE contract retry `MODEL_LOADING` and follow the header.

Further fields of `detail`:

| code | fields |
|---|---|
| MODEL_LOAD_FAILED | `error_class` ([lifecycle.md](lifecycle.md)), `attempts`, `permanent` |
| DEPENDENCY_CONFLICT | `compatible_bundles` |
| INPUT_TOO_LONG with 400 | `model` |
| QUEUE_FULL of a server that stops | `reason`: `draining`; beside `detail` stands `error`: `Service shutting down` |

## What programs say

A program of a [model repository](repository.md) refuses an input that passed the checks of its configuration: too
short, too long, an index out of range. The message has one line of what was raised, of at most 300 characters, without
directories, secrets and control characters. Over KServe v2 the codes of the table hold, over gRPC INVALID_ARGUMENT and
INTERNAL, over TRTIS v1 INVALID_ARG and INTERNAL.

- **400 INVALID_INPUT with the line**: INVALID_ARGUMENT of onnxruntime; a ValueError or IndexError, and `assert` in a
  script of TorchScript; what a runtime says of shapes, indices, and texts that are no numbers.
- **500 INFERENCE_ERROR with the line**: everything else that ONNX, TorchScript and `torch.export` raise.
- **500 INFERENCE_ERROR without**: everything else that a `model.py` or an adapter of a package raises. The log has it,
  since the words of Python code may be about anything. `ipc.errors.InvalidInput` is told as it is, with 400.

Families of texts and pictures raise no such errors: what they cannot read is refused item by item before a run.

## From the server itself

Before any route has seen the request, in the form of the protocol of the path. The connection is closed afterwards; ids
in the request's headers are not read.

| `detail.code` | HTTP | Retry-After | message |
|---|---|---|---|
"""
_REFUSALS = (
    state.malformed("malformed HTTP request"),
    state.head_too_large(Server().max_header_bytes),
    state.too_slow(100, 1024),
    state.too_many_connections(10000),
    state.draining(),
)


def render() -> str:
    """The whole page."""
    routes = sorted(map(_row, public_errors()))
    rows = [f"| {' | '.join(cells)} |" for _, *cells in routes]
    own = [
        f"| {body['detail']['code']} | {status} | {headers.get('Retry-After', '-')} | {body['detail']['message']} |"
        for status, body, headers in map(sie_form, _REFUSALS)
    ]
    return _HEAD.replace("@FORMS@", forms()) + "\n".join(rows) + "\n" + _BETWEEN + "\n".join(own) + "\n"


def public_errors(kind: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    """Errors of `ipc.errors` that clients can get: `kind` and its subclasses, without classes that only group others.

    Errors of other modules are left out, so that the page does not depend on which modules are imported.
    """
    if kind.__module__ == errors.__name__ and "code" in vars(kind) and kind not in UNSEEN:
        yield kind
    for child in kind.__subclasses__():
        yield from public_errors(child)


def _row(kind: type[PenstockError]) -> tuple[int, str, str, str, str, str, str]:
    """Cells of one error, behind the status, by which rows are sorted."""
    error = kind("")
    status, body, headers = sie_form(error)
    openai = render_openai(error)[1]["error"]
    code, header = body["detail"]["code"], headers["X-SIE-Error-Code"]
    shown = code if header == code else f"{code} ({header})"
    # The first part of a docstring is for clients; after "; `" follow the fields of the class.
    when = " ".join((getdoc(kind) or "").split("\n\n")[0].split()).partition("; `")[0]
    if kind is PenstockError:
        when = "A bug; the log has the request id"
    return (
        status,
        shown,
        str(status),
        headers.get("Retry-After", "-"),
        when.rstrip("."),
        openai["code"],
        openai["type"],
    )


def forms() -> str:
    """The form of an error on the paths of each contract, as the contracts render one."""
    known, error = protocols(), errors.ModelNotFound("no model m")
    rows = [
        f"| {paths} | {_fields(known.of(path).render_error(error, path)[1])} |\n"
        for paths, path in _FORMS.items()
    ]
    return _FORMS_HEAD + "".join(rows) + _FORMS_END


def _fields(body: Any) -> str:
    """The names of fields, those of an object in braces behind its name."""
    named = msgspec.to_builtins(body)
    return ", ".join(
        f"`{name}` {{{_fields(value)}}}" if isinstance(value, dict) else f"`{name}`"
        for name, value in named.items()
    )
