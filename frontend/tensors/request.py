"""A request of named tensors as both tensor protocols understand it, and the reasons why it is not run.

The model has not been looked up yet. A protocol renders a reason in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from frontend.engine.interface import Block
from frontend.http.threads import Steps
from ipc.errors import ConfigError, DeadlineExceeded, ModelNotFound

Parameter = bool | int | float | str
CONTENT_TYPE = "content_type"
"""Parameter of requests, inputs and outputs: the name of a codec of MLServer."""
_FIRST = 1
"""The priority that goes before all others."""


@dataclass(slots=True)
class RegionUse:
    """A part of a registered shared memory region, by the region's name; not checked yet."""

    name: str
    offset: int
    nbytes: int


@dataclass(slots=True, frozen=True)
class Plan:
    """The tensor that a recipe will make: its `shape`, and the `pixels` of all its images."""

    shape: list[int]
    pixels: int = 0


class Recipe(Protocol):
    """Makes a tensor of other data that a client sent (images). Both methods are long work and yield between steps.

    They raise `InvalidInput` for data of another form, `BodyTooLarge` for a tensor that would be too large.
    """

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Shape and size of the tensor, before any work is done."""

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """Put the tensor of that shape into its place, which may hold anything."""


@dataclass(slots=True)
class InputTensor:
    """One input as it was sent.

    `shape` includes the batch dimension. `data` are the raw bytes (`ipc.memory.datatypes`), None for an input in
    `region`. With a `recipe` the raw bytes are made of `data` once there is room; dimensions that only the recipe knows
    are -1 until then. `content_type` is the codec of MLServer that the client named ("": none), for catalog models.
    """

    name: str
    datatype: str
    shape: list[int]
    data: bytes | memoryview | None
    region: RegionUse | None = None
    recipe: Recipe | None = None
    content_type: str = ""


@dataclass(slots=True)
class WantedOutput:
    """One output that is wanted: the tensor, its `classes` highest entries (None: no), or written to a region.

    `content_type` is the codec of MLServer that the client named ("": none); catalog models check the name.
    """

    name: str
    classes: int | None = None
    region: RegionUse | None = None
    content_type: str = ""


@dataclass(slots=True)
class Sequence:
    """Place in a sequence; `id` 0 or "" means none."""

    id: int | str = 0
    start: bool = False
    end: bool = False


@dataclass(slots=True)
class TensorRequest:
    """One inference request.

    `version` None is the latest that is ready. `outputs` None are all. `batch_size` is what a protocol states apart
    from the shapes (None: it does not). `priority` 0 is the default and 1 the highest; `timeout_us` 0 is none.
    `parameters` go to the model. `block` is the memory in which inputs arrived (`uploading.Body.block`): workers read
    `data` there that are slices of the block.
    """

    model: str
    version: int | None
    inputs: list[InputTensor]
    outputs: list[WantedOutput] | None
    batch_size: int | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict)
    sequence: Sequence = field(default_factory=Sequence)
    priority: int = 0
    timeout_us: int = 0
    block: Block | None = None

    @property
    def lane(self) -> str:
        """The lane by the priority; "": by the cost."""
        return "" if not self.priority else "interactive" if self.priority == _FIRST else "bulk"


Reason = Literal["model", "version", "unloaded", "failed"]


class UnavailableModel(ModelNotFound):
    """No such model or version, or the model was unloaded or failed to load (`reason`)."""

    def __init__(self, model: str, version: int | None, reason: Reason, why: str = "", **detail: Any) -> None:
        """`why` adds details, such as the error of the load."""
        named = f"model {model[:200]!a}" + (f" version {version}" if version is not None else "")
        super().__init__(f"{named} is not available ({reason}{': ' + why if why else ''})", **detail)
        self.model, self.version, self.reason, self.why = model, version, reason, why


class TimeoutExpired(DeadlineExceeded):
    """The `timeout` that the request itself states passed before it ran; unlike the client's deadline, that is 503."""

    status = 503


_SECRETS = frozenset(("authorization", "cookie", "proxy-authorization", "x-api-key"))


class Forwarding:
    """The header fields that become parameters, by `kserve.forward_headers`.

    These are all fields whose lower-case name matches the whole pattern; none for "". Raises `ConfigError`.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ConfigError(f"kserve.forward_headers: not a regular expression: {error}") from None

    @property
    def active(self) -> bool:
        """Whether any field may be forwarded."""
        return self._pattern is not None

    def apply(self, headers: Mapping[str, str | bytes], request: TensorRequest) -> None:
        """Add the fields to the parameters of a request. Its own parameters win; credentials stay here.

        `headers` are by lower-case name; binary ones, which only gRPC has, are not forwarded.
        """
        if self._pattern is None:
            return
        for name, value in headers.items():
            if isinstance(value, str) and name not in _SECRETS and self._pattern.fullmatch(name):
                request.parameters.setdefault(name, value)
