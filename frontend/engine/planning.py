"""What a request asks of a model, decided once: its model, its options, its cost, its lane, its `Work` and its `Pace`.

1. `default_model` finds the model of a request that names none, as requests of TEI and its like do: the first of
   `server.default_models` that gives what the request asks for, or else the only served model that does. Otherwise the
   request is refused with the names of the models that would do.
2. `resolve` settles the options, by one rule for encode, score and extract: options of the request replace the runtime
   options of the profile (`options.profile`, or the default profile).
3. `cost_of` estimates the tokens, and `lane_of` chooses the lane by them.
4. `plan` makes the `Work` that travels to a worker; the engine adds the deadlines. `pace_of` makes the pace of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.engine.events import Pace
from frontend.engine.interface import Models
from frontend.http.fields import check_shared
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope
from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.option_names import OVERFLOW_POLICIES
from ipc.errors import ConfigError, InvalidInput, ModelNotFound
from ipc.settings import Limits, Settings
from ipc.wire.field_names import IN_PARAMS, FieldNames
from ipc.wire.messages import (
    Call,
    EncodeCall,
    ExtractCall,
    GenerateCall,
    InputItem,
    ModelStatus,
    ScoreCall,
    TokenizeCall,
    Work,
)
from ipc.wire.streams import WINDOW

_SHOWN = 10
UNNAMED = ("default/not-specified",)
"""Names that clients send where they name no model."""
_INLINE_NBYTES = 512 << 10
"""Inputs up to this size are looked at on the event loop."""


def default_model(directory: Models, settings: Settings, outputs: Sequence[str], family: str = "") -> str:
    """Name of the model that is meant by a request for one of `outputs`.

    Where several families have the output, only models of `family` can answer. Raises `ModelNotFound`, and as
    `Models.find` while no model is known at all.
    """
    catalog = directory.catalog
    known = [name for name in catalog if ":" not in name and _gives(catalog, name, outputs, family)]
    named = [name for name in settings.server.default_models if _gives(catalog, name, outputs, family)]
    if named or len(known) == 1:
        return (named or known)[0]
    kind = f"{' or '.join(outputs)}{f' of {family}' if family else ''}"
    if not known:
        with suppress(ModelNotFound):
            directory.find("")
        raise ModelNotFound(f"the request names no model, and no served model gives {kind}")
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    raise ModelNotFound(
        f"the request names no model, and several give {kind}: {', '.join(known[:_SHOWN])}{more}; "
        "server.default_models chooses one"
    )


def is_served(catalog: Catalog, outputs: Sequence[str], family: str = "") -> bool:
    """Whether a served model takes text, gives one of `outputs`, and is of `family` if that is said."""
    return any(_gives(catalog, name, outputs, family) for name in catalog)


def check(catalog: Catalog, settings: Settings) -> None:
    """Raise `ConfigError` for models of the settings that cannot do what the settings ask of them.

    They are `server.default_models`, which have to be served, and `agent.search_embedding_model`.
    """
    unknown = next((name for name in settings.server.default_models if name not in catalog), None)
    if unknown is not None:
        raise ConfigError(f"server.default_models: no model {unknown[:200]!r} is served")
    name = settings.agent.search_embedding_model
    if name and not _gives(catalog, name, ("dense",), ""):
        kind = "takes texts and gives dense vectors" if name in catalog else "is served"
        raise ConfigError(f"agent.search_embedding_model: no model {name[:200]!r} {kind}")


def model_named(
    request: object, directory: Models, settings: Settings, outputs: Sequence[str], family: str = ""
) -> str:
    """The field `model` of a request, else `default_model`."""
    named: str = getattr(request, "model", None) or ""
    return named if named not in ("", *UNNAMED) else default_model(directory, settings, outputs, family)


def _gives(catalog: Catalog, name: str, outputs: Sequence[str], family: str) -> bool:
    """`is_served` of the model of that name."""
    entry = catalog.get(name)
    if entry is None or "text" not in entry.inputs or (family and entry.adapter != family):
        return False
    return not entry.outputs.keys().isdisjoint(outputs)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The entry to run on, whether its profile was named, and the options that hold for this request."""

    entry: ModelEntry
    explicit: bool
    options: dict[str, Any]
    instruction: str | None
    overflow: str
    lora: str

    def encode(
        self, items: list[InputItem], outputs: list[str], is_query: bool | None, names: FieldNames
    ) -> EncodeCall:
        """A call for `outputs`. Where the request states no side by `is_query`, the options may."""
        side = side_of(self.options) if is_query is None else is_query
        return EncodeCall(
            items, outputs, self.instruction, side, self.options, self.overflow, self.lora, names
        )

    def score(self, items: list[InputItem], query: InputItem, names: FieldNames) -> ScoreCall:
        """A call for the score of each item."""
        return ScoreCall(items, query, self.instruction, self.options, self.overflow, self.lora, names)

    def extract(
        self, items: list[InputItem], labels: list[str], schema: dict[str, Any] | None, names: FieldNames
    ) -> ExtractCall:
        """A call for what `labels` or `schema` ask for."""
        return ExtractCall(
            items, labels, schema, self.instruction, self.options, self.overflow, self.lora, names
        )


