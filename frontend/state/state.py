"""The stores of one frontend, and the work that no request asks for.

1. Stores open nothing until they are used. All frontends of a server use the same files.
2. Every `SWEEP_EVERY_S` each frontend deletes what has expired, and orphans of killed processes. Sweeps of several
   frontends do no harm to one another.
3. After each sweep a thread asks for room: the file system, so that operators learn of a full disk before clients do,
   or whether brokers have refused the last write for their room.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from frontend.state.approvals import ApprovalStore
from frontend.state.content import in_thread
from frontend.state.files import FileStore
from frontend.state.places import OnDisk, Place
from frontend.state.sessions import SessionStore
from frontend.state.skills import SkillStore
from ipc.errors import PenstockError
from ipc.settings import Settings

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 120.0


class State:
    """The stores. To be made after the fork."""

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        """Opens nothing yet. Without a `place` the state lies in the state directory."""
        root, bounds = settings.state_root, settings.state
        self._least_nbytes = bounds.max_file_bytes
        self.kept = (0, 0)
        """Number and bytes of files at the last sweep."""
        self.is_full = False
        """Whether `lacks_room` was true at the last sweep."""
        self.place = place or OnDisk(root)
        self.files = FileStore(self.place, bounds)
        self.sessions = SessionStore(self.place, bounds)
        self.approvals = ApprovalStore(self.place, bounds)
        skills_dir = bounds.skills_dir if place is None else ""
        self.skills = SkillStore(OnDisk(Path(skills_dir)) if skills_dir else self.place, bounds)
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Sweep from now on. On the event loop."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    def end(self) -> None:
        """Sweep no more."""
        if self._sweeping is not None:
            self._sweeping.cancel()

    def lacks_room(self) -> bool:
        """Whether there is less room than one upload may take (`state.max_file_bytes`)."""
        return self.place.lacks_room(self._least_nbytes)

    async def _sweep(self) -> None:
        while True:
            for store in (self.files, self.sessions, self.approvals, self.skills):
                try:
                    await store.sweep()
                except (OSError, PenstockError) as error:
                    log.warning("expired objects of the state directory could not be deleted: %s", error)
            with suppress(PenstockError):
                self.kept = await self.files.totals()
            self.is_full = await in_thread(self.lacks_room)
            await asyncio.sleep(SWEEP_EVERY_S)
