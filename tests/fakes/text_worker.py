"""A worker that generates text, played by a test behind the frontend's real channel, without a socket."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, cast

from frontend.engine.local.channel import Channel
from frontend.engine.local.dealer import Dealer
from ipc.errors import PenstockError
from ipc.wire.codec import ToWorker
from ipc.wire.messages import Cancel, Credits, Failure, ModelStatus, Result, Submit, Timing
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    FINISHED,
    HELD,
    PROMPT,
    QUEUED,
    REASONING,
    STARTED,
    TEXT,
    CalledFunction,
    Deltas,
    DeltasTaken,
    Finish,
    PromptToken,
    Start,
    TokenLogprob,
)


class Written(NamedTuple):
    """A piece of arguments."""

    text: str


Piece = tuple[str, list[PromptToken]]
"""Text and tokens of a prompt."""
Entry = tuple[int, int, str | int | bool | Start | Piece | CalledFunction | Written | Finish | None]
"""Request, choice, and what a step added: a text stands for one token, a text that begins with "?" is reasoning.

A number says that a prompt of so many tokens waits for the engine, as a start with weights does, None that the choice
goes on with text that waits.
True ends a call that is whole, False one whose arguments break off.
"""


def deltas(
    *entries: Entry,
    logprobs: dict[int, list[TokenLogprob]] | None = None,
    ids: dict[int, list[int]] | None = None,
) -> Deltas:
    """The message of one step; `ids` are those that some entries bring, by their numbers."""
    made = Deltas([], [], [], [], [], logprobs or {})
    for at, (request, choice, what) in enumerate(entries):
        text, tokens = "", 0
        if isinstance(what, str):
            kind, text, tokens = REASONING if what.startswith("?") else TEXT, what, 1
        elif isinstance(what, bool):
            kind = CALL_ENDED if what else CALL_CUT
        elif isinstance(what, Written):
            kind, text, tokens = ARGUMENTS, what.text, 1
        elif isinstance(what, int):
            kind, made.starts[at] = QUEUED, Start(what)
        elif isinstance(what, Start):
            kind, made.starts[at] = QUEUED if what.weights else STARTED, what
        elif isinstance(what, tuple):
            kind, text, made.prompts[at] = PROMPT, *what
        elif isinstance(what, CalledFunction):
            kind, tokens, made.calls[at] = CALLED, 1, what
        elif what is None:
            kind = HELD
        else:
            kind, made.finishes[at] = FINISHED, what
        for column, value in zip(
            (made.ids, made.choices, made.kinds, made.texts, made.tokens),
            (request, choice, kind, text, tokens),
            strict=True,
        ):
            cast("list[Any]", column).append(value)
    if ids:
        made.written.extend(array("I", ids.get(at, ())).tobytes() for at in range(len(entries)))
    return made


class TextWorker:
    """The other end of a channel. `sent` are the messages to the worker."""

    def __init__(self, channel: Channel, model: str = "m") -> None:
        self.channel = channel
        self.sent: list[ToWorker] = []
        self.revive(model)

    def revive(self, model: str = "m") -> None:
        """A worker joins that has loaded the model."""
        self.channel._dealer = cast("Dealer", self)
        self.channel.state = "ready"
        self.channel._on_credits(Credits(1000.0, 0.0, 100.0), b"")
        self.channel.models = {model: ModelStatus(model, "loaded")}

    def put(self, message: ToWorker, payload: object = None, introduction: object = None) -> None:
        """As `Dealer.put`."""
        self.sent.append(message)

    def flush(self) -> bool:
        """As `Dealer.flush`."""
        return True

    def close(self) -> None:
        """As `Dealer.close`."""

    @property
    def asked(self) -> list[Submit]:
        """The requests that came."""
        return [each for each in self.sent if isinstance(each, Submit)]

    @property
    def cancelled(self) -> list[int]:
        """The requests that were cancelled."""
        return [each.id for each in self.sent if isinstance(each, Cancel)]

    @property
    def taken(self) -> list[dict[int, int]]:
        """Bytes by request, for each message that told of taken text."""
        found = [each for each in self.sent if isinstance(each, DeltasTaken)]
        return [dict(zip(each.ids, each.nbytes, strict=True)) for each in found]

    def say(self, *entries: Entry, **more: Any) -> None:
        """One step."""
        self.channel._dispatch(deltas(*entries, **more), b"")

    def end(self, request: int) -> None:
        """The job is done."""
        self.channel._dispatch(Result(request, None, [], [], [], [], Timing(device_ns=7)), b"")

    def fail(self, request: int, error: PenstockError) -> None:
        """The job has failed."""
        self.channel._dispatch(Failure(request, error.code, error.message), b"")

    def die(self, *suspects: int, alone: bool = False) -> None:
        """The process has died, with these requests on its device, and others unless `alone`."""
        self.channel._reset("the worker process died", set(suspects), alone=alone)