def typed(options: dict[str, Any], name: str, kind: type, text: str, before: str) -> Any:
    """`options[name]`, or None. Raises `InvalidInput` when it is not a `kind` (called `text` in the message).

    `before` is as in `FieldNames.options`.
    """
    value = options.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise InvalidInput(f"{before}{name}: expected {text}, got {type(value).__name__}")
    return value


def check_dimensions(value: int | None, entry: ModelEntry, width: int, where: str) -> int | None:
    """The requested width of dense vectors. Raises `InvalidInput` outside 1..width or off the model's list."""
    if value is None:
        return None
    if not 1 <= value <= width:
        raise InvalidInput(f"{where}: {value} is outside 1..{width}")
    if entry.dimensions and value not in entry.dimensions:
        raise InvalidInput(f"{where}: {value} is not one of {', '.join(map(str, entry.dimensions))}")
    return value


def side_of(options: dict[str, Any]) -> bool | None:
    """Whether the items are queries by the option `is_query`, with any truthy value; None where no side is stated."""
    value = options.get("is_query")
    return None if value is None else bool(value)


def resolve(
    entry: ModelEntry,
    given: dict[str, Any] | None,
    instruction: str | None,
    catalog: Catalog,
    items: int,
    limits: Limits,
    names: FieldNames = IN_PARAMS,
) -> Resolved:
    """Resolve the options of a request over `items` items. Raises `InvalidInput` that names the field."""
    request, before = _present(given), names.options
    if not request and not entry.runtime and instruction is None:
        # PERF: most requests have no options, and their models no options of their own.
        return Resolved(entry, ":" in entry.id, {}, None, OVERFLOW_POLICIES["default"], "")
    entry, explicit = _choose(entry, request, catalog, before)
    options = {**entry.runtime, **request}
    options.pop("profile", None)
    if instruction is None:
        instruction = typed(options, "instruction", str, "str", before)
    if instruction is not None:
        check_shared(instruction, f"{before.removesuffix('options.')}instruction", items, limits)
    overflow = _overflow(options, before)
    return Resolved(entry, explicit, options, instruction, overflow, _lora(request, entry.runtime, before))


def check_options(given: dict[str, Any] | None, names: FieldNames = IN_PARAMS) -> None:
    """Raise `InvalidInput` for options that no model could take, by their types and the overflow policy."""
    if not given:
        return
    options, before = _present(given), names.options
    for name in ("profile", "instruction"):
        typed(options, name, str, "str", before)
    _overflow(options, before)
    _lora(options, {}, before)


def _present(given: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None} if given else {}


def target_of(entry: ModelEntry, options: dict[str, Any] | None, catalog: Catalog) -> ModelEntry:
    """The entry that a request will run on: of the profile in `options`, if the model has the profile, else `entry`."""
    profile = (options or {}).get("profile")
    if isinstance(profile, str) and profile != "default" and profile in entry.profiles:
        return catalog.find(f"{entry.id}:{profile}")
    return entry


def _choose(
    entry: ModelEntry, options: dict[str, Any], catalog: Catalog, before: str
) -> tuple[ModelEntry, bool]:
    profile = typed(options, "profile", str, "str", before)
    if profile is None:
        return entry, ":" in entry.id
    known = sorted({"default", *entry.profiles})
    if profile not in known:
        raise InvalidInput(
            f"{before}profile: unknown profile {profile[:64]!r}, available are {', '.join(known)}"
        )
    return (entry if profile == "default" else catalog[f"{entry.id}:{profile}"]), True


def _overflow(options: dict[str, Any], before: str) -> str:
    policy = typed(options, "overflow_policy", str, "str", before)
    if policy is not None and policy not in OVERFLOW_POLICIES:
        known = ", ".join(OVERFLOW_POLICIES)
        raise InvalidInput(f"{before}overflow_policy: {policy[:64]!r} is not one of {known}")
    return OVERFLOW_POLICIES[policy or "default"]


def lora_of(entry: ModelEntry) -> str:
    """The LoRA adapter of a model's own options, empty without one. Raises `InvalidInput` for one that is no name."""
    return _lora({}, entry.runtime, "runtime.") if entry.runtime else ""


