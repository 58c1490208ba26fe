"""The routes of vectors and scores over models of this process, whose results follow from the texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from falcon.testing import TestClient

from frontend.app import Application
from frontend.engine.answer import CopyBudget
from frontend.http.listeners import Listeners
from frontend.protocols.registry import protocols
from ipc.catalog.entries import ModelEntry, OutputSpec
from ipc.errors import InputTooLong
from ipc.wire import extraction, tokens
from ipc.wire.extraction import Classification, Extraction
from ipc.wire.messages import (
    EncodeCall,
    ExtractCall,
    InputItem,
    ModelStatus,
    ScoreCall,
    TokenizeCall,
    Work,
)
from ipc.wire.tokens import TextTokens
from tests.fakes.engine import Arrays, InProcessDirectory, InProcessEngine, Model
from tests.fakes.generation_server import app_of
from tests.fakes.tensors import entry, services_of

LONGEST = 40
"""Characters of a text that fit the models."""
DENSE, SCORE, CLASSIFIER, CHAT = "org/dense", "org/score", "org/classifier", "org/chat"
PICTURES = "org/pictures"
"""A model that takes texts and pictures."""
LABELS = ["even", "odd"]
CLASSIFIER_OPTIONS = {"threshold": 0.5, "top_k": 1}
"""Options of the classifier's entry, which the routes of SIE follow. Those of other servers give all classes."""


def lengths(work: Work, given: Arrays) -> Arrays:
    """The number of characters, ids or bytes of each input, 1, and whether the inputs are queries."""
    call = work.call
    assert isinstance(call, EncodeCall)
    counts = [len(item.ids or item.text or next(iter(item.images), b"")) for item in call.items]
    if call.overflow == "error" and max(counts) > LONGEST:
        raise InputTooLong(f"inputs[{counts.index(max(counts))}]: {max(counts)}, the limit is {LONGEST}")
    return {"dense": np.array([[count, 1.0, bool(call.is_query)] for count in counts], np.float32)}


def numbers(work: Work, given: Arrays) -> Arrays:
    """The number that ends each text as its score, and a tenth of the length of a text of its own before it."""
    assert isinstance(work.call, ScoreCall)
    found = [_number(item.text or "") + len(item.first or "") / 10 for item in work.call.items]
    return {"score": np.array(found, np.float32)}


def _number(text: str) -> float:
    last = text.rpartition(" ")[2]
    return float(last) if last.isdecimal() else 0.0


def classes(work: Work, given: Arrays) -> Arrays:
    """The class of the number of words, in pairs of both texts, and the other one; at most `top_k` of them."""
    call = work.call
    assert isinstance(call, ExtractCall)
    found = []
    for item in call.items:
        likeliest = 2.0 if call.options.get("function_to_apply") == "none" else 0.75
        first = len(f"{item.first or ''} {item.text or ''}".split()) % 2
        entries = [
            Classification(LABELS[first], likeliest),
            Classification(LABELS[1 - first], 1 - likeliest),
        ]
        found.append(extraction.pack(Extraction(classifications=entries[: call.options.get("top_k")])))
    return {"extraction": found}


def letters(work: Work, given: Arrays) -> Arrays:
    """Each character as a token of its number, with 0 before where special tokens belong; and back.

    Of a conversation all that is said.
    """
    call = work.call
    assert isinstance(call, TokenizeCall)
    if call.prompt is not None:
        said = "".join(message["content"] for message in call.prompt.messages or ())
        return {"tokens": [_characters(InputItem(said), special=True)]}
    return {"tokens": [_characters(item, call.special) for item in call.items]}


def _characters(item: InputItem, special: bool) -> bytes:
    if item.text is None:
        return "".join("^" if number == 0 else chr(number) for number in item.ids or ()).encode()
    before, size = int(special), len(item.text)
    return tokens.pack(
        TextTokens(
            [0] * before + [ord(letter) for letter in item.text],
            ["^"] * before + list(item.text),
            [0] * before + list(range(size)),
            [0] * before + list(range(1, size + 1)),
            [True] * before + [False] * size,
        )
    )


def reading(model: Model) -> Model:
    """A model that tokenizes too."""
    return lambda work, given: (letters if isinstance(work.call, TokenizeCall) else model)(work, given)


_MODELS: dict[str, tuple[str, Model]] = {
    DENSE: ("dense", reading(lengths)),
    PICTURES: ("dense", lengths),
    SCORE: ("score", reading(numbers)),
    CLASSIFIER: ("json", reading(classes)),
    CHAT: ("chat", letters),
}


class VectorServer:
    """All protocols over the models of `served`, and over further dense ones by name."""

    def __init__(
        self, root: Path, *more: str, served: tuple[str, ...] = (DENSE, SCORE, CLASSIFIER), **settings: Any
    ) -> None:
        """`settings` as `section__field`."""
        chosen = {name: _MODELS[name] for name in served} | dict.fromkeys(more, _MODELS[DENSE])
        entries = [_entry(name, output) for name, (output, _) in chosen.items()]
        self.services = services_of(root, entries, [], **settings)
        self.services.engine.client.inputs.close()  # type: ignore[attr-defined]
        statuses = [
            ModelStatus(
                name,
                "loaded",
                max_sequence_length=LONGEST,
                dims={"dense": 3},
                **_KNOWN.get(name, _READING),
            )
            for name in chosen
        ]
        directory = InProcessDirectory(self.services.catalog, statuses)
        self.engine = InProcessEngine(directory, {name: model for name, (_, model) in chosen.items()})
        self.services.engine, self.services.directory = self.engine, directory
        self.services.copies = CopyBudget(1 << 20)
        chosen_settings = self.services.settings
        known = protocols(chosen_settings.server.compatible, is_gateway=chosen_settings.is_gateway)
        app = app_of(self.services, known)
        self.client = TestClient(app)
        self.application = Application(app, known, self.services, Listeners(self.services.settings.server))

    def post(self, path: str, body: Any) -> Any:
        """The response to JSON."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return self.client.simulate_post(path, body=raw, headers={"Content-Type": "application/json"})

    @property
    def calls(self) -> Iterator[Any]:
        """What the models were asked, the last first."""
        return (work.call for work in reversed(self.engine.works))


_READING = {"uses": ["prompt_name"]}
_KNOWN: dict[str, Any] = {CLASSIFIER: {"labels": LABELS, "uses": ["function_to_apply"]}}


def _entry(name: str, output: str) -> ModelEntry:
    if output == "json":
        return entry(
            name, adapter="text_classification", outputs={output: OutputSpec()}, runtime=CLASSIFIER_OPTIONS
        )
    inputs = ("text", "image") if name == PICTURES else ("text",)
    return entry(name, adapter="dense", inputs=inputs, outputs={output: OutputSpec()})
