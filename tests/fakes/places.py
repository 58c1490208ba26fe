"""Places of stored objects for tests: a directory, or brokers in memory with a gateway for each place that is made.

`place_at(root)` is the place of one more process. All places of a root have the same objects. The fixture `kept_in`
says of which kind: a test that `in_both_places` decorates runs for both, and all others for directories.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.cluster.place import ClusterPlace
from frontend.state.places import OnDisk, Place
from ipc.settings import load
from ipc.wire.cluster_names import Names
from tests.fakes.streams import StreamClient, Streams

in_both_places = pytest.mark.parametrize("kept_in", ["disk", "brokers"], indirect=True)
_numbers = itertools.count(1)
_alive = {"cluster"}
_brokers: dict[Path, Streams] | None = None


class NamedLives:
    """One of the gateways of this process. All of these live, until `_alive` has them no more."""

    def __init__(self, name: str) -> None:
        self._name = name
        _alive.add(name)

    def own(self) -> str:
        return self._name

    def server(self) -> str:
        return "cluster"

    def is_running(self, identity: str) -> bool:
        return identity in _alive


@pytest.fixture(autouse=True)
def kept_in(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where places of the test keep their objects."""
    global _brokers
    kind = getattr(request, "param", "disk")
    _brokers = {} if kind == "brokers" else None
    yield kind
    _brokers = None


def streams_at(root: Path) -> Streams:
    """The brokers of the places of a root."""
    assert _brokers is not None
    return _brokers.setdefault(root, Streams())


def gateway_at(root: Path, client: StreamClient | None = None) -> Any:
    """The place of one more gateway; its client of the brokers is `place._broker`."""
    name = f"gateway{next(_numbers)}"
    settings = load(None, {"run.dir": str(root / name)})
    broker: Any = client or StreamClient(streams_at(root))
    return ClusterPlace(settings, broker, Names(), NamedLives(name), 0)


def place_at(root: Path) -> Place:
    """The place of one more process."""
    if _brokers is None:
        return OnDisk(root)
    place: Place = gateway_at(root)
    return place


def contents_at(root: Path, store: str) -> set[str]:
    """Names of the contents of a store that are kept: those of a directory, or those at the brokers."""
    if _brokers is None:
        return {path.name for path in (root / store).iterdir()}
    prefix = f"$KV.penstock_files.{store}."
    stream = streams_at(root).by_name.get("KV_penstock_files")
    subjects = [] if stream is None else stream.messages
    return {
        subject.removeprefix(prefix).partition(".")[0] for subject in subjects if subject.startswith(prefix)
    }