def _lora(request: dict[str, Any], runtime: dict[str, Any], before: str) -> str:
    """The request's LoRA adapter under either name, else the profile's."""
    for options in (request, runtime):
        for name in ("lora", "lora_id"):
            adapter = typed(options, name, str, "str", before)
            if adapter is not None:
                return str(adapter)
    return ""


def plan(
    scope: RequestScope,
    settings: Settings,
    model: str,
    call: Call,
    cost: int,
    *,
    lane: str = "",
    streams: bool = False,
    tensors: bool = False,
) -> Work:
    """The work of a request. `lane` empty: chosen by the cost; `streams`: the answer comes in parts.

    `tensors`: a request of named tensors, whose runs are counted in the statistics.
    """
    return Work(
        model,
        call,
        0,
        cost,
        scope.request_id,
        scope.traceparent,
        lane or lane_of(cost, settings),
        scope.grant.caller,
        scope.grant.share,
        WINDOW if streams else 0,
        tensors=tensors,
    )


def pace_of(scope: RequestScope, settings: Settings, recorder: Recorder, model: str) -> Pace:
    """How fast the text of a request for a model has to come, and where its tokens are counted."""
    meter = recorder.text(model, scope.grant.name, scope.http.route if scope.http is not None else "")
    first_by_ns = min(scope.waits_until_ns, scope.deadline_ns)
    return Pace(scope.began_ns, first_by_ns, settings.generation.idle_timeout_s, meter)


def lane_of(cost: int, settings: Settings) -> str:
    """`bulk` for a request above `batch.bulk_tokens`: bulk work waits behind interactive work."""
    return "bulk" if cost > settings.batch.bulk_tokens else "interactive"


def is_long(work: Work) -> bool:
    """Whether a look at all inputs would hold up the event loop: much work, or large texts and images.

    The cost alone does not tell: an image costs the same whatever its file's size, and a long text is cut.
    """
    if work.lane == "bulk":
        return True
    items = work.call.items
    return sum([len(item.text or "") + sum(map(len, item.images)) for item in items]) > _INLINE_NBYTES


def part_of(work: Work, places: Sequence[int], settings: Settings) -> Work:
    """The work of some items of a call; each has a share of the estimated cost by its tokens."""
    assert isinstance(work.call, (EncodeCall, ScoreCall, ExtractCall))
    sizes = tokens_of(work.call)
    cost = max(1, work.cost * sum([sizes[at] for at in places]) // sum(sizes))
    call = msgspec.structs.replace(work.call, items=[work.call.items[at] for at in places])
    return msgspec.structs.replace(work, call=call, cost=cost, lane=lane_of(cost, settings))


def tokens_of(call: Call) -> list[int]:
    """Estimated tokens that each item of a call puts before the model: four characters a token, and two around."""
    return [characters // 4 + 2 for characters in _characters_of(call)]


def _characters_of(call: Call) -> list[int]:
    """Characters that each item of a call puts before the model, four for each token id given.

    Most families read the labels with each item.
    """
    if isinstance(call, GenerateCall):
        return [_prompt_characters(call)]
    if isinstance(call, TokenizeCall) and call.prompt is not None:
        return [_prompt_characters(call.prompt)]
    before = len(call.instruction or "")
    if isinstance(call, ScoreCall):
        before += len(call.query.text or "")
    elif isinstance(call, ExtractCall):
        before += sum(len(label) + 4 for label in call.labels)
    return [
        before + len(item.first or "") + (4 * len(item.ids or ()) if item.text is None else len(item.text))
        for item in call.items
    ]


def _prompt_characters(call: GenerateCall) -> int:
    """Characters of a prompt: its text, four for each token id, or the messages with some for their frames."""
    if call.messages is None:
        return 4 * len(call.ids or ()) if call.text is None else len(call.text)
    functions = len(msgspec.json.encode(call.tools.functions)) if call.tools else 0
    return functions + sum(_content_characters(message.get("content")) + 32 for message in call.messages)


def _content_characters(content: str | Sequence[dict[str, Any]] | None) -> int:
    """Characters of the content of a message, of its texts where it has pictures too."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.get("text") or "") for part in content)


def cost_of(call: Call, status: ModelStatus, limits: Limits) -> int:
    """Estimated tokens of a call: its texts, each cut at the model's length, and its images."""
    longest = limits.max_chunked_tokens if call.overflow == "chunk" else status.max_sequence_length or 512
    texts = sum(min(each, longest) for each in tokens_of(call))
    return texts + _images_of(call) * status.image_tokens


def _images_of(call: Call) -> int:
    """Items of a call that are images, its query included; pictures of a conversation."""
    if isinstance(call, GenerateCall):
        return len(call.images)
    count = sum(1 for item in call.items if item.images)
    return count + (isinstance(call, ScoreCall) and bool(call.query.images))
