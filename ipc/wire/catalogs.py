"""Messages by which frontends learn what may be served. Workers alone read the files.

1. A worker tells each frontend the entries of its catalog: all of them behind `Welcome`, then those that changed.
2. `Reread` has a worker look at the files at once. The worker tells what has changed before it sends `Replied`.
3. `Spread` is answered once all frontends have taken in what the worker has told so far. The worker asks each of them
   by `Told`, which they answer by `Heard`.
"""

from __future__ import annotations

from ipc.catalog.entries import ModelEntry
from ipc.catalog.repository import VersionEntry, Wish
from ipc.wire.messages import Wire


class Entries(Wire, frozen=True, tag="entries"):
    """The catalog of this worker has the entries `ids`, in that order, from files read at `read_ns`.

    `models` and `versions` are the entries that are others than the worker said before. `names` are the ids of all
    entries in the catalog's files, served or not.
    """

    read_ns: int
    ids: list[str]
    models: list[ModelEntry]
    versions: list[VersionEntry]
    names: list[str]


class Reread(Wire, frozen=True, tag="reread"):
    """Look at the files now; or, with a `draft`, only whether `model` could be served with what this wish brings."""

    id: int
    model: str = ""
    draft: Wish | None = None


class Spread(Wire, frozen=True, tag="spread"):
    """Answer when all frontends know what you have told."""

    id: int


class Replied(Wire, frozen=True, tag="replied"):
    """`Reread` or `Spread` has been done; `changed`: the files say something else than before.

    `code` and `message`: of an error of `ipc.errors`.
    """

    id: int
    changed: bool = False
    code: str = ""
    message: str = ""


class Told(Wire, frozen=True, tag="told"):
    """Answer when everything before this message is taken in."""

    id: int


class Heard(Wire, frozen=True, tag="heard"):
    """Everything before `Told` is taken in."""

    id: int
