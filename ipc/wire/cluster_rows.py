"""Rows of the bucket of models: what each box tells of itself, and of each of its models."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ipc.catalog.entries import ModelEntry
from ipc.catalog.repository import VersionEntry
from ipc.wire.cluster import FIRST_KINDS, Message, read_message
from ipc.wire.cluster_configs import BoxConfigs
from ipc.wire.messages import ModelStatus

MOST_SLOTS = 1024
"""Most workers of a box that count for its share of sequences."""


class WorkerRow(msgspec.Struct, array_like=True, frozen=True):
    """A worker of a box, with the fields of `WorkerView`."""

    name: str
    number: int
    state: str
    responsive: bool
    preloaded: bool
    device: str
    threads: int


class BoxRow(Message, frozen=True, tag="box_row"):
    """A box in the bucket of models: its workers and the ids of its models, whose rows have keys of their own.

    `pool` is that of its settings; `profile` is its machine profile, in lower case, empty where the settings name none.
    `by_name`: models of repositories are loaded by name alone. `configs` is None for a box that knows nothing of
    configurations. `kinds` are those of the items that the box takes:
    kinds that came later than the version of the protocol need no other version. `slots` are the configured workers.
    """

    box: str
    life: str
    pool: str
    bundle: str
    workers: list[WorkerRow]
    is_told: bool
    models: list[str]
    profile: str = ""
    configs: BoxConfigs | None = None
    kinds: tuple[str, ...] = FIRST_KINDS
    slots: Annotated[int, msgspec.Meta(ge=1, le=MOST_SLOTS)] = 1
    by_name: bool = False


class ModelRow(Message, frozen=True, tag="model_row"):
    """A model of a box: its entry, one of the two, and by the names of workers the states of all of its variants.

    `chosen`: for a model of a repository, the versions that its files choose. `configured`: the box has the model by a
    configuration of the cluster alone, whose `document` is there, unless the box has yet to read its files. `wished`:
    the model was loaded (true) or unloaded (false) by name last.
    """

    life: str
    entry: ModelEntry | None
    version: VersionEntry | None
    states: dict[str, list[ModelStatus]]
    chosen: tuple[int, ...] = ()
    configured: bool = False
    document: dict[str, Any] | None = None
    wished: bool | None = None


Row = BoxRow | ModelRow


_row: msgspec.msgpack.Decoder[Row] = msgspec.msgpack.Decoder(Row)


def read_row(data: bytes) -> Row:
    """A row of the bucket of models. Raises `ProtocolError`."""
    return read_message(_row, data, "row")
